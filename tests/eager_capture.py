"""Layers as CUDA graphs without a GPU: a capture whose replay runs the work again, for tests and `--tiny` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def eager_capture(work: Callable[[Any], Any], prepare: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """As `CudaCapture`. The results of a replay take the place of the first ones, in one list."""
    results = work(prepare())

    def replay() -> None:
        fresh = work(prepare())
        if results is not None:
            results[:] = fresh

    return replay, results
