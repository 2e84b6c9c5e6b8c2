"""What a run does about faults that Python reports: words and the way on; and what a resumed run is refused for."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING, Any

from tigon.errors import ProcessError, RecipeError, RunFolderError, TigonError
from tigon.trainer import run_folder
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch, signals
from tigon.trainer.guards import prediction, preflight, system_limits
from tigon.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.trainer.prepare import Prepared

# Of gloo, of PyTorch's store and of NCCL.
LOST_PEER = r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited"


def to_user_error(error: Exception, run: RunFolder, command: str) -> TigonError | None:
    """What the user can act on; None: a bug, which keeps its traceback."""
    text = " ".join(str(error).split())
    if _is_removed(run):
        return RunFolderError(
            f"{run.path}: this run folder was removed or renamed while the run wrote into it; start the run anew: "
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
            f"continue with `{command} --resume`, with --set train.workers=0 if it happens again"
        )
    if lost := lost_peer_message(error):
        return ProcessError(
            f"process {launch.rank()} of {launch.world_size()} has lost another, which ended or cannot be reached "
            f"({lost}); mend what ended it and continue with `{command} --resume`"
        )
    return None


def is_no_checkpoints_fault(error: Exception, run: RunFolder) -> bool:
    """Whether an error while a checkpoint is loaded says nothing of that checkpoint."""
    return bool(_is_removed(run) or system_limits.words(error) or lost_peer_message(error))


def _is_removed(run: RunFolder) -> bool:
    return not (run.path / run_folder.RECIPE).exists()


def _again(run: RunFolder, command: str) -> str:
    """How to continue the run, or to repeat it where it has no checkpoint."""
    if any((run.path / run_folder.CHECKPOINTS).glob("checkpoint-*")):
        return f"`{command} --resume`"
    return f"remove this folder, which holds no checkpoint, and `{command}`"


def lost_peer_message(error: Exception) -> str | None:
    """In the words of what carries the collectives, if `error` is that another process does not answer any more."""
    if launch.world_size() == 1 or not isinstance(error, RuntimeError):
        return None
    match = re.search(LOST_PEER, str(error))
    return match[0] if match else None


def _worker_is_lost(error: Exception) -> bool:
    """PyTorch noticed it, by a signal or a time-out, or the process was gone before it had handed a batch over.

    An exception raised inside such a process is a bug and none of these: PyTorch raises it here, as what it was.
    """
    if isinstance(error, RuntimeError) and re.search(r"DataLoader (worker \(pid|timed out)", str(error)):
        return True
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, (OSError, EOFError)) and resource_sharer.__file__ in frames


@contextmanager
def explain_out_of_memory(run: RunFolder, prepared: Prepared) -> Iterator[None]:
    """Running out of memory in the block is said with what was needed, and how the run can go on."""
    from tigon.trainer.trainer import EvaluationBroken  # loads transformers

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
    """How to go on from the last checkpoint with the same numbers in less memory, as the end of a sentence."""
    train = prepared.recipe.train
    if not any((run.path / run_folder.CHECKPOINTS).glob("checkpoint-*")):
        return ""
    if train.batch_size % 2:
        return f"; what was saved is kept: {prepared.command} --set train.checkpointing=full --resume"
    halved = f"--set train.batch_size={train.batch_size // 2} --set train.gradient_accumulation="
    return (
        f"; what was saved is kept, and half the micro-batch twice as often gives the same numbers: {prepared.command} "
        f"{halved}{2 * train.gradient_accumulation} --resume"
    )


def check_same_run(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Refuse to go on with other data, in another number of processes or another precision; say what else differs.

    Raises RunFolderError naming every difference that is refused.
    """
    assert run.resume_point is not None
    before, then, now = run.read_json(run_folder.DATA), run.resume_point.metadata, checkpoint_metadata(prepared)
    refused = []
    if before["fingerprint"] != prepared.data["fingerprint"]:
        tokens = f"{before.get('tokens')} tokens then, {prepared.data['tokens']} now"
        refused.append(f"the data changed since the run began ({tokens})")
    refused += [
        f"{run.resume_point.path.name} was written with {word} {then.get(name)}, and this run has {now[name]}"
        for name, word in (("processes", "processes"), ("precision", "train.precision"))
        if then.get(name) != now[name]
    ]
    if refused:
        raise RunFolderError(f"{run.path}: {'; '.join(refused)}; make them agree, or start a new run without --resume")
    warnings = [*_mended(run, prepared), *_changed(run, then, now)]
    for line in warnings:
        console.print(f"warning  {line}", markup=False, soft_wrap=True)
    if launch.rank() == 0:
        run.append({"event": "resume", "step": checkpoint.step_of(run.resume_point.path), "warnings": warnings})


