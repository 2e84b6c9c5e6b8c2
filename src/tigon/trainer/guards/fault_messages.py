"""Error messages for the faults of a run, and how to continue it; and the checks of a resumed run."""

from __future__ import annotations

import math
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING, Any

from tigon.errors import ProcessError, RecipeError, RunFolderError, TigonError
from tigon.trainer import run_folder
from tigon.trainer.checkpoint import checkpoint, resume_rules
from tigon.trainer.distributed import launch, signals
from tigon.trainer.distributed.torchrun import LOST_ANOTHER
from tigon.trainer.evaluation.token_mean import EvaluationBroken
from tigon.trainer.guards import prediction, preflight, system_limits
from tigon.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.recipe.keys import Recipe
    from tigon.trainer.prepare import Prepared

# The error texts of gloo, PyTorch's store and NCCL for a peer that has gone.
LOST_PEER = r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited"


def to_user_error(error: Exception, run: RunFolder, command: str) -> TigonError | None:
    """The message for a fault that the user can act on; None for a bug, which keeps its traceback."""
    text = " ".join(str(error).split())
    if _is_removed(run):
        return RunFolderError(
            f"{run.path}: this run folder was removed or renamed while the run wrote into it; start the run again: "
            f"`{command}`"
        )
    if checkpoint.disk_is_full(error, run.path):
        return RunFolderError(f"{run.path}: the disk is full; free some space, then {_again(run, command)}")
    if at_limit := system_limits.words(error):
        return RunFolderError(f"{run.path}: {at_limit}, then {_again(run, command)}")
    if _worker_is_lost(error):
        signals.end_children()
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


def is_no_checkpoints_fault(error: Exception, run: RunFolder) -> bool:
    """Whether an error while a checkpoint is loaded has another cause than the checkpoint."""
    return bool(_is_removed(run) or system_limits.words(error) or lost_peer_message(error))


def _is_removed(run: RunFolder) -> bool:
    return not (run.path / run_folder.RECIPE).exists()


def _again(run: RunFolder, command: str) -> str:
    """How to continue the run, or to repeat it without a checkpoint, as the end of a sentence."""
    if any((run.path / run_folder.CHECKPOINTS).glob("checkpoint-*")):
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
        message = prediction.out_of_memory(
            error, prepared.prediction, prepared.recipe, folder=run.path, device=prepared.device,
            command=prepared.command,
        )  # fmt: skip
        raise RecipeError(f"{message}{_smaller_steps(run, prepared)}") from None


def _smaller_steps(run: RunFolder, prepared: Prepared) -> str:
    """How to continue from the last checkpoint with the same numbers, up to rounding, in less memory: the end of a
    sentence."""
    train = prepared.recipe.train
    if not any((run.path / run_folder.CHECKPOINTS).glob("checkpoint-*")):
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


