"""The run folder: where it is, when it may be used, what is in it.

    recipe.yaml        the resolved recipe, runnable as it is
    environment.json   versions and hardware
    data.json          rows, tokens, unigram entropy, fingerprint
    metrics.jsonl      one record a line, in order of time; `event` says what it is
    tensorboard/       the same as scalars
    checkpoints/       checkpoint-N, to resume from
    tokenizer/         the tokenizer used
    model/             final weights (safetensors) and tokenizer
    charts/            the report's charts as SVG
    report.md, report.html
    summary.json       written last: its presence says that the run is complete

Nothing is created before every check has passed, and nothing outside the folder is written (but the tokenizer cache).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.errors import RunFolderError
from tigon.train.recipe import OutputConfig, Recipe
from tigon.train.recipe_file import loads_saved

RECIPE, METRICS, SUMMARY, DATA, ENVIRONMENT = (
    "recipe.yaml", "metrics.jsonl", "summary.json", "data.json", "environment.json"
)  # fmt: skip
# trainer_state.json is the last file the Trainer writes into a checkpoint
CHECKPOINT_FILES = ("scheduler.pt", "trainer_state.json")
# the optimizer's state: the Trainer's own file, FSDP2's, DeepSpeed's folder
OPTIMIZER_STATES = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*")
# What a resumed run may change: it has no part in the losses.
FREE_TO_CHANGE = ("comparison.", "output.", "train.log_steps", "train.keep_checkpoints")


@dataclass(frozen=True)
class RunFolder:
    """A run folder that exists and is ours. `checkpoint` is where to resume from, None for a new run."""

    path: Path
    checkpoint: Path | None = None

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def read_json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Whole or not at all: a scratch file renamed into place."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]  # a killed run may leave half a line

    def append(self, record: Mapping[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record, ensure_ascii=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that a resumed run will do again."""
        kept = [record for record in self.records() if record.get("step", 0) <= step]
        self.write_text(METRICS, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def check(output: OutputConfig, command: str) -> None:
    """Refuse, before anything is computed, a new run whose folder exists or cannot be made."""
    target = Path(output.folder) / output.name
    if output.if_exists == "error" and (target.exists() or target.is_symlink()):
        ours, complete = (target / RECIPE).exists(), (target / SUMMARY).exists()
        what = f"this {'complete ' if complete else ''}run folder" if ours else "this path"
        resume = f"continue it with `{command} --resume`, or " if ours and not complete else ""
        raise RunFolderError(f"{target}: {what} exists; {resume}choose another with --set output.name=...")
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RunFolderError(f"{parent}: not a folder that can be written to; choose one with --set output.folder=...")


def create(output: OutputConfig, command: str) -> RunFolder:
    """Make the folder; with `if_exists: number` the first free of name, name-2, name-3, ..."""
    check(output, command)
    parent = Path(output.folder)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = parent / (output.name if number == 1 else f"{output.name}-{number}")
            try:
                path.mkdir()  # not exist_ok: two runs started at once get two folders
                return RunFolder(path)
            except FileExistsError:
                if output.if_exists == "error":
                    raise
                number += 1
    except OSError as error:
        raise RunFolderError(f"{parent / output.name}: cannot be made: {error.strerror}") from None


def find(output: OutputConfig, recipe: Recipe) -> RunFolder:
    """The folder to resume: there, incomplete, of this recipe, with a complete checkpoint.

    With `if_exists: number` the newest of name, name-2, ... Raises RunFolderError saying which of these fails.
    """
    path = newest(output)
    if path is None:
        wanted = Path(output.folder) / output.name
        raise RunFolderError(f"{wanted}: no run to resume there; start it without --resume, or set output.name")
    if path.is_symlink() or not (path / RECIPE).is_file():
        raise RunFolderError(f"{path}: not a run folder, it has no {RECIPE}; set output.name to the run to resume")
    if (path / SUMMARY).exists():
        raise RunFolderError(f"{path}: this run is complete, see report.html in it; start a new one without --resume")
    changed = _differences(loads_saved(path / RECIPE), recipe)
    if changed:
        name, before, now = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RunFolderError(f"{path}: the run had {name}: {before}, the recipe now has {now}{more}; make them agree")
    return RunFolder(path, newest_checkpoint(path / "checkpoints"))


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[1])


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint; one that a kill left half written is passed over."""
    numbered = []
    for path in folder.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and path.is_dir() and not path.is_symlink():
            numbered.append((int(match[1]), path))
    problems = []
    for step, path in sorted(numbered, reverse=True):
        problem = _incomplete(path, step)
        if problem is None:
            return path
        problems.append(f"{path.name} {problem}")
    why = "; ".join(problems) or "there is none; set train.save_steps"
    raise RunFolderError(f"{folder}: no complete checkpoint to resume from: {why}; start a new run without --resume")


def _incomplete(path: Path, step: int) -> str | None:
    for name in CHECKPOINT_FILES:
        if not (path / name).is_file():
            return f"lacks {name}"
    if not any(match for pattern in OPTIMIZER_STATES for match in path.glob(pattern)):
        return "lacks optimizer.pt"
    if not any(path.glob("*.safetensors")):
        return "lacks its .safetensors weights"
    if not any(path.glob("rng_state*.pth")):
        return "lacks rng_state.pth"
    try:
        state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        found = state["global_step"]
    except (ValueError, KeyError, TypeError):
        return "has an unreadable trainer_state.json"
    return None if found == step else f"says it is step {found}"


def newest(output: OutputConfig) -> Path | None:
    parent = Path(output.folder)
    first = parent / output.name
    if output.if_exists == "error":
        return first if first.exists() else None
    best = (1, first) if first.exists() else None
    for path in parent.glob(f"{output.name}-*"):
        suffix = path.name[len(output.name) + 1 :]
        if suffix.isdigit() and (best is None or int(suffix) > best[0]):
            best = (int(suffix), path)
    return best[1] if best else None


def _differences(before: Recipe, now: Recipe) -> list[tuple[str, Any, Any]]:
    old, new = before.as_mapping(), now.as_mapping()
    return [
        (f"{section}.{name}", old[section][name], new[section][name])
        for section in old
        for name in old[section]
        if old[section][name] != new[section][name] and not f"{section}.{name}".startswith(FREE_TO_CHANGE)
    ]
