"""The run folder: where it is, when it may be used, what is in it.

    recipe.yaml        the resolved recipe, runnable as it is
    environment.json   versions and hardware
    data.json          rows, tokens, unigram entropy, fingerprint
    metrics.jsonl      one record a line, in order of time; `event` says what it is
    tensorboard/       the same as scalars
    checkpoints/       checkpoint-N, to resume from; each with a manifest of its files
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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from tigon.errors import RunFolderError
from tigon.objectives.recipe_checks import loads_saved
from tigon.recipe.keys import OutputConfig, Recipe
from tigon.trainer.checkpoint import checkpoint

RECIPE, METRICS, SUMMARY, DATA, ENVIRONMENT = (
    "recipe.yaml", "metrics.jsonl", "summary.json", "data.json", "environment.json"
)  # fmt: skip
# What a resumed run may change: it has no part in the losses.
FREE_TO_CHANGE = (
    "comparison.", "output.", "train.log_steps", "train.eval_steps", "train.save_steps", "train.keep_checkpoints",
    "train.workers", "train.max_skipped_steps",
)  # fmt: skip
BATCH_SPLIT = ("train.batch_size", "train.gradient_accumulation")  # may change if their product stays
CHECKPOINTS = "checkpoints"
# Records of measurements, and what each of them has.
MEASURED = {"train": ("loss", "tokens_per_s", "memory_bytes", "memory_peak_bytes"), "eval": ("eval_loss",)}
LARGEST = 2**63  # more than any count or number of bytes; what draws them takes no larger integers
LOCK_PATIENCE = 7  # s


@dataclass(frozen=True)
class RunFolder:
    """A run folder that exists and is ours. `resume_point` is what to resume from, None for a new run."""

    path: Path
    resume_point: checkpoint.ResumePoint | None = None
    changed: tuple[tuple[str, Any, Any], ...] = ()
    """Recipe keys that differ from the run's so far and may: (key, before, now)."""

    @property
    def checkpoint(self) -> Path | None:
        return self.resume_point.path if self.resume_point is not None else None

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def read_json(self, name: str) -> dict[str, Any]:
        """The mapping in one of the folder's files. Raises RunFolderError where it cannot be read as one."""
        file = self.path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise _damaged(file, str(error.strerror)) from None
        except (ValueError, RecursionError):
            raise _damaged(file, "no JSON") from None
        if not isinstance(content, dict):
            raise _damaged(file, "no mapping")
        return content

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Whole or not at all: a scratch file renamed into place."""
        target = self.path / name
        if target.parent != self.path:
            target.parent.mkdir(exist_ok=True)  # not the run's own: a run that was removed must not come back in part
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        return [record for line in self._lines() if (record := _record(line)) is not None]

    def damaged_lines(self) -> int:
        """How many lines of metrics.jsonl are no records, and are left out."""
        return sum(_record(line) is None for line in self._lines())

    def _lines(self) -> list[str]:
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text(encoding="utf-8", errors="replace")
        return [line for line in text.split("\n") if line]

    def append(self, record: Mapping[str, Any]) -> None:
        with self.metrics.open("ab+") as handle:
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":
                    handle.write(b"\n")  # after the half line that a full disk left, which would swallow this one
            handle.write((json.dumps(record, ensure_ascii=False) + "\n").encode())

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that a resumed run will do again."""
        kept = [record for record in self.records() if record.get("step", 0) <= step]
        self.write_text(METRICS, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def _record(line: str) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None for what a killed run, a full disk or a bad disk left of one.

    pydantic is not used, because the keys of a record depend on the objective.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str) or type(record.get("step")) is not int:
        return None
    numbers = MEASURED.get(record["event"])
    if numbers is None:
        return record
    # the report draws every value of these
    whole = all(name in record for name in numbers)
    return record if whole and all(_is_drawn(value) for name, value in record.items() if name != "event") else None


