"""Drops the log lines that PyTorch's C++ code writes to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def library_log_lines_dropped() -> Iterator[None]:
    """Drop C++ log lines that the profiler and the CPU allocator write to file descriptor 2.

    They log when profiling starts and ends, and for memory older than the profiling. Their log levels cannot be changed
    here, because they are read when torch is imported. Python's own output to stderr still arrives.
    """
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
    except (OSError, ValueError):  # a stream that a test or a notebook has put in its place
        return False
