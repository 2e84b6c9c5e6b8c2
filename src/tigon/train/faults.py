"""What a run does about faults that Python reports: words and the way on; and what a resumed run is refused for."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING, Any

from tigon.errors import ProcessError, RecipeError, RunFolderError, TigonError
from tigon.train import checkpoint, folder, launch, preflight, stopping
from tigon.train.folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.train.prepare import Prepared

# Of gloo, of PyTorch's store and of NCCL.
LOST_PEER = r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited"


def in_words(error: Exception, run: RunFolder, command: str) -> TigonError | None:
    """What the user can act on; None: a bug, which keeps its traceback."""
    text = " ".join(str(error).split())
    if checkpoint.disk_is_full(error, run.path):
        return RunFolderError(f"{run.path}: the disk is full; free some space, then `{command} --resume`")
    if _worker_is_lost(error):
        stopping.end_children()
        return ProcessError(
            f"a process that prepares batches (train.workers) died or hangs: {type(error).__name__}: {text[:200]}; "
            f"continue with `{command} --resume`, with --set train.workers=0 if it happens again"
        )
    if lost := how_another_was_lost(error):
        return ProcessError(
            f"process {launch.rank()} of {launch.processes()} has lost another, which ended or cannot be reached "
            f"({lost}); mend what ended it and continue with `{command} --resume`"
        )
    return None


def how_another_was_lost(error: Exception) -> str | None:
    """In the words of what carries the collectives, if `error` is that another process does not answer any more."""
    if launch.processes() == 1 or not isinstance(error, RuntimeError):
        return None
    found = re.search(LOST_PEER, str(error))
    return found[0] if found else None


def _worker_is_lost(error: Exception) -> bool:
    """PyTorch noticed it, by a signal or a time-out, or the process was gone before it had handed a batch over.

    An exception raised inside such a process is a bug and none of these: PyTorch raises it here, as what it was.
    """
    if isinstance(error, RuntimeError) and re.search(r"DataLoader (worker \(pid|timed out)", str(error)):
        return True
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, (OSError, EOFError)) and resource_sharer.__file__ in frames


@contextmanager
def memory_watched(run: RunFolder, prepared: Prepared) -> Iterator[None]:
    """Running out of memory in the block is said with what was needed, and how the run can go on."""
    from tigon.train import prediction
    from tigon.train.trainer import EvaluationBroken

    try:
        yield
    except EvaluationBroken as error:
        model = run.path / "model"
        kept = f"; the final weights are in {model}" if model.exists() else ""
        raise RecipeError(f"{error}{kept}{_smaller_steps(run, prepared)}") from None
    except RuntimeError as error:
        if not prediction.is_out_of_memory(error):
            raise
        said = prediction.out_of_memory(
            error, prepared.prediction, prepared.recipe, folder=run.path, device=prepared.device,
            command=prepared.command,
        )  # fmt: skip
        raise RecipeError(f"{said}{_smaller_steps(run, prepared)}") from None


def _smaller_steps(run: RunFolder, prepared: Prepared) -> str:
    """How to go on from the last checkpoint with the same numbers in less memory, as the end of a sentence."""
    train = prepared.recipe.train
    if not any((run.path / folder.CHECKPOINTS).glob("checkpoint-*")):
        return ""
    if train.batch_size % 2:
        return f"; what was saved is kept: {prepared.command} --set train.checkpointing=full --resume"
    halved = f"--set train.batch_size={train.batch_size // 2} --set train.gradient_accumulation="
    return (
        f"; what was saved is kept, and half the micro-batch twice as often gives the same numbers: {prepared.command} "
        f"{halved}{2 * train.gradient_accumulation} --resume"
    )


def check_same_run(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Refuse to go on with other data, in another number of processes or another precision; say what else differs."""
    before = run.read_json(folder.DATA)
    if before["fingerprint"] != prepared.data["fingerprint"]:
        raise RunFolderError(
            f"{run.path}: the data changed since the run began ({before['tokens']} tokens then, "
            f"{prepared.data['tokens']} now); restore it, or start a new run without --resume"
        )
    assert run.found is not None
    then, now = run.found.facts, facts(prepared)
    for name, word in (("processes", "processes"), ("precision", "train.precision")):
        if then.get(name) != now[name]:
            raise RunFolderError(
                f"{run.found.path}: written with {word} {then.get(name)}, and this run has {now[name]}, which gives "
                "other numbers; make them agree"
            )
    said = [f"passed over: {problem}" for problem in run.found.passed_over]
    said += [f"{name}: {old} before, {new} now; the same numbers to rounding" for name, old, new in run.changed]
    versions = {**then.get("versions", {}), "device": then.get("device")}
    current = {**now["versions"], "device": now["device"]}
    said += [
        f"{name} {versions.get(name)} before, {current[name]} now: losses may differ in rounding"
        for name in current
        if versions.get(name) != current[name]
    ]
    for line in said:
        console.print(f"warning  {line}", markup=False, soft_wrap=True)
    if launch.rank() == 0:
        run.append({"event": "resume", "step": checkpoint.step_of(run.found.path), "warnings": said})


def facts(prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    versions = preflight.environment(prepared.device)["versions"]
    return {
        "processes": launch.processes(), "precision": prepared.choices.precision, "device": prepared.device.type,
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
