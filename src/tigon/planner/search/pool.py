"""A computation in a forked process, while this one goes on: a plan takes seconds, and a machine has two cores."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


class Beside:
    """`function(*arguments)`, started at once; `result()` waits for it.

    The child inherits the traces made so far. Where this process cannot be forked, or the child fails, the computation
    is made in `result()`, and raises there what it raises.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._work = function, arguments
        self._from_child: Connection | None = None
        if not _can_fork():
            return
        context = multiprocessing.get_context("fork")
        self._from_child, to_parent = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(to_parent, function, arguments), daemon=True)
        self._process.start()
        to_parent.close()

    def result(self) -> Any:
        function, arguments = self._work
        if self._from_child is not None:
            with contextlib.suppress(EOFError):  # the child ended without a word
                found: Any = self._from_child.recv()
                self._process.join()
                return found
        return function(*arguments)


def _can_fork() -> bool:
    """autograd starts threads for each GPU, which a fork does not survive; children have none of their own."""
    unforked = not multiprocessing.current_process().daemon
    return unforked and "fork" in multiprocessing.get_all_start_methods() and torch.cuda.device_count() == 0


def _work(to_parent: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # libgomp's pool does not survive a fork either
    with contextlib.suppress(Exception):  # the parent finds out for itself
        to_parent.send(function(*arguments))
