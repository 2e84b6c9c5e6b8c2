"""Standard error without what PyTorch's C++ writes to it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def library_log_lines_dropped() -> Iterator[None]:
    """The profiler and the CPU allocator write C++ log lines to file descriptor 2: when profiling starts and ends, and
    for memory older than that. Their log levels are read when torch is imported, long before this. What Python itself
    writes to stderr still arrives."""
    python = sys.stderr
    python.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    ours = os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        if getattr(python, "fileno", None) is not None and _is_descriptor_2(python):
            sys.stderr = ours
        yield
    finally:
        sys.stderr = python
        ours.close()
        os.dup2(kept, 2)
        os.close(kept)


def _is_descriptor_2(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 2)
    except (OSError, ValueError):  # a test's or a notebook's own stream
        return False
