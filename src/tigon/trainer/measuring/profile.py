"""`tigon profile`: records every allocation of a recipe's first steps, then times every operator of one step.

Allocations and times are measured in different steps, because recording allocations takes time on a CPU. The recording
begins before the model is loaded. A profile leaves out evaluation, samples and checkpoints. Two profiles are made by
two new processes, so that neither is affected by memory that the other left in the allocator.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tigon.data.source import sources
from tigon.errors import RecipeError, RunFolderError, TigonError, UsageError
from tigon.objectives import recipe_checks
from tigon.objectives.rules import post_training as post_training_rules
from tigon.planner.search.recommend import label
from tigon.profiler.render import page, result, tables
from tigon.profiler.render.result import Predicted, Profile
from tigon.profiler.timeline import memory_chart
from tigon.recipe.keys import ComparisonConfig, Recipe
from tigon.trainer import model, prepare
from tigon.trainer.distributed import launch
from tigon.trainer.guards import prediction, preflight
from tigon.trainer.guards.console import make_console
from tigon.units import in_parameters

if TYPE_CHECKING:
    from tigon.trainer.prepare import Prepared

TRACED_STEPS = 2
"""Steps after the recorded ones: one warms up the profiler, one is timed."""
OPS, PAGE, CHART = "ops.json", "profile.html", "timeline.svg"
STOPPED = "stopped"
"""The key of a profile's details with the reason why the run ended early."""


@dataclass(frozen=True)
class ProfileRequest:
    """A recipe to profile, and perhaps a second one to compare it with."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    steps: int = 2
    beside: Path | None = None
    """The second recipe; None: the same recipe if `beside_overrides` are given, otherwise no second one."""
    beside_overrides: tuple[str, ...] = ()
    """More overrides, for the second recipe only."""
    out: Path | None = None
    """The folder to write; None: a new one in the recipe's `output.folder`."""

    @property
    def is_pair(self) -> bool:
        return self.beside is not None or bool(self.beside_overrides)


def profile(request: ProfileRequest) -> Path:
    """Make the requested profile.

    Returns:
        The folder with profile.html.

    Raises:
        UsageError: `steps` is less than 1.
        RunFolderError: The folder exists and is not empty, or cannot be written.
        TigonError: A check refuses a recipe; or the run failed, and the folder has what was recorded until then.
    """
    preflight.check_packages()
    if request.steps < 1:
        raise UsageError(f"--steps {request.steps} records no step; set 1 or more")
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
        sources.check(each.data.sources())
        sources.check(each.data.eval_sources(), "data.eval_source")
        processes = max(each.sharding.gpus, launch.world_size())
        if processes > 1:
            raise RecipeError(
                f"sharding.gpus is {processes}, but only a run of one process can be profiled; add "
                "--set sharding.gpus=1"
            )
    with _folder(request.out, recipe) as folder:
        if other is None:
            profiles = [_profile_here(recipe, request.steps, folder)]
        else:
            profiles = [
                _profile_in_a_process(request.recipe, request.overrides, request.steps, folder / "A"),
                _profile_in_a_process(path, overrides, request.steps, folder / "B"),
            ]
            profiles = _with_distinct_labels(profiles, request)
        _write(folder, profiles)
    _conclude(profiles, folder)
    failed = [each.details[STOPPED] for each in profiles if STOPPED in each.details]
    if failed:
        raise RecipeError(f"{failed[0]}; the recording up to there is in {folder / PAGE}")
    return folder