def _changed(run: RunFolder, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs from the run so far, and may."""
    assert run.resume_point is not None
    changes = [f"passed over: {problem}" for problem in run.resume_point.passed_over]
    changes += [f"{name}: {old} before, {new} now; the same numbers to rounding" for name, old, new in run.changed]
    versions = {**then.get("versions", {}), "device": then.get("device")}
    current = {**now["versions"], "device": now["device"]}
    return changes + [
        f"{name} {versions.get(name)} before, {current[name]} now: losses may differ in rounding"
        for name in current
        if versions.get(name) != current[name]
    ]


def _mended(run: RunFolder, prepared: Prepared) -> list[str]:
    """Write anew what the report needs of the folder and can be had again, where it is damaged; what was."""
    repairs = []
    data, environment = run.read_json(run_folder.DATA), preflight.environment(prepared.device)
    wrong = [name for name, value in prepared.data.items() if not _agrees(data.get(name), value)]
    if wrong:
        repairs.append(f"{run_folder.DATA}: {', '.join(wrong)} did not agree with the data, and are written anew")
    try:
        intact = _is_environment(run.read_json(run_folder.ENVIRONMENT), environment)
    except RunFolderError:
        intact = False
    if not intact:
        repairs.append(
            f"{run_folder.ENVIRONMENT} is damaged, or another tigon's; it is written anew, as of this machine now"
        )
    lost = run.damaged_lines()
    if lost:
        repairs.append(f"{run_folder.METRICS}: lines that are no records are left out: {lost}")
    if not any(record["event"] == "data" for record in run.records()):
        repairs.append(f"{run_folder.METRICS} lacks its beginning; the report shows what is left of it")
    if launch.rank() == 0:
        if wrong:
            run.write_json(run_folder.DATA, prepared.data)
        if not intact:
            run.write_json(run_folder.ENVIRONMENT, environment)
    return repairs


def _agrees(then: Any, now: Any) -> bool:
    """Another machine may round a float's last digit otherwise."""
    return type(then) is type(now) and (math.isclose(then, now) if isinstance(now, float) else then == now)


def _is_environment(environment: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether it has the parts of an environment, and in them what the report reads."""
    if environment.keys() != now.keys() or not all(isinstance(part, dict) for part in environment.values()):
        return False
    only_on_gpu = {"gpu", "gpu_memory_bytes"}
    whole = all(now[part].keys() - environment[part].keys() <= only_on_gpu for part in now)
    return whole and isinstance(environment["hardware"]["device"], str)


def checkpoint_metadata(prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    versions = preflight.environment(prepared.device)["versions"]
    return {
        "processes": launch.world_size(), "precision": prepared.choices.precision, "device": prepared.device.type,
        "versions": {name: versions[name] for name in ("torch", "transformers", "accelerate", "tigon")},
    }  # fmt: skip


def unreadable(run: RunFolder, error: Exception) -> RunFolderError:
    """Of a checkpoint whose files are as they were written, and cannot be loaded all the same."""
    words = " ".join(str(error).split())
    refused = re.search(r"GLOBAL (\S+)", words)  # of a pickle
    reason = f"{type(error).__name__}: {f'holds {refused[1]}, no data' if refused else words[:160]}"
    return RunFolderError(
        f"{run.checkpoint}: cannot be loaded ({reason}); remove it to resume from the checkpoint before"
    )
