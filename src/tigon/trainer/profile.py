"""`tigon profile`: the first steps of a recipe with every allocation recorded, then one step with every operator timed.

The two are apart because recording allocations takes time on a CPU, and timing must not be disturbed. What is recorded
begins before the model is loaded. Evaluation, samples and checkpoints are left out. Two profiles side by side are made
by two fresh processes, so that neither finds what the other left in the allocator.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tigon.data import sources
from tigon.errors import RecipeError, RunFolderError, TigonError, UsageError
from tigon.objectives import recipe_checks
from tigon.planner.search.recommend import label
from tigon.profiler.render import page, result, tables
from tigon.profiler.render.result import Predicted, Profile
from tigon.profiler.timeline import timeline_chart
from tigon.recipe.keys import ComparisonConfig, Recipe
from tigon.trainer import model, prepare
from tigon.trainer.distributed import launch
from tigon.trainer.guards import prediction, preflight

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.trainer.prepare import Prepared

TRACED_STEPS = 2
"""After the recorded ones: one in which the profiler warms up, one that it times."""
OPS, PAGE, CHART = "ops.json", "profile.html", "timeline.svg"
STOPPED = "stopped"
"""The fact that says why a run ended early."""


@dataclass(frozen=True)
class ProfileRequest:
    """What is profiled: a recipe with its overrides, and beside it perhaps another."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    steps: int = 2
    beside: Path | None = None
    """Another recipe; none: the same."""
    beside_overrides: tuple[str, ...] = ()
    """Further overrides of the other one."""
    out: Path | None = None

    @property
    def is_pair(self) -> bool:
        return self.beside is not None or bool(self.beside_overrides)


def profile(request: ProfileRequest) -> Path:
    """Profile what is asked; the folder written. Raises RecipeError and its kinds, mostly before anything runs."""
    preflight.check_packages()
    if request.steps < 1:
        raise UsageError(f"--steps {request.steps}: at least one step is recorded")
    recipe = _short(
        recipe_checks.load(request.recipe, request.overrides, gpu_present=preflight.gpu_present), request.steps
    )
    preflight.check_process(recipe.train.workers)
    other = None
    if request.is_pair:
        path, overrides = request.beside or request.recipe, (*request.overrides, *request.beside_overrides)
        other = _short(recipe_checks.load(path, overrides, gpu_present=preflight.gpu_present), request.steps)
    prepare.quiet_libraries(recipe)
    for each in filter(None, (recipe, other)):
        sources.check(each.data.source)
        sources.check(each.data.eval_source, "data.eval_source")
        processes = max(each.sharding.gpus, launch.world_size())
        if processes > 1:
            raise RecipeError(
                f"sharding.gpus is {processes}, and a profile is of one process; set sharding.gpus=1, or "
                "profile on one GPU what each of them does"
            )
    with _folder(request.out, recipe) as (folder, place):
        if other is None:
            profiles = [_profile_here(recipe, request.steps, folder)]
        else:
            profiles = [
                _profile_in_a_process(request.recipe, request.overrides, request.steps, folder / "A"),
                _profile_in_a_process(path, overrides, request.steps, folder / "B"),
            ]
            profiles = _told_apart(profiles, request)
        _write(folder, profiles)
    (target,) = place
    _conclude(profiles, target)
    failed = [each.details[STOPPED] for each in profiles if STOPPED in each.details]
    if failed:
        raise RecipeError(f"{failed[0]}; what was recorded until then is in {target / PAGE}")
    return target


def _short(recipe: Recipe, steps: int) -> Recipe:
    """The recipe for as many steps as a profile takes, without what a profile leaves out."""
    train = replace(
        recipe.train, steps=steps + TRACED_STEPS, epochs=None, eval_steps=None, save_steps=None,
        log_steps=steps + TRACED_STEPS,
    )  # fmt: skip
    output = replace(recipe.output, save_model=False, sample_tokens=0)
    return recipe_checks.without_phases(replace(recipe, train=train, output=output, comparison=ComparisonConfig()))


# --- the folder ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(out: Path | None, recipe: Recipe) -> Iterator[tuple[Path, list[Path]]]:
    """(a scratch folder, a list that gets the name it has at the end): all is written or nothing."""
    target = out if out is not None else _free(Path(recipe.output.folder), f"{recipe.output.name}-profile")
    if target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise RunFolderError(f"{target}: there is something already; name an empty or a new folder with --out")
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    new = [parent for parent in scratch.parents if not parent.exists()]
    place: list[Path] = []
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"{target}: cannot be made: {error.strerror}; name another folder with --out") from None
    try:
        yield scratch, place
        place.append(_put(scratch, target))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunFolderError(
            f"{target}: the disk is full; free some space, or name another folder with --out"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for parent in new:
            with contextlib.suppress(OSError):  # it holds the profile
                parent.rmdir()


def _put(scratch: Path, target: Path) -> Path:
    """Where the profile is now: at `target`, or beside it where another process has written there meanwhile."""
    number, path = 1, target
    while True:
        try:
            if path.is_dir():
                path.rmdir()
            return scratch.rename(path)  # takes no folder with something in it
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        number += 1
        path = target.with_name(f"{target.name}-{number}")


def _free(parent: Path, name: str) -> Path:
    """The first of name, name-2, name-3, ... that does not exist."""
    number, path = 1, parent / name
    while path.exists() or path.is_symlink():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _write(folder: Path, profiles: Sequence[Profile]) -> None:
    if len(profiles) == 1:
        (folder / result.FILE).write_text(json.dumps(profiles[0].as_mapping()) + "\n", encoding="utf-8")
        rows = [row.as_mapping() for row in profiles[0].ops]
        (folder / OPS).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / CHART).write_text(timeline_chart.draw(profiles) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page.render(profiles), encoding="utf-8")


