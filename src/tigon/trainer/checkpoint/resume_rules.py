"""Resuming on another number of processes, or with FSDP2 instead of DDP: what has to stay, and how it is divided.

An optimizer step keeps its samples: micro-batch size x accumulation x readers stays the same. `divided` finds the
micro-batch and the accumulation for the present number of processes. PyTorch's distributed format divides weights and
optimizer states (distributed_checkpoint.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.errors import RunFolderError
from tigon.recipe.keys import Recipe
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch

_ENGINE = ("gpus", "sequence", "sequence_method", "tensor", "fsdp", "replicas", "reshard", "offload")
ENGINE_KEYS = tuple(f"sharding.{name}" for name in _ENGINE)
BATCH_KEYS = ("train.batch_size", "train.gradient_accumulation")
SAMPLES = "samples_per_step"  # in a checkpoint's metadata
ALIKE = ("reward_stop",)  # counters that are equal in all processes


def processes_now(recipe: Recipe) -> int:
    """The number of processes of this run: the launcher's, or the recipe's if it starts them."""
    return launch.world_size() if launch.started_by_launcher() else recipe.sharding.gpus


def readers(recipe: Recipe, processes: int) -> int:
    """The processes, or groups of them that share rows or divide matrices, that read different samples."""
    return max(1, processes // (recipe.sharding.sequence * recipe.sharding.tensor))


def samples_per_step(recipe: Recipe, processes: int) -> int:
    """The samples of one optimizer step of all processes."""
    return recipe.train.batch_size * recipe.train.gradient_accumulation * readers(recipe, processes)


def processes_before(checkpoints: Path, before: Recipe) -> int:
    """The processes that wrote the newest checkpoint, or those of the recipe if there is none."""
    return int(checkpoint.newest_metadata(checkpoints).get("processes", before.sharding.gpus))


def samples_before(checkpoints: Path, before: Recipe) -> int:
    """The samples per step of the run so far, from its newest checkpoint, or from its recipe if there is none."""
    metadata = checkpoint.newest_metadata(checkpoints)
    return int(metadata.get(SAMPLES, samples_per_step(before, processes_before(checkpoints, before))))


def writes_distributed(recipe: Recipe) -> bool:
    """Whether the run writes its checkpoints in PyTorch's distributed format."""
    return OPTIMIZERS[recipe.train.optimizer].has_plain_states and (recipe.sharding.fsdp or recipe.train.save_async)


def divided(checkpoints: Path, before: Recipe, now: Recipe) -> tuple[str, ...]:
    """The overrides that give a resumed run the samples per step of the run so far; () if it has them already.

    A recipe that names other samples per step of one process than the run so far is left alone.

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
    parts = readers(now, processes)
    if total % parts:
        most = 64 // now.sharding.sequence
        counts = ", ".join(str(n * now.sharding.sequence) for n in range(1, most + 1) if total % n == 0)
        raise RunFolderError(
            f"sharding.gpus: the run has {total} samples per step, which {processes} processes cannot share equally; "
            f"resume with one of {counts}"
        )
    share = total // parts
    batch = max(n for n in range(1, now.train.batch_size + 1) if share % n == 0)
    return tuple(f"{key}={value}" for key, value in zip(BATCH_KEYS, (batch, share // batch), strict=True))


def engine_problem(checkpoints: Path, before: Recipe, now: Recipe) -> str | None:
    """Why this run cannot read the checkpoints of the run so far, with the next step; None if it can."""
    was, written = before.sharding, processes_before(checkpoints, before)
    if (was.zero, was.fsdp, written) == (now.sharding.zero, now.sharding.fsdp, processes_now(now)):
        return None
    had = f"the run had sharding.zero: {was.zero}, sharding.fsdp: {was.fsdp} and {written} processes"
    if was.zero or now.sharding.zero:
        export = f"`tigon export {checkpoint.newest_path(checkpoints)} FOLDER`"
        return (
            f"{had}, and DeepSpeed reads only its own checkpoints, of the same stage and processes; resume with those, "
            f"or write the weights with {export} and start a new run from them"
        )
    if (was.fsdp or now.sharding.fsdp) and not OPTIMIZERS[now.train.optimizer].has_plain_states:
        return (
            f"{had}, and the states of train.optimizer: {now.train.optimizer} are divided for those; resume with "
            "those, or start a new run without --resume and with another output.name"
        )
    return None


def counted_before(folder: Path, rank: int, processes: int) -> dict[str, Any]:
    """This process's counters in a checkpoint."""
    files = sorted(folder.glob("counted-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    counted: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return counted[rank] if len(files) == processes else redistributed(counted, rank)


def redistributed(counted: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """The counters of another number of processes for the process `rank`, so that the next record is the same.

    The record averages the sums of losses over processes. It adds up an objective's own sums, so the first process gets
    their totals and the others get 0.
    """
    own = {name: _added([each[name] for each in counted], rank) for name in counted[0] if name not in ALIKE}
    mean = sum(float(each["gate"]["loss_sum"]) for each in counted) / len(counted)
    alike = {name: counted[0][name] for name in ALIKE if name in counted[0]}
    return {**own, **alike, "gate": {**counted[0]["gate"], "loss_sum": mean}}


def _added(parts: Sequence[Any], rank: int) -> Any:
    """The elementwise sum of nested numbers for the first process, and 0 for the others."""
    if isinstance(parts[0], Mapping):
        return {name: _added([part[name] for part in parts], rank) for name in parts[0]}
    if isinstance(parts[0], list):
        return [_added(each, rank) for each in zip(*parts, strict=True)]
    return 0.0 if rank else sum(parts)
