"""Starts the processes of a run by torchrun, and finds the run folder that a restart of torchrun continues.

`tigon train --gpus N` starts N processes on this machine. On several machines, torchrun or another launcher starts
`tigon train` in each process (docs/several-machines.md). torchrun starts all processes again after a failure
(`--max-restarts`). They find their run folder by the launch's name in it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tigon.errors import ProcessError, RunFolderError
from tigon.recipe.keys import OutputConfig
from tigon.trainer.distributed import launch, signals
from tigon.trainer.folder import run_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

P = ParamSpec("P")
T = TypeVar("T")
LOST_ANOTHER = "has lost another process"
"""Part of the message of a process whose peer has ended."""
STOPPED = tuple(signals.EXIT_OFFSET + number for number in signals.SIGNALS)
"""Exit codes of processes that a signal stopped with a checkpoint."""
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # PyTorch up to 2.11 does not read it, and waits 30 s
MESSAGE_LETTERS = 300
RUN_ID = "TORCHELASTIC_RUN_ID"  # set by torchrun and `accelerate launch`, often to the same value
MARK = ".launch"


def start(arguments: Sequence[str], n_processes: int, *, max_restarts: int = 0) -> int:
    """Run `python ARGUMENTS` in `n_processes` processes of this machine, and pass signals on to them.

    Args:
        arguments: The words after `python`.
        n_processes: The number of processes.
        max_restarts: How often all processes are started again after one of them has failed.

    Returns:
        0; or the exit code of the process that failed first; or after a signal 128 plus its number.

    Raises:
        ProcessError: A process was killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # OpenMP would use all cores in each process.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n_processes)))
    os.environ.setdefault(SHUTDOWN_VARIABLE, str(launch.SHUTDOWN_S))
    os.environ[launch.LAUNCHER] = str(os.getpid())
    sys.stdout.flush()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # each process prints its own error
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n_processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except SignalException as error:
        return signals.EXIT_OFFSET + int(error.sigval)
    except ChildFailedError as error:
        return _exit_code(error.failures, n_processes)
    finally:
        del os.environ[launch.LAUNCHER]  # other children of this process have no launcher
    return 0


def options() -> list[str]:
    """The options of `tigon train` that started the launcher of this process, besides those of the recipe."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return [] if launch.LAUNCHER not in os.environ or restarts == "0" else ["--max-restarts", restarts]


def restart_line() -> list[str]:
    """The line for the user about a restart; [] in the first attempt."""
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return [] if number == "0" else [f"restart  {number} of {most} (--max-restarts), because a process failed"]


def _exit_code(failures: Mapping[int, Any], n_processes: int) -> int:
    """The exit code of the process that failed first. A line names the process, unless it has printed a line itself.

    Raises:
        ProcessError: It was killed.
    """
    rank, first = min(failures.items(), key=lambda item: (_order(item[1]), item[1].timestamp))
    code = int(first.exitcode)
    if code < 0:
        raise ProcessError(
            f"process {rank} of {n_processes} was killed ({signals.signal_name(-code)}), and the others were "
            "ended; the kernel's log names the cause if memory was short. Continue from the last checkpoint with "
            "--resume"
        ) from None
    if code != 2 and code not in STOPPED:
        message = " ".join(_message(first).split())[:MESSAGE_LETTERS]
        what = f"process {rank} of {n_processes} ended with exit code {code}{message and ': '}{message}"
        print(f"tigon: {what}; the others were ended", file=sys.stderr, flush=True)
    return code


def _order(failure: ProcessFailure) -> int:
    """The place of a torch `ProcessFailure` among possible causes: the end of one process makes the others fail."""
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # the launcher ends the others by SIGTERM
        return 0
    return 1 if failure.exitcode >= 0 and LOST_ANOTHER not in _message(failure) else 2


def _message(failure: ProcessFailure) -> str:
    """Type and text of the error of a torch `ProcessFailure`; empty if the process wrote none."""
    message = failure.error_file_data.get("message")
    text = message.get("message") if isinstance(message, dict) else None
    return text if isinstance(text, str) else ""


def recorded(action: Callable[P, T]) -> Callable[P, T | None]:
    """`action`, whose error is also written into the file that torchrun names for this process, if there is one."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return action
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(action)


def launch_name() -> str | None:
    """A name of the launch that all its attempts have; None without torchrun.

    Many launches have the same TORCHELASTIC_RUN_ID, so the name contains the launcher's process too.
    """
    if RUN_ID not in os.environ:
        return None
    launcher = os.getppid()
    try:
        started = Path(f"/proc/{launcher}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # not Linux
        started = ""
    return f"{os.environ[RUN_ID]}-{socket.gethostname()}-{launcher}-{started}"


def mark(path: Path) -> None:
    """Write the launch's name into the run folder."""
    if name := launch_name():
        (path / MARK).write_text(name + "\n", encoding="utf-8")


def interrupted(output: OutputConfig) -> Path | None:
    """The run folder of an earlier attempt of this launch that has a checkpoint; None if there is none.

    An earlier attempt without a checkpoint has nothing to continue. The main process removes its folder, unless it
    holds a trained model or the summary of a complete run.

    Raises:
        RunFolderError: In the main process, if it holds one.
        SystemExit: In the other processes then, with code 2.
    """
    path = run_folder.newest(output) if launch_name() is not None else None
    if path is None or not _is_marked(path):
        return None
    if any((path / run_folder.CHECKPOINTS).glob("checkpoint-*")):
        return path
    trained = [f"{name}/" for name in run_folder.trained_folders(path)]
    if (path / run_folder.SUMMARY).exists() or trained:
        if launch.rank() > 0:
            raise SystemExit(2)
        raise RunFolderError(
            f"{path}: an earlier attempt of this launch has written {', '.join(trained) or run_folder.SUMMARY} and has "
            "no checkpoint to continue from; the folder is kept. Stop the launcher; a new run needs another output.name"
        )
    if launch.rank() == 0:
        shutil.rmtree(path)
    return None


def _is_marked(path: Path) -> bool:
    """Whether an attempt of this launch has made the run folder `path`."""
    try:
        return (path / MARK).read_text(encoding="utf-8").strip() == launch_name()
    except OSError:
        return False
