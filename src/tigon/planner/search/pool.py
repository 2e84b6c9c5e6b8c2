"""Runs a function in a forked process while this process continues, because a plan takes seconds on one core.

`concurrent.futures.ProcessPoolExecutor` is not used. It starts a thread in this process, and a plan forks a second time
while the first child still runs. A fork of a process with threads can deadlock; Python 3.12 warns of it. The executor
also delays the end of the program until its child is done, even after an error. A pool of spawned processes would
import torch again and trace again what this process has traced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class ForkedCall(Generic[T]):
    """`function(*arguments)` in a child process that starts at once; `result()` waits for it.

    The child inherits the cached traces. If this process cannot fork or the child fails, `result()` calls the function
    in this process, which then raises the function's error.
    """

    def __init__(self, function: Callable[..., T], *arguments: object) -> None:
        self._function, self._arguments = function, arguments
        self._from_child: Connection | None = None
        if not _can_fork():
            return
        context = multiprocessing.get_context("fork")
        self._from_child, to_parent = context.Pipe(duplex=False)
        self._process = context.Process(target=_call_and_send, args=(to_parent, function, arguments), daemon=True)
        self._process.start()
        to_parent.close()

    def result(self) -> T:
        if self._from_child is not None:
            with contextlib.suppress(EOFError):  # the child failed and sent nothing
                value: T = self._from_child.recv()
                self._process.join()
                return value
        return self._function(*self._arguments)


def _can_fork() -> bool:
    """Whether this process can fork: it has no autograd threads, which do not survive a fork, and is not a daemon."""
    is_daemon = multiprocessing.current_process().daemon
    return not is_daemon and "fork" in multiprocessing.get_all_start_methods() and torch.cuda.device_count() == 0


def _call_and_send(to_parent: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # libgomp's pool does not survive a fork either
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback; the parent says what stopped
    with contextlib.suppress(Exception):  # the parent calls the function again and gets the error itself
        to_parent.send(function(*arguments))
