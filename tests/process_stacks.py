"""Ends a process that waits too long, with its children, after each has printed the stacks of its threads.

The process has to be started with PYTHONFAULTHANDLER=1: Python then prints the stacks at SIGABRT. torchrun and tigon
start their processes in sessions of their own, so they are found by their parents.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

PRINTING_S = 3.0
"""Seconds that processes get to print, and a launcher to pass on what they print."""


def descendants(pid: int) -> list[int]:
    """The children of a process and their children, on Linux."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = list[int](), [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def end_with_stacks(process: subprocess.Popen[str]) -> str:
    """End a process and its descendants. Returns what they wrote to its pipes, with the stacks of their threads."""
    children = descendants(process.pid)
    for pid in reversed(children):
        _send(pid, signal.SIGABRT)
    if children:
        time.sleep(PRINTING_S)
    _send(process.pid, signal.SIGABRT)
    try:
        printed, error = process.communicate(timeout=PRINTING_S)
    except subprocess.TimeoutExpired:
        for pid in (*descendants(process.pid), *children, process.pid):
            _send(pid, signal.SIGKILL)
        printed, error = process.communicate()
    return (printed or "") + (error or "")


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