def _short(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with the number of steps of a profile, without evaluation, samples, checkpoints and comparison."""
    post_training_rules.check_profiled(recipe)
    n_steps = steps + TRACED_STEPS
    train = replace(recipe.train.shortened(n_steps), log_steps=n_steps)
    output = replace(recipe.output, save_model=False, sample_tokens=0)
    return recipe_checks.without_phases(replace(recipe, train=train, output=output, comparison=ComparisonConfig()))


# --- the folder ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(out: Path | None, recipe: Recipe) -> Iterator[Path]:
    """Create the folder of the profile for the block. If the block fails, only an existing folder stays, empty."""
    target = out if out is not None else _free(Path(recipe.output.folder), f"{recipe.output.name}-profile")
    if target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise RunFolderError(f"{target} exists and is not an empty folder; name an empty or a new folder with --out")
    new = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / PAGE).touch(exist_ok=False)  # so that another profile does not take the folder for an empty one
    except OSError as error:
        raise RunFolderError(f"{target}: cannot be created: {error.strerror}; name another folder with --out") from None
    try:
        yield target
    except BaseException as error:
        for path in target.iterdir() if target.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for folder in new:
            with contextlib.suppress(OSError):  # another program has written there
                folder.rmdir()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise RunFolderError(
                f"{target}: the disk is full; free some space, or name another folder with --out"
            ) from None
        raise


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
    (folder / CHART).write_text(memory_chart.draw(profiles) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page.render(profiles), encoding="utf-8")


# --- two of them -----------------------------------------------------------------------------------------------------


def _profile_in_a_process(path: Path, overrides: Sequence[str], steps: int, out: Path) -> Profile:
    """Make one profile in a new process. Raises RecipeError with that process's error."""
    make_console().out(f"profile  {out.name}: {shlex.join([str(path), *overrides])}")
    words = [word for text in overrides for word in ("--set", text)]
    command = [sys.executable, "-m", "tigon", "profile", str(path), *words, "--steps", str(steps), "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not (out / result.FILE).exists():
        if done.returncode != 2:  # not an error that the user can fix
            print(done.stderr, file=sys.stderr)
            raise RecipeError(f"profile {out.name} failed with exit code {done.returncode}; its error is above")
        raise RecipeError(f"{path}: {done.stderr.strip().splitlines()[-1].removeprefix('tigon: ')}")
    return result.read(out / result.FILE)


def _with_distinct_labels(profiles: Sequence[Profile], request: ProfileRequest) -> list[Profile]:
    """The profiles with the second request's recipe and overrides in the second label, if the labels are equal."""
    labels = [each.timeline.label for each in profiles]
    if labels[0] == labels[1]:
        labels[1] += ", " + ", ".join([*([str(request.beside)] if request.beside else []), *request.beside_overrides])
    return [
        replace(each, timeline=replace(each.timeline, label=label))
        for each, label in zip(profiles, labels, strict=True)
    ]


# --- one of them -----------------------------------------------------------------------------------------------------


def _profile_here(recipe: Recipe, steps: int, folder: Path) -> Profile:
    from tigon.trainer.measuring.profiled_run import record  # loads transformers

    device = preflight.check_device(recipe)
    prepare.connect(recipe, device)
    prepared = prepare.prepare(recipe, device)
    heading = f"profile  {_label(prepared)}: {steps} steps recorded, then one timed"
    make_console().out(heading)
    if prepared.unused_tensors:
        make_console().out(model.unused_line(prepared.unused_tensors))
    predicted, why = _predict(prepared)
    timeline, ops, stopped = record(prepared, steps, folder, _label(prepared))
    details = _details(prepared) | {"prediction": why} | ({STOPPED: stopped} if stopped else {})
    return Profile(timeline, ops, predicted, details)


def _label(prepared: Prepared) -> str:
    """One line about the run: model, batch, techniques. It is the heading of the page."""
    recipe = prepared.recipe
    technique_label = label(prepared.settings)
    if prepared.settings.model.kernels == "tigon":
        technique_label += ", kernels tigon"  # the planner's label names only other kernels
    return f"{recipe.model.name}, {recipe.train.batch_size} x {recipe.data.sequence_length} tokens, {technique_label}"


def _details(prepared: Prepared) -> dict[str, str]:
    parts, train = preflight.environment(prepared.device), prepared.recipe.train
    return {
        "model": f"{prepared.recipe.model.name}, {in_parameters(prepared.n_parameters)}",
        "samples per micro-batch": f"{train.batch_size} of {prepared.recipe.data.sequence_length} tokens",
        "micro-batches per step": str(train.gradient_accumulation),
        "precision": prepared.settings.train.precision,
        "optimizer": prepared.settings.train.optimizer,
        **{name.replace("_", " "): str(value) for part in parts.values() for name, value in part.items()},
    }


def _predict(prepared: Prepared) -> tuple[Predicted | None, str]:
    """(the planner's prediction or None, its source or the reason why there is none)"""
    if prepared.device.type != "cuda":
        return None, "none: the planner predicts GPU memory only"
    gpu = prediction.gpu_here(prepared.device, prepared.settings)
    try:
        result = prediction.predict(prepared.recipe, prepared.config, prepared.settings, gpu, evaluated=False)
    except TigonError as error:
        return None, f"none: {error}"
    estimate = result.option.estimate
    source = f"by the planner for {gpu.name}"
    return Predicted(source, dict(estimate.phases), dict(estimate.components)), source


# --- the terminal ----------------------------------------------------------------------------------------------------


def _conclude(profiles: Sequence[Profile], target: Path) -> None:
    console = make_console()
    tables.show(profiles, console)
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        console.out(f"wrote    {path}")