# --- two of them -----------------------------------------------------------------------------------------------------


def _profile_in_a_process(path: Path, overrides: Sequence[str], steps: int, out: Path) -> Profile:
    """One profile by a process of its own. What it prints is in the page; how it fails is said here."""
    _console().print(f"profile  {out.name}: {shlex.join([str(path), *overrides])}", markup=False, soft_wrap=True)
    words = [word for text in overrides for word in ("--set", text)]
    command = [sys.executable, "-m", "tigon", "profile", str(path), *words, "--steps", str(steps), "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not (out / result.FILE).exists():
        if done.returncode != 2:  # no refusal
            print(done.stderr, file=sys.stderr)
            raise RecipeError(f"profile {out.name} failed with exit code {done.returncode}; what it said is above")
        raise RecipeError(f"{path}: {done.stderr.strip().splitlines()[-1].removeprefix('tigon: ')}")
    return result.read(out / result.FILE)


def _told_apart(profiles: Sequence[Profile], request: ProfileRequest) -> list[Profile]:
    """With what the second is made of in its label, where the labels alone do not say."""
    labels = [each.timeline.label for each in profiles]
    if labels[0] == labels[1]:
        labels[1] += ", " + ", ".join([*([str(request.beside)] if request.beside else []), *request.beside_overrides])
    return [
        replace(each, timeline=replace(each.timeline, label=label))
        for each, label in zip(profiles, labels, strict=True)
    ]


# --- one of them -----------------------------------------------------------------------------------------------------


def _profile_here(recipe: Recipe, steps: int, folder: Path) -> Profile:
    from tigon.trainer.profiled_run import record  # loads transformers

    device = preflight.check_device(recipe)
    prepared = prepare.prepare(recipe, device)
    heading = f"profile  {_label(prepared)}: {steps} steps recorded, then one timed"
    _console().print(heading, markup=False, soft_wrap=True)
    if prepared.unused_tensors:
        _console().print(model.unused_line(prepared.unused_tensors), markup=False, soft_wrap=True)
    predicted, why = _predict(prepared)
    timeline, ops, stopped = record(prepared, steps, folder, _label(prepared))
    details = _details(prepared) | {"prediction": why} | ({STOPPED: stopped} if stopped else {})
    return Profile(timeline, ops, predicted, details)


def _label(prepared: Prepared) -> str:
    """The run in a line, which its page is headed with."""
    recipe = prepared.recipe
    technique_label = label(prepared.choices)
    if prepared.choices.kernels == "tigon":
        technique_label += ", kernels tigon"  # the planner says kernels only where they are others
    return f"{recipe.model.name}, {recipe.train.batch_size} x {recipe.data.sequence_length} tokens, {technique_label}"


def _details(prepared: Prepared) -> dict[str, str]:
    parts, train = preflight.environment(prepared.device), prepared.recipe.train
    return {
        "model": f"{prepared.recipe.model.name}, {prepared.n_parameters / 1e6:,.1f} M parameters",
        "rows": f"{train.batch_size} of {prepared.recipe.data.sequence_length} tokens in a micro-batch",
        "micro-batches in a step": str(train.gradient_accumulation),
        "precision": prepared.choices.precision,
        "optimizer": prepared.choices.optimizer,
        **{name.replace("_", " "): str(value) for part in parts.values() for name, value in part.items()},
    }


def _predict(prepared: Prepared) -> tuple[Predicted | None, str]:
    """(what the planner says of this run on this GPU, or why it says nothing)"""
    if prepared.device.type != "cuda":
        return None, "none: the planner's is of a GPU"
    gpu = prediction.gpu_here(prepared.device, prepared.choices)
    try:
        result = prediction.predict(prepared.recipe, prepared.config, prepared.choices, gpu, evaluated=False)
    except TigonError as error:
        return None, f"none: {error}"
    estimate = result.option.estimate
    source = f"by the planner for {gpu.name}"
    return Predicted(source, dict(estimate.phases), dict(estimate.components)), source


# --- the terminal ----------------------------------------------------------------------------------------------------


def _conclude(profiles: Sequence[Profile], target: Path) -> None:
    console = _console()
    tables.show(profiles, console)
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        console.print(f"wrote    {path}", markup=False, soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
