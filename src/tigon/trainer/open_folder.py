"""Opens the run folder, a new one or that of the run to resume, together with the other processes.

The processes of a run on several machines share the folder, and are refused if one of them does not see it.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.errors import DataError, RecipeError, RunFolderError
from tigon.trainer import run_folder
from tigon.trainer.distributed import launch, torchrun
from tigon.trainer.guards import fault_messages, preflight, system_limits
from tigon.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.recipe.keys import Recipe
    from tigon.trainer.prepare import Prepared

SEEN_S = 30  # file systems on a network show new files to other machines after a delay
TOKEN = ".shared-"


def create(prepared: Prepared, command: str, held: ExitStack) -> RunFolder:
    """Create the folder of a new run. Every process calls it.

    held: The stack that releases the folder's lock when the run ends.
    """
    folder = ""
    if launch.rank() == 0:
        run = run_folder.create(prepared.recipe.output, command)
        try:
            _write_inputs(run, prepared)
        except BaseException as error:
            shutil.rmtree(run.path, ignore_errors=True)  # otherwise the next attempt is refused: the folder exists
            if isinstance(error, OSError):
                reason = system_limits.words(error) or error.strerror
                raise RunFolderError(f"{run.path}: cannot be written: {reason}; then start the run again") from None
            raise
        folder = str(run.path)
    run = RunFolder(Path(launch.broadcast(folder)))
    try:
        check_shared(run.path)
    except RunFolderError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    if launch.rank() == 0:
        held.enter_context(run_folder.locked(run.path))
    return run


def join(run: RunFolder, prepared: Prepared, console: Console) -> RunFolder:
    """Continue a run. Every process calls it. run: The folder and its newest checkpoint, in the main process.

    Raises:
        RunFolderError: The run has other data or settings than the run so far, or a process does not see its folder.
    """
    run = launch.broadcast(run)
    check_shared(run.path)
    if launch.rank() == 0:
        torchrun.mark(run.path)
    fault_messages.check_same_run(run, prepared, console)
    return run


def check_shared(path: Path) -> None:
    """Check that every process sees the run folder `path`. Every process calls it.

    The main process writes a file with a random name, and the others look for it.

    Raises:
        RunFolderError: In the main process, if a process on another machine does not see the file.
        SystemExit: In the other processes then, with code 2.
    """
    if not launch.has_several_nodes():
        return
    token = path / f"{TOKEN}{launch.broadcast(uuid.uuid4().hex[:12])}"
    error = ""
    if launch.rank() == 0:
        try:
            token.touch()
        except OSError as caught:
            error = f"{path}: cannot be written: {caught.strerror}; choose another output.folder"
    if not (error := launch.broadcast(error)):
        answers = launch.gather((_appears(token), socket.gethostname()))
        blind = [(rank, host) for rank, (seen, host) in enumerate(answers) if not seen]
        if launch.rank() == 0:
            token.unlink()
        if not blind:
            return
        who = ", ".join(f"process {rank} on {host}" for rank, host in blind)
        error = (
            f"output.folder: {path} on {answers[0][1]} is not visible to {who}; a run on "
            "several machines needs a folder on a disk that all of them share: set output.folder to one"
        )
    if launch.rank() > 0:
        raise SystemExit(2)
    raise RunFolderError(error)


def _appears(file: Path) -> bool:
    """Whether a file is there, or comes within `SEEN_S`."""
    deadline_s = time.monotonic() + SEEN_S
    while not file.exists():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(file.parent)  # NFS then asks its server again
    return True


def _write_inputs(run: RunFolder, prepared: Prepared) -> None:
    """Write the files that identify a run and make its checkpoints usable, and the first records."""
    import yaml

    text = yaml.safe_dump(prepared.recipe.as_mapping(), sort_keys=False, allow_unicode=True)
    torchrun.mark(run.path)
    run.write_text(run_folder.RECIPE, "# The resolved recipe of this run.\n" + text)
    run.write_json(run_folder.ENVIRONMENT, preflight.environment(prepared.device))
    run.write_json(run_folder.DATA, prepared.data)
    prepared.saved_tokenizer.save_pretrained(run.path / "tokenizer")
    run.append({"event": "data", "step": 0, **prepared.data})
    if prepared.warnings:
        run.append({"event": "warnings", "step": 0, "warnings": list(prepared.warnings)})
    if prepared.wrong_ops:
        run.append({"event": "self_test", "step": 0, "wrong_ops": dict(prepared.wrong_ops)})
    if prepared.unused_tensors:
        run.append({"event": "checkpoint", "step": 0, "unused_tensors": list(prepared.unused_tensors)})


def check_same_recipe(recipe: Recipe) -> None:
    """Check that every process has read the same recipe with the same --set options. Every process calls it.

    recipe: The recipe as this process has read it, before a resumed run divides its samples.

    Raises:
        RecipeError: In the main process, if a process has another recipe.
        SystemExit: In the other processes then, with code 2.
    """
    if (found := _different(repr(recipe.as_mapping()))) is not None:
        host, other, its_host, _ = found
        raise RecipeError(
            f"the recipe or its --set options of process {other} on {its_host} differ from those of process 0 "
            f"on {host}; start the same command on every machine"
        )


def check_same_data(data: Mapping[str, Any]) -> None:
    """Check that every process has read the same data. Every process calls it.

    data: `Prepared.data`.

    Raises:
        DataError: In the main process, if a process has other data.
        SystemExit: In the other processes then, with code 2.
    """
    if (found := _different((data["fingerprint"], data["tokens"]))) is not None:
        host, other, its_host, (_, tokens) = found
        raise DataError(
            f"the data of process {other} on {its_host} differ from those of process 0 on {host} "
            f"({tokens:,} and {data['tokens']:,} tokens); give all machines the same data files"
        )


def _different(own: Any) -> tuple[str, int, str, Any] | None:
    """Compare a value of every process with that of process 0. On one machine they are not compared.

    Returns:
        (the main process's machine, the first process with another value, its machine, its value), or None if all are
        the same.

    Raises:
        SystemExit: In the processes other than the main one if a value differs, with code 2.
    """
    if not launch.has_several_nodes():
        return None
    (host, first), *others = launch.gather((socket.gethostname(), own))
    for other, (its_host, value) in enumerate(others, start=1):
        if value != first:
            if launch.rank() > 0:
                raise SystemExit(2)
            return host, other, its_host, value
    return None


def lines(path: Path) -> list[str]:
    """The line for the user about the folder of a run on several machines; [] on one machine."""
    return [f"disks    all machines share {path}"] if launch.has_several_nodes() else []
