"""What an op may know of activation checkpointing: whether its saved tensors are dropped, or a backward pass follows.

A layer that is recomputed runs twice. What the first run saves is dropped, so an op need not compute it. Small results,
such as the largest magnitude of a tensor, can be kept for the second run, which then does not compute them again.
`techniques/mechanisms/recompute.py` and `layer_graphs.py` enter these contexts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch import Tensor


class Run:
    """One run of a recomputed function, or the code outside of any."""

    __slots__ = ("backward_follows", "drops_saved", "kept", "next")

    def __init__(
        self, kept: list[Tensor] | None = None, *, drops_saved: bool = False, backward_follows: bool = False
    ) -> None:  # fmt: skip
        self.kept, self.next = kept, 0
        self.drops_saved = drops_saved
        """Saved tensors only have to have the shape and the dtype of those of the second run."""
        self.backward_follows = backward_follows
        """The backward pass of the same layer comes next, so what it needs can be computed now and live briefly."""


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
