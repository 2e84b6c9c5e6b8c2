"""Tells an op how activation checkpointing runs it: whether its saved tensors are dropped, or a backward pass follows.

A layer that is recomputed runs twice. The tensors that the first run saves are dropped, so an op need not compute them.
Small results, such as the largest magnitude of a tensor, can be kept for the second run, which then does not compute
them again. Attention's results can wait on the host. `techniques/checkpointing/recompute.py` and
`attention_offload.py` enter these contexts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Results = tuple[Any, ...]
Once = Callable[[Callable[[], Results]], Results]
"""`compute` -> its results, computed in the first run of a function and fetched in the second."""


class Run:
    """One run of a recomputed function, or the code outside of any."""

    __slots__ = ("backward_follows", "drops_saved", "kept", "next", "once", "unsaved")

    def __init__(
        self,
        kept: list[Tensor] | None = None,
        *,
        drops_saved: bool = False,
        backward_follows: bool = False,
        once: Once | None = None,
    ) -> None:
        self.kept, self.next = kept, 0
        self.once = once
        """Receives what `compute_once` would compute; None: both runs compute it."""
        self.drops_saved = drops_saved
        """Saved tensors only have to have the shape and the dtype of those of the second run."""
        self.backward_follows = backward_follows
        """The backward pass of the same layer comes next, so what it needs can be computed now and live briefly."""
        self.unsaved: Callable[[], int] | None = None
        """How many tensors a recomputation still has to save. It ends when the last one is saved."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.run = Run()


_current = _Current()


def current() -> Run:
    """The run that this thread is in."""
    return _current.run


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Let the ops inside belong to `run`."""
    before, _current.run = _current.run, run
    try:
        yield
    finally:
        _current.run = before


def first_run(kept: list[Tensor] | None) -> Run:
    """The first run of a recomputed function. kept: receives the small results; None: they are computed twice."""
    return Run(kept, drops_saved=True)


def second_run(kept: list[Tensor] | None) -> Run:
    """The recomputation. kept: that of the first run."""
    return Run(kept, backward_follows=True)


def keep(compute: Callable[[], Tensor]) -> Tensor:
    """`compute()`, a small tensor; in the second run of a function what the first run computed at the same place."""
    run = _current.run
    if run.kept is None:
        return compute()
    if run.drops_saved:
        result = compute()
        run.kept.append(result)
        return result
    run.next += 1
    return run.kept[run.next - 1] if run.next <= len(run.kept) else compute()


def compute_once(compute: Callable[[], Results]) -> Results:
    """`compute()`, large results; the second run of a function may fetch them instead of computing them again."""
    once = _current.run.once
    return compute() if once is None else once(compute)
