"""Failures of processes and nodes: which came first, and the line that the user reads.

When one process ends, the others fail too, because they lose it. So the launchers of all nodes exchange their failures
and name the first cause. A process writes its error into the file that PyTorch's launcher names for it
(TORCHELASTIC_ERROR_FILE).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tigon.errors import ProcessError, TigonError
from tigon.trainer.distributed import signals

NODE = "TIGON_NODE"
"""The environment variable by which `tigon train` tells its processes that it reports their failures."""
LOST_ANOTHER = "has lost another process"
"""Part of the message of a process whose peer has ended."""
STOPPED = tuple(signals.EXIT_OFFSET + number for number in signals.SIGNALS)
"""Exit codes of processes that a signal stopped with a checkpoint."""
TAIL_BYTES = 32 * 2**10  # of a failing process's log, which is sent to node 0
MESSAGE_LETTERS = 300


@dataclass(frozen=True)
class Failure:
    """A process that ended with another exit code than 0."""

    process: int
    node: int
    host: str
    exit_code: int
    """A negative number is a signal that ended the process."""
    message: str = ""
    """Type and text of its error; empty if it wrote none."""
    log: str = ""
    """The file of its stderr on its host."""
    tail: str = ""
    """The end of that file."""

    @property
    def is_stop(self) -> bool:
        """Whether a signal ended it as requested: with a checkpoint, or by the launcher's SIGTERM."""
        return self.exit_code in (*STOPPED, -signal.SIGTERM)

    @property
    def is_refusal(self) -> bool:
        """Whether it printed a line for the user, so that another attempt would end with the same line."""
        return self.exit_code == 2 and not self.lost_peer

    @property
    def lost_peer(self) -> bool:
        return LOST_ANOTHER in self.message

    def _order(self) -> tuple[int, int]:
        killed = self.exit_code < 0 and not self.is_stop
        kinds = (killed, bool(self.message) and not self.lost_peer, not self.is_stop and not self.lost_peer)
        return next((place for place, holds in enumerate(kinds) if holds), len(kinds)), self.process


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that made the others fail: a killed process, else one that wrote an error."""
    return min(failures, key=Failure._order, default=None)


def sentence(failure: Failure, n_nodes: int) -> str:
    """What happened to a process, as the beginning of a message."""
    where = f" on node {failure.node} ({failure.host})" if n_nodes > 1 else ""
    if failure.exit_code < 0:
        what = f"was killed ({signals.signal_name(-failure.exit_code)})"
    else:
        what = f"ended with exit code {failure.exit_code}"
        if failure.message:
            what += f": {' '.join(failure.message.split())[:MESSAGE_LETTERS]}"
    return f"process {failure.process}{where} {what}"


def process_error(failure: Failure, n_nodes: int, way_on: str) -> ProcessError:
    """The error of a run that a process ended. way_on: The sentence that says how to continue.

    The line of a process that refused the run says itself what to do.
    """
    if failure.is_refusal and failure.message:
        return ProcessError(sentence(failure, n_nodes))
    cause = "; the kernel's log names the cause if memory was short" if failure.exit_code == -signal.SIGKILL else ""
    log = f"; its log is {failure.host}:{failure.log}" if failure.log else ""
    return ProcessError(f"{sentence(failure, n_nodes)}, and the others were ended{cause}{log}. {way_on}")


def lost_nodes_error(lost: Sequence[tuple[int, str, range]], n_nodes: int, way_on: str) -> ProcessError:
    """The error of a run that lost nodes. lost: Number, host and processes of each."""
    names = [f"node {node} of {n_nodes} ({host}, {_processes(processes)})" for node, host, processes in lost]
    verb = "was" if len(names) == 1 else "were"
    return ProcessError(f"{' and '.join(names)} {verb} lost, and the others were ended. {way_on}")


def _processes(processes: range) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {processes[0]} to {processes[-1]}"


@contextmanager
def recorded() -> Iterator[None]:
    """Write an error of the block into the file that PyTorch's launcher names for this process.

    Raises:
        SystemExit: Instead of an error about a lost process, which `tigon train` on this node reports.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            _record(error)
        if isinstance(error, TigonError) and LOST_ANOTHER in str(error) and NODE in os.environ:
            raise SystemExit(2) from None
        raise


def _record(error: Exception) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with suppress(OSError):
        get_error_handler().record_exception(error)


def message_of(failure: Any) -> str:
    """Type and text of the error of a torch `ProcessFailure`; empty if the process wrote none."""
    message = failure.error_file_data.get("message")
    text = message.get("message") if isinstance(message, dict) else None
    return text if isinstance(text, str) else ""


def tail_of(path: str) -> str:
    """The last `TAIL_BYTES` of a log; empty if it cannot be read."""
    try:
        with open(path, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - TAIL_BYTES))
            return handle.read().decode(errors="replace")
    except OSError:
        return ""
