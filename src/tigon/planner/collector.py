"""Switches Python's garbage collector off while a plan is made.

PyTorch's and transformers' modules are a million objects, which live as long as the process. Each full collection looks
at all of them. Without collections a first plan takes 9 % less CPU time, and 25 to 80 MiB more memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Context without garbage collections; restores the collector's state."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