def _is_drawn(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _damaged(file: Path, why: str) -> RunFolderError:
    return RunFolderError(f"{file}: damaged, {why}; restore it, or start a new run without --resume")


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
        if parent.is_symlink():
            gone = os.readlink(parent)
            raise RunFolderError(f"{parent}: a link to {gone}, which is not there; choose another output.folder")
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
    """The folder to resume: there, incomplete, of this recipe. `with_checkpoint` looks for what to resume from.

    With `if_exists: number` the newest of name, name-2, ... Raises RunFolderError saying which of these fails.
    """
    path = newest(output)
    if path is None:
        wanted = Path(output.folder) / output.name
        raise RunFolderError(f"{wanted}: no run to resume there; start it without --resume, or set output.name")
    return _checked(path, recipe)


def _checked(path: Path, recipe: Recipe) -> RunFolder:
    """The run folder at `path`, incomplete and of this recipe. Raises RunFolderError otherwise."""
    if path.is_symlink() or not (path / RECIPE).is_file():
        raise RunFolderError(f"{path}: not a run folder, it has no {RECIPE}; set output.name to the run to resume")
    if (path / SUMMARY).exists():
        raise RunFolderError(f"{path}: this run is complete, see report.html in it; start a new one without --resume")
    _refuse_links(path)
    if not isinstance(RunFolder(path).read_json(DATA).get("fingerprint"), str):
        raise _damaged(path / DATA, "it lacks the data's fingerprint")
    before = loads_saved(path / RECIPE)
    changed = _differences(before, recipe)
    refused = [(name, old, new) for name, old, new in changed if not _only_rounds(name, before, recipe)]
    if refused:
        differences = "; ".join(f"the run had {name}: {old}, the recipe now has {new}" for name, old, new in refused)
        raise RunFolderError(f"{path}: {differences}; make them agree")
    return RunFolder(path, changed=tuple(changed))


def with_checkpoint(run: RunFolder, recipe: Recipe) -> RunFolder:
    """`run`, checked again, with the newest checkpoint that is as it was written.

    Call it with the folder locked: the process that had the lock before may have completed the run meanwhile, or
    written a newer checkpoint. Raises RunFolderError for what `find` refuses, and when there is no such checkpoint.
    """
    run = _checked(run.path, recipe)
    return replace(run, resume_point=checkpoint.newest(run.path / CHECKPOINTS))


@contextmanager
def locked(path: Path, file: str = RECIPE, work: str = "training into this run folder") -> Iterator[None]:
    """Alone in the folder, for as long as the block runs; the system takes the lock back from a killed process.

    file: which of it is locked. Raises RunFolderError where another process has it.

    `filelock.FileLock` is not used: it locks a file of its own, which would stay in every run folder, and makes that
    file again if another process has removed the folder. Here that removal has to be noticed.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    with _opened(path / file) as handle:
        for patience in range(LOCK_PATIENCE, -1, -1):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not patience:
                    raise RunFolderError(f"{path}: another process is {work}; wait for its end, or stop it") from None
                time.sleep(1)  # processes that prepare batches notice after 5 s that a killed run is gone
            except OSError:  # a file system without locks
                break
        if not _is_at(handle, path / file):  # its process has removed the folder, perhaps made another
            raise RunFolderError(f"{path}: another process has removed this folder meanwhile; start again")
        yield


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("r+b")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be opened to lock its folder: {error.strerror}; mend this") from None


def _is_at(handle: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _refuse_links(path: Path) -> None:
    """A run makes no links, and one in its folder would have it write somewhere else."""
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            here = Path(folder, name)
            if here.is_symlink():
                raise RunFolderError(f"{here}: a link to {os.readlink(here)}, which no run makes; remove it")


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


def _only_rounds(name: str, before: Recipe, now: Recipe) -> bool:
    """Whether a resumed run has the same numbers to rounding with this key as it is now."""
    rows = [recipe.train.batch_size * recipe.train.gradient_accumulation for recipe in (before, now)]
    return name == "train.checkpointing" or (name in BATCH_SPLIT and rows[0] == rows[1])
