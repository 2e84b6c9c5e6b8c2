"""Error messages for the faults of a run, and how to continue it."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING, Any

from tigon.errors import ProcessError, RecipeError, RunFolderError, TigonError
from tigon.trainer.checkpoint import checkpoint, resume_rules
from tigon.trainer.distributed import launch, signals
from tigon.trainer.distributed.torchrun import LOST_ANOTHER
from tigon.trainer.evaluation.token_mean import EvaluationBroken
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.guards import prediction, preflight, system_limits

if TYPE_CHECKING:
    from tigon.trainer.prepare import Prepared

# The error texts of gloo, PyTorch's store and NCCL for a peer that has gone.
LOST_PEER = r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited"


def to_user_error(error: Exception, run: RunFolder, command: str) -> TigonError | None:
    """The message for a fault that the user can act on; None for a bug, which keeps its traceback."""
    text = " ".join(str(error).split())
    if run.was_removed:
        return RunFolderError(
            f"{run.path}: this run folder was removed or renamed while the run wrote into it; start the run again: "
            f"`{command}`"
        )
    if checkpoint.disk_is_full(error, run.path):
        return RunFolderError(f"{run.path}: the disk is full; free some space, then {_again(run, command)}")
    if at_limit := system_limits.words(error):
        return RunFolderError(f"{run.path}: {at_limit}, then {_again(run, command)}")
    if _worker_is_lost(error):
        signals.kill_child_processes()
        return ProcessError(
            f"a process that prepares batches (train.workers) died or hangs: {type(error).__name__}: {text[:200]}; "
            f"continue with `{command} --resume`; add --set train.workers=0 if it happens again"
        )
    if lost := lost_peer_message(error):
        return ProcessError(
            f"process {launch.rank()} of {launch.world_size()} {LOST_ANOTHER}{_who_is_lost()}, which ended or cannot "
            f"be reached ({lost}); fix the cause and continue with `{command} --resume`"
        )
    return None


def _who_is_lost() -> str:
    """The processes that do not answer, in parentheses."""
    silent = launch.silent_processes()
    if silent is None:
        return f" (the store at {os.environ.get('MASTER_ADDR')} is gone)"
    return f" ({', '.join(map(str, silent))})" if silent else ""


def is_checkpoints_fault(error: Exception, run: RunFolder) -> bool:
    """Whether an error before the first step is a fault of the checkpoint that the run resumes from."""
    if run.checkpoint is None or isinstance(error, TigonError) or prediction.is_out_of_memory(error):
        return False
    return not (run.was_removed or system_limits.words(error) or lost_peer_message(error))


def _again(run: RunFolder, command: str) -> str:
    """How to continue the run, or to repeat it without a checkpoint, as the end of a sentence."""
    if run.has_checkpoints:
        return f"run `{command} --resume`"
    return f"remove this folder, which holds no checkpoint, and run `{command}`"


def lost_peer_message(error: Exception) -> str | None:
    """The part of the error's text that says that another process no longer answers; None for another error."""
    if launch.world_size() == 1 or not isinstance(error, RuntimeError):
        return None
    match = re.search(LOST_PEER, str(error))
    return match[0] if match else None


def _worker_is_lost(error: Exception) -> bool:
    """Whether a data loader process died or hangs: PyTorch reports it, or a batch of a process that ended is missing.

    An exception inside such a process is a bug. PyTorch raises it here with its own type, so it does not match.
    """
    if isinstance(error, RuntimeError) and re.search(r"DataLoader (worker \(pid|timed out)", str(error)):
        return True
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, (OSError, EOFError)) and resource_sharer.__file__ in frames


@contextmanager
def explain_out_of_memory(run: RunFolder, prepared: Prepared) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a message with the memory needed and how to continue the run.

    Raises:
        RecipeError: The block ran out of memory.
    """
    try:
        yield
    except EvaluationBroken as error:
        model = run.path / "model"
        kept = f"; the final weights are in {model}" if model.exists() else ""
        raise RecipeError(f"{error}{kept}{_smaller_steps(run, prepared)}") from None
    except RuntimeError as error:
        if not prediction.is_out_of_memory(error):
            raise
        message = prediction.out_of_memory(error, prepared, prepared.prediction, run.path, prepared.command)
        raise RecipeError(f"{message}{_smaller_steps(run, prepared)}") from None


def _smaller_steps(run: RunFolder, prepared: Prepared) -> str:
    """How to continue from the last checkpoint with the same numbers, up to rounding, in less memory: the end of a
    sentence."""
    train = prepared.recipe.train
    if not run.has_checkpoints:
        return ""
    if train.batch_size % 2:
        return (
            "; the checkpoints are kept, and activation checkpointing gives the same numbers, up to rounding, in less "
            f"memory: {prepared.command} --set train.checkpointing=full --resume"
        )
    halved = f"--set train.batch_size={train.batch_size // 2} --set train.gradient_accumulation="
    return (
        "; the checkpoints are kept, and half the micro-batch with twice the accumulation gives the same numbers, up "
        f"to rounding: {prepared.command} {halved}{2 * train.gradient_accumulation} --resume"
    )


def checkpoint_metadata(prepared: Prepared) -> dict[str, Any]:
    """The settings and versions of a run that its checkpoints store. open_folder.py compares them."""
    versions = preflight.environment(prepared.device)["versions"]
    return {
        "processes": launch.world_size(),
        "precision": prepared.settings.train.precision,
        "device": prepared.device.type,
        resume_rules.SAMPLES_KEY: resume_rules.samples_per_step(prepared.recipe, launch.world_size()),
        "versions": {name: versions[name] for name in ("torch", "transformers", "accelerate", "tigon")},
    }


def unreadable(run: RunFolder, error: Exception) -> RunFolderError:
    """The error for a checkpoint that passed its manifest but cannot be loaded."""
    text = " ".join(str(error).split())
    refused = re.search(r"GLOBAL (\S+)", text)  # an object in a pickle that torch.load refuses
    reason = f"{type(error).__name__}: {f'holds {refused[1]}, which is code' if refused else text[:160]}"
    return RunFolderError(
        f"{run.checkpoint}: cannot be loaded ({reason}); remove it to resume from the previous checkpoint"
    )
