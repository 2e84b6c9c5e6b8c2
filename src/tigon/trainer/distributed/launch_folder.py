"""The files of a launch: the run folder that a restart continues, and the logs of the processes.

The processes of a launch are started again after a failure (`--max-restarts`, also torchrun's). They find their run
folder by the launch's name in it, and continue from its newest checkpoint.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tigon.errors import RunFolderError
from tigon.recipe.keys import OutputConfig
from tigon.trainer import run_folder
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch
from tigon.trainer.distributed.failures import NODE
from tigon.trainer.distributed.nodes import Nodes

LAUNCH = "TIGON_LAUNCH"
"""The environment variable with the name of the launch, which is the same on all nodes and for all attempts."""
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun and `accelerate launch`, often to the same value
FILE = ".launch"
LOGS = "-logs"


def logs(output: OutputConfig) -> Path:
    """The folder of the processes' logs, beside the run folder, which does not exist yet when they start."""
    return Path(output.folder) / f"{output.name}{LOGS}"


@contextmanager
def library_messages(folder: Path) -> Iterator[None]:
    """Inside the block, what libraries write to file descriptor 2 goes into a file of the logs; sys.stderr does not.

    PyTorch's C++ code writes a page for each call of a store that is gone, and its level cannot be changed any more.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "launcher.log").open("ab")
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be created for the logs: {error.strerror}; choose another output.folder"
        ) from None
    sys.stderr.flush()
    before, terminal = sys.stderr, os.dup(2)
    sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1, errors="replace")
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        sys.stderr.close()
        sys.stderr = before
        os.close(terminal)
        file.close()


def remove_empty_logs(folder: Path) -> None:
    """Remove the logs of a node if its processes have written nothing, and the folder of all nodes if it is empty."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if any(path.stat().st_size for path in files if path.name != "launcher.log"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def options() -> str:
    """The options that started the launcher of this process, with a space before them; empty without options."""
    return f" {text}" if (text := os.environ.get(NODE)) else ""


def way_on(output: OutputConfig, n_nodes: int) -> str:
    """How to continue the run after it was ended, as a sentence."""
    where = " on every node" if n_nodes > 1 else ""
    path = run_folder.newest(output)
    steps = [checkpoint.step_of(each) for each in (path / run_folder.CHECKPOINTS).glob("checkpoint-*")] if path else []
    if steps:
        kept = f"{path}/{run_folder.CHECKPOINTS}/{checkpoint.name_of(max(steps))}"
        return f"{kept} is kept: start the command{where} again with --resume"
    if path is not None:
        return f"There is no checkpoint yet: remove {path} and start the command{where} again"
    return f"Start the command{where} again"


def is_new(nodes: Nodes | None) -> bool:
    """Whether this process has to check that the run folder can be created.

    A launcher on several machines leaves it to the main process: a node that comes back finds the folder of the run.
    With such a launcher, the main process alone answers.
    """
    if nodes is not None:
        return nodes.count == 1
    return launch_name() is None or launch.rank() == 0


def launch_name() -> str | None:
    """A name of the launch that all its attempts have; None without a launcher that starts processes again.

    torchrun's launches have no name of their own, so they are named by the launcher's process.
    """
    if LAUNCH in os.environ or TORCHRUN not in os.environ:
        return os.environ.get(LAUNCH)
    launcher = os.getppid()
    try:
        started = Path(f"/proc/{launcher}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # not Linux
        started = ""
    return f"{os.environ[TORCHRUN]}-{socket.gethostname()}-{launcher}-{started}"


def mark(path: Path) -> None:
    """Write the launch's name into the run folder."""
    if name := launch_name():
        (path / FILE).write_text(name + "\n", encoding="utf-8")


def is_marked(path: Path) -> bool:
    """Whether an attempt of this launch has made the run folder `path`."""
    try:
        return (path / FILE).read_text(encoding="utf-8").strip() == launch_name()
    except OSError:
        return False


def interrupted(output: OutputConfig) -> Path | None:
    """The run folder of an earlier attempt of this launch that has a checkpoint; None if there is none.

    An earlier attempt without a checkpoint has nothing to continue. The main process removes its folder.
    """
    path = run_folder.newest(output) if launch_name() is not None else None
    if path is None:
        return None
    ours = is_marked(path)
    if ours and any((path / run_folder.CHECKPOINTS).glob("checkpoint-*")):
        return path
    if ours and launch.rank() == 0:
        shutil.rmtree(path)
    return None
