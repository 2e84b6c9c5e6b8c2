"""Checks what a resumed run may change, and splits its batch and counters.

A run may resume on another number of processes, or with FSDP2 instead of DDP. An optimizer step keeps its samples:
micro-batch size x accumulation x data-parallel size stays the same. `batch_overrides` finds the micro-batch size and
the accumulation for the present number of processes. PyTorch's distributed format divides weights and optimizer states
(distributed_checkpoint.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.errors import RunFolderError
from tigon.recipe.keys import Recipe
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch

_ENGINE = ("gpus", "sequence", "sequence_method", "tensor", "fsdp", "replicas", "reshard", "offload")
ENGINE_KEYS = tuple(f"sharding.{name}" for name in _ENGINE)
BATCH_KEYS = ("train.batch_size", "train.gradient_accumulation")
SAMPLES_KEY = "samples_per_step"  # in a checkpoint's metadata
EQUAL_COUNTERS = ("reward_stop",)  # counters that are equal in all processes


def processes_now(recipe: Recipe) -> int:
    """The number of processes of this run: the launcher's, or the recipe's if it starts them."""
    return launch.world_size() if launch.started_by_launcher() else recipe.sharding.gpus


def data_parallel_size(recipe: Recipe, processes: int) -> int:
    """The number of processes, or of groups that share rows or divide matrices, that read different samples."""
    return max(1, processes // (recipe.sharding.processes_per_sample))


def samples_per_step(recipe: Recipe, processes: int) -> int:
    """The samples of one optimizer step of all processes."""
    return recipe.train.samples_per_step * data_parallel_size(recipe, processes)


def processes_before(checkpoints: Path, before: Recipe) -> int:
    """The processes that wrote the newest checkpoint, or those of the recipe if there is none."""
    return int(checkpoint.newest_metadata(checkpoints).get("processes", before.sharding.gpus))


def samples_before(checkpoints: Path, before: Recipe) -> int:
    """The samples per step of the run so far, from its newest checkpoint, or from its recipe if there is none."""
    metadata = checkpoint.newest_metadata(checkpoints)
    return int(metadata.get(SAMPLES_KEY, samples_per_step(before, processes_before(checkpoints, before))))


def writes_distributed(recipe: Recipe) -> bool:
    """Whether the run writes its checkpoints in PyTorch's distributed format."""
    return recipe.train.optimizer_row.has_plain_states and (recipe.sharding.fsdp or recipe.train.save_async)


def batch_overrides(checkpoints: Path, before: Recipe, now: Recipe) -> tuple[str, ...]:
    """The overrides that give a resumed run the samples per step of the run so far; () if it has them already.

    Returns () if the new recipe changes the samples per process.

    Args:
        checkpoints: The run's folder of checkpoints.
        before: The recipe of the run so far.
        now: The recipe of the resumed run.

    Raises:
        RunFolderError: The processes cannot share the samples of a step equally.
    """
    total, processes = samples_before(checkpoints, before), processes_now(now)
    if samples_per_step(now, 1) != samples_per_step(before, 1) or samples_per_step(now, processes) == total:
        return ()
    if engine_problem(checkpoints, before, now):
        return ()  # the check of the run folder refuses it
    parts = data_parallel_size(now, processes)
    if total % parts:
        group = now.sharding.processes_per_sample
        least = 2 if now.sharding.tensor > 1 else 1  # FSDP2 needs two groups that divide matrices
        counts = ", ".join(str(n * group) for n in range(least, 64 // group + 1) if total % n == 0)
        raise RunFolderError(
            f"sharding.gpus: the run has {total} samples per step, which {processes} processes cannot share equally; "
            f"resume with {f'one of {counts}' if counts else 'sharding.tensor: 1'}"
        )
    share = total // parts
    batch = max(n for n in range(1, now.train.batch_size + 1) if share % n == 0)
    return tuple(f"{key}={value}" for key, value in zip(BATCH_KEYS, (batch, share // batch), strict=True))


def engine_problem(checkpoints: Path, before: Recipe, now: Recipe) -> str | None:
    """Why this run cannot read the checkpoints of the run so far, with the next step; None if it can."""
    old_sharding, old_processes = before.sharding, processes_before(checkpoints, before)
    old_engine, new_engine = ((each.zero, each.fsdp) for each in (old_sharding, now.sharding))
    if (old_engine, old_processes) == (new_engine, processes_now(now)):
        return None
    settings = f"sharding.zero: {old_sharding.zero}, sharding.fsdp: {old_sharding.fsdp}"
    had = f"the run had {settings} and {old_processes} processes"
    if old_sharding.zero or now.sharding.zero:
        export = f"`tigon export {checkpoint.newest_path(checkpoints)} FOLDER`"
        return (
            f"{had}, and DeepSpeed reads only its own checkpoints, of the same stage and processes; resume "
            f"with those settings, or write the weights with {export} and start a new run from them"
        )
    if (old_sharding.fsdp or now.sharding.fsdp) and not now.train.optimizer_row.has_plain_states:
        return (
            f"{had}, and the states of train.optimizer: {now.train.optimizer} are sharded for those settings; "
            "resume with them, or start a new run without --resume and with another output.name"
        )
    return None


def load_counters(folder: Path, rank: int, processes: int) -> dict[str, Any]:
    """This process's counters in a checkpoint."""
    files = sorted(folder.glob("counted-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    counted: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return counted[rank] if len(files) == processes else redistribute_counters(counted, rank)


def redistribute_counters(counted: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """The counters of another number of processes for the process `rank`, so that the next record is the same.

    The record averages the sums of losses over processes. It adds up an objective's own sums, so the first process gets
    their totals and the others get 0.
    """
    own = {
        name: _sum_on_first_rank([each[name] for each in counted], rank)
        for name in counted[0]
        if name not in EQUAL_COUNTERS
    }
    mean = sum(float(each["gate"]["loss_sum"]) for each in counted) / len(counted)
    alike = {name: counted[0][name] for name in EQUAL_COUNTERS if name in counted[0]}
    return {**own, **alike, "gate": {**counted[0]["gate"], "loss_sum": mean}}


def _sum_on_first_rank(parts: Sequence[Any], rank: int) -> Any:
    """The elementwise sum of nested numbers for the first process, and 0 for the others."""
    if isinstance(parts[0], Mapping):
        return {name: _sum_on_first_rank([part[name] for part in parts], rank) for name in parts[0]}
    if isinstance(parts[0], list):
        return [_sum_on_first_rank(each, rank) for each in zip(*parts, strict=True)]
    return 0.0 if rank else sum(parts)