def check_same_run(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Check that a resumed run has the data, samples per step and precision of the run so far.

    Other differences, and files that had to be repaired, become warnings on the console and in metrics.jsonl.

    Raises:
        RunFolderError: One of the three differs, or DeepSpeed's processes do; the message names every difference.
    """
    assert run.resume_point is not None
    before, then, now = run.read_json(run_folder.DATA), run.resume_point.metadata, checkpoint_metadata(prepared)
    refused = []
    if before["fingerprint"] != prepared.data["fingerprint"]:
        tokens = f"{before.get('tokens')} tokens then, {prepared.data['tokens']} now"
        refused.append(f"the data changed since the run began ({tokens})")
    refused += [
        f"{run.resume_point.path.name} was written with {title} {then.get(name)}, and this run has {now[name]}"
        for name, title in (
            (resume_rules.SAMPLES, "samples per step"), ("processes", "processes"), ("precision", "train.precision")
        )
        if then.get(name) != now[name] and not _may_change(name, then, prepared.recipe)
    ]  # fmt: skip
    if refused:
        raise RunFolderError(
            f"{run.path}: {'; '.join(refused)}; use the run's settings, or start a new run without --resume and "
            "with another output.name"
        )
    warnings = [*_mended(run, prepared), *_changed(run, then, now)]
    for line in warnings:
        console.print(f"warning  {line}", markup=False, soft_wrap=True)
    if launch.rank() == 0:
        run.append({"event": "resume", "step": checkpoint.step_of(run.resume_point.path), "warnings": warnings})


def _may_change(name: str, then: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether a difference in this entry is allowed. Checkpoints of older versions lack the samples per step."""
    if name == resume_rules.SAMPLES:
        return name not in then
    return name == "processes" and recipe.sharding.zero == 0


def _changed(run: RunFolder, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The allowed differences from the run so far, one sentence each."""
    assert run.resume_point is not None
    changes = [f"checkpoint skipped: {problem}" for problem in run.resume_point.passed_over]
    changes += [f"{name}: {old} before, {new} now; losses may differ in rounding" for name, old, new in run.changed]
    if then.get("processes") != now["processes"]:
        changes.append(
            f"processes: {then.get('processes')} before, {now['processes']} now: each step has the same samples; "
            "dropout masks other elements"
        )
    versions = {**then.get("versions", {}), "device": then.get("device")}
    current = {**now["versions"], "device": now["device"]}
    return changes + [
        f"{name} {versions.get(name)} before, {current[name]} now: losses may differ in rounding"
        for name in current
        if versions.get(name) != current[name] and (name in versions or name not in preflight.OF_SOME_RUNS)
    ]


def _mended(run: RunFolder, prepared: Prepared) -> list[str]:
    """Repair damaged files of the run folder that the report needs. Returns a sentence for each repair."""
    repairs = []
    data, environment = run.read_json(run_folder.DATA), preflight.environment(prepared.device)
    wrong = [name for name, value in prepared.data.items() if not _agrees(data.get(name), value)]
    if wrong:
        repairs.append(f"{run_folder.DATA}: {', '.join(wrong)} did not agree with the data and are corrected")
    try:
        intact = _is_environment(run.read_json(run_folder.ENVIRONMENT), environment)
    except RunFolderError:
        intact = False
    if not intact:
        repairs.append(
            f"{run_folder.ENVIRONMENT} is damaged or of another version of tigon; it is written again for this machine"
        )
    lost = run.damaged_lines()
    if lost:
        repairs.append(f"{run_folder.METRICS}: damaged lines that are dropped: {lost}")
    if not any(record["event"] == "data" for record in run.records()):
        repairs.append(f"{run_folder.METRICS} lacks its beginning; the report shows the remaining records")
    if launch.rank() == 0:
        if wrong:
            run.write_json(run_folder.DATA, prepared.data)
        if not intact:
            run.write_json(run_folder.ENVIRONMENT, environment)
    return repairs


def _agrees(then: Any, now: Any) -> bool:
    """Whether two values are equal; floats up to rounding, which may differ between machines."""
    return type(then) is type(now) and (math.isclose(then, now) if isinstance(now, float) else then == now)


def _is_environment(environment: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether `environment` has all parts of an environment and every key in them that the report reads."""
    if environment.keys() != now.keys() or not all(isinstance(part, dict) for part in environment.values()):
        return False
    of_some = {"gpu", "gpu_memory_bytes", *preflight.OF_SOME_RUNS}
    whole = all(now[part].keys() - environment[part].keys() <= of_some for part in now)
    return whole and isinstance(environment["hardware"]["device"], str)


def checkpoint_metadata(prepared: Prepared) -> dict[str, Any]:
    """The settings and versions of a run that its checkpoints store, for `check_same_run`."""
    versions = preflight.environment(prepared.device)["versions"]
    return {
        "processes": launch.world_size(), "precision": prepared.settings.train.precision,
        "device": prepared.device.type,
        resume_rules.SAMPLES: resume_rules.samples_per_step(prepared.recipe, launch.world_size()),
        "versions": {name: versions[name] for name in ("torch", "transformers", "accelerate", "tigon")},
    }  # fmt: skip


def unreadable(run: RunFolder, error: Exception) -> RunFolderError:
    """The error for a checkpoint that passed its manifest but cannot be loaded."""
    text = " ".join(str(error).split())
    refused = re.search(r"GLOBAL (\S+)", text)  # an object in a pickle that torch.load refuses
    reason = f"{type(error).__name__}: {f'holds {refused[1]}, which is code' if refused else text[:160]}"
    return RunFolderError(
        f"{run.checkpoint}: cannot be loaded ({reason}); remove it to resume from the previous checkpoint"
    )
