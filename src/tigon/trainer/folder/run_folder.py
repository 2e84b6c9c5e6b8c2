"""Creates, finds, checks and locks run folders. A run folder contains:

    recipe.yaml        the resolved recipe, which can be run again
    environment.json   versions and hardware
    data.json          samples, tokens, unigram entropy, fingerprint
    metrics.jsonl      one record per line, in order of time; `event` is the kind of record
    lm_eval.json       results of `eval.lm_eval`
    wandb/             of `train.report_to: wandb`
    tensorboard/       the same records as scalars
    checkpoints/       checkpoint-N, to resume from; each with a manifest of its files
    tokenizer/         the tokenizer of the run
    model/             final weights (safetensors), tokenizer and model card
    adapters/          of LoRA, in PEFT's layout
    heads/             Medusa or MTP heads
    base/              a preset's weights before the run's own steps
    charts/            the report's charts as SVG
    report.md, report.html
    summary.json       written last, so a folder without it is an incomplete run

The folder is created after every check has passed. A run writes nothing outside it except the caches of
tokenizers and tokens, and what the trackers of `train.report_to` keep for all runs of a folder.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tigon._files import open_regular, read_text
from tigon.errors import RunFolderError
from tigon.objectives.recipe_checks import auto_divides_batch, loads_saved
from tigon.recipe.keys import OutputConfig, Recipe
from tigon.techniques.keys.sharding import AUTO_METHOD
from tigon.trainer.checkpoint import checkpoint, resume_rules
from tigon.trainer.folder import folder_lock

RECIPE, METRICS, SUMMARY = "recipe.yaml", "metrics.jsonl", "summary.json"
DATA, ENVIRONMENT, CHECKPOINTS = "data.json", "environment.json", "checkpoints"
_FREE_OF_TRAIN = (
    "log_steps eval_steps save_steps keep_checkpoints save_async workers max_skipped_steps load_best report_to"
)
FREE_TO_CHANGE = (
    "comparison.",
    "output.",
    "eval.",
    "data.show",
    "data.cache",
    *(f"train.{name}" for name in _FREE_OF_TRAIN.split()),
)
"""Keys that a resumed run may change, because they do not affect the losses."""
# The keys that each record of a measurement must have.
MEASURED = {"train": ("loss", "tokens_per_s", "memory_bytes", "memory_peak_bytes"), "eval": ("eval_loss",)}
LARGEST = 2**63  # more than any count or number of bytes; the chart library accepts no larger integers
MAX_RECORDS_BYTES = 2**30  # of metrics.jsonl; a million steps give a fifth


@dataclass(frozen=True)
class RunFolder:
    """An existing run folder of this run."""

    path: Path
    resume_point: checkpoint.ResumePoint | None = None
    """The checkpoint to resume from; None for a new run."""
    changed: tuple[tuple[str, Any, Any], ...] = ()
    """The recipe keys that a resumed run changes, as (key, value before, value now)."""

    @property
    def checkpoint(self) -> Path | None:
        return self.resume_point.path if self.resume_point is not None else None

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def has_checkpoints(self) -> bool:
        return any((self.path / CHECKPOINTS).glob("checkpoint-*"))

    @property
    def was_removed(self) -> bool:
        return not (self.path / RECIPE).exists()

    @property
    def last_step(self) -> int:
        """The step of the last record; 0 without records."""
        return max((int(record["step"]) for record in self.records()), default=0)

    def read_json(self, name: str) -> dict[str, Any]:
        """The mapping in one of the folder's JSON files.

        Raises:
            RunFolderError: The file cannot be read, or is not a mapping in JSON.
        """
        file = self.path / name
        try:
            content = json.loads(read_text(file))
        except OSError as error:
            raise _damaged(file, str(error.strerror)) from None
        except (ValueError, RecursionError):
            raise _damaged(file, "it is not JSON") from None
        if not isinstance(content, dict):
            raise _damaged(file, "it is not a JSON object")
        return content

    def write_json(self, name: str, value: object) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the folder completely or not at all, by renaming a scratch file."""
        target = self.path / name
        if target.parent != self.path:  # create only subfolders: a run folder that was deleted must not reappear
            target.parent.mkdir(exist_ok=True)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        return [record for line in self._lines() if (record := _record(line)) is not None]

    def damaged_lines(self) -> int:
        """The number of damaged lines in metrics.jsonl, which `records` drops."""
        return sum(_record(line) is None for line in self._lines())

    def _lines(self) -> list[str]:
        if not self.metrics.exists():
            return []
        try:
            with open_regular(self.metrics) as handle:
                if os.fstat(handle.fileno()).st_size > MAX_RECORDS_BYTES:
                    raise _damaged(self.metrics, f"it is larger than {MAX_RECORDS_BYTES:,} bytes")
                content = handle.read()
        except OSError as error:
            raise _damaged(self.metrics, str(error.strerror)) from None
        text = content.decode("utf-8", errors="replace")
        return [line for line in text.split("\n") if line]

    def append(self, record: Mapping[str, Any]) -> None:
        with self.metrics.open("ab+") as handle:
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":
                    handle.write(b"\n")  # end a half line that a full disk left, so that this record has its own line
            handle.write((json.dumps(record, ensure_ascii=False) + "\n").encode())

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, which a resumed run will repeat."""
        kept = [record for record in self.records() if record.get("step", 0) <= step]
        self.write_text(METRICS, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def _record(line: str) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if the line is damaged, for example by a full disk.

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
    # The report draws every value of a measurement.
    whole = all(name in record for name in numbers)
    return record if whole and all(_is_drawn(value) for name, value in record.items() if name != "event") else None


def _is_drawn(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _damaged(file: Path, why: str) -> RunFolderError:
    return RunFolderError(
        f"{file}: damaged, {why}; restore it, or start a new run without --resume and with another output.name"
    )


def check(output: OutputConfig, command: str) -> None:
    """Check before a new run that its folder can be created.

    Raises:
        RunFolderError: The folder exists and `output.if_exists` is "error", or its parent cannot be written.
    """
    target = Path(output.folder) / output.name
    if output.if_exists == "error" and (target.exists() or target.is_symlink()):
        raise _exists(target, command)
    parent = target.parent
    while not parent.exists():
        if parent.is_symlink():
            gone = os.readlink(parent)
            raise RunFolderError(f"{parent}: a link to {gone}, which does not exist; choose another output.folder")
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RunFolderError(f"{parent}: not a folder that can be written to; choose one with --set output.folder=...")


def _exists(target: Path, command: str) -> RunFolderError:
    """The error for a new run whose folder exists, with a way on that works: --resume only with a checkpoint."""
    another = "choose another with --set output.name=..."
    if target.is_symlink() or not (target / RECIPE).exists():
        return RunFolderError(f"{target}: this path exists; {another}")
    if (target / SUMMARY).exists():
        return RunFolderError(f"{target}: this complete run folder exists; {another}")
    if folder_lock.is_in_use(target / RECIPE):
        return RunFolderError(f"{target}: another process is training into this run folder; {another}")
    if checkpoint.newest_metadata(target / CHECKPOINTS):
        return RunFolderError(f"{target}: this run folder exists; continue it with `{command} --resume`, or {another}")
    if trained := trained_folders(target):
        return RunFolderError(
            f"{target}: this run folder exists and holds trained weights in {trained[0]}/, without a checkpoint to "
            f"continue from; {another}"
        )
    return RunFolderError(
        f"{target}: this run folder exists, and its run ended without a complete checkpoint; remove the folder with "
        f"`rm -r {shlex.quote(str(target))}`, or {another}"
    )


def trained_folders(path: Path) -> list[str]:
    """The folders in the run folder `path` that hold final weights: model/, adapters/ or one of the objective.

    base/, or base-partial/ while it is written, has weights from before the run's own training.
    """
    names = {file.parent.name for file in path.glob("*/*.safetensors")}
    return sorted(names - {"base", "base-partial"})


def create(output: OutputConfig, command: str) -> RunFolder:
    """Create the folder; with `if_exists: number` the first free one of name, name-2, name-3, ...

    Raises:
        RunFolderError: As `check`, or the folder cannot be created.
    """
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
        raise RunFolderError(f"{parent / output.name}: cannot be created: {error.strerror}") from None


def find(output: OutputConfig, recipe: Recipe) -> RunFolder:
    """The folder of an incomplete run of this recipe, without its checkpoint, which `with_checkpoint` adds.

    With `if_exists: number` it is the newest of name, name-2, ...

    Raises:
        RunFolderError: There is no run folder, the run is complete, or a key that affects the losses has changed.
    """
    path = newest(output)
    if path is None:
        wanted = Path(output.folder) / output.name
        raise RunFolderError(f"{wanted}: no run to resume there; start it without --resume, or set output.name")
    return _checked(path, recipe)


def division(recipe: Recipe) -> tuple[str, ...]:
    """The overrides that divide the samples of a step of the run to resume for this run's processes.

    () if nothing has to change, or if there is no such run.

    Raises:
        RunFolderError: The processes cannot share the samples of a step equally.
    """
    path = newest(recipe.output)
    if path is None or path.is_symlink() or not (path / RECIPE).is_file():
        return ()
    return resume_rules.batch_overrides(path / CHECKPOINTS, loads_saved(path / RECIPE), recipe)


def _checked(path: Path, recipe: Recipe) -> RunFolder:
    """The run folder at `path`. Raises RunFolderError unless it is an incomplete run of this recipe."""
    if path.is_symlink() or not (path / RECIPE).is_file():
        raise RunFolderError(f"{path}: not a run folder: {RECIPE} is missing; set output.name to the run to resume")
    if (path / SUMMARY).exists():
        raise RunFolderError(
            f"{path}: this run is complete (see its report.html); start a new one without --resume and with another "
            "output.name"
        )
    _refuse_odd_files(path)
    if not isinstance(RunFolder(path).read_json(DATA).get("fingerprint"), str):
        raise _damaged(path / DATA, "the fingerprint of the data is missing")
    before = loads_saved(path / RECIPE)
    changed = _differences(before, recipe)
    if problem := resume_rules.engine_problem(path / CHECKPOINTS, before, recipe):
        raise RunFolderError(f"{path}: {problem}")
    allowed = _rounding_keys(path, before, recipe)
    refused = [(name, old, new) for name, old, new in changed if name not in allowed]
    if refused:
        differences = "; ".join(f"the run had {name}: {old}, the recipe now has {new}" for name, old, new in refused)
        raise RunFolderError(
            f"{path}: {differences}; use the run's values, or start a new run without --resume and with another "
            "output.name"
        )
    return RunFolder(path, changed=tuple(changed))


def with_checkpoint(run: RunFolder, recipe: Recipe) -> RunFolder:
    """`run`, checked again, with its newest intact checkpoint.

    Call it with the folder locked: the process that had the lock before may have completed the run or written a newer
    checkpoint.

    Raises:
        RunFolderError: As `find`, or there is no intact checkpoint.
    """
    run = _checked(run.path, recipe)
    return replace(run, resume_point=checkpoint.newest(run.path / CHECKPOINTS))


def locked(path: Path) -> AbstractContextManager[None]:
    """Lock a run folder for a block. Raises RunFolderError if another process has the lock or removed the folder."""
    return folder_lock.locked(path, RECIPE, "training into this run folder")


def _refuse_odd_files(path: Path) -> None:
    """Raise RunFolderError for a link in the folder, or for a file that is not a regular one.

    Runs create neither. They would write through a link to another place, and wait for a pipe.
    """
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            here = Path(folder, name)
            if here.is_symlink():
                raise RunFolderError(f"{here}: a link to {os.readlink(here)}, but runs create no links; remove it")
            if not (here.is_file() or here.is_dir()):
                raise RunFolderError(f"{here}: a pipe, a device or a socket, and runs create only files; remove it")


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
    if now.data.packing is None:  # the run's recipe has the choice that null stood for
        now = replace(now, data=replace(now.data, packing=before.data.packing))
    if now.sharding.sequence_method == AUTO_METHOD:
        now = replace(now, sharding=replace(now.sharding, sequence_method=before.sharding.sequence_method))
    if now.train.cuda_graphs is None:
        now = replace(now, train=replace(now.train, cuda_graphs=before.train.cuda_graphs))
    if now.train.auto_checkpointing:
        # The run's recipe has the choice that `auto` stood for.
        was, train = before.train, replace(now.train, checkpointing=before.train.checkpointing)
        samples = [resume_rules.samples_per_step(each, 1) for each in (before, now)]
        if auto_divides_batch(now) and samples[0] == samples[1]:
            names = ("batch_size", "gradient_accumulation", "gradient_accumulation_fusion")
            train = replace(train, **{name: getattr(was, name) for name in names})
        now = replace(now, train=train)
    old, new = before.as_mapping(), now.as_mapping()
    return [
        (f"{section}.{name}", old[section][name], new[section][name])
        for section in old
        for name in old[section]
        if old[section][name] != new[section][name] and not f"{section}.{name}".startswith(FREE_TO_CHANGE)
    ]


def _rounding_keys(path: Path, before: Recipe, now: Recipe) -> set[str]:
    """The keys whose values in `now` change the losses of the run at `path` only by rounding."""
    keys = {"train.checkpointing", "train.gradient_accumulation_fusion"}
    samples = resume_rules.samples_per_step(now, resume_rules.processes_now(now))
    if samples == resume_rules.samples_before(path / CHECKPOINTS, before):
        keys |= {*resume_rules.BATCH_KEYS, *(resume_rules.ENGINE_KEYS if now.sharding.zero == 0 else ())}
    return keys
