"""A row's turn on the GPU, where several rows prepare beside each other.

A row takes most of its time to import, load and compile. The driver starts several rows, and lets one after the other
take its last warm-up step and its timed steps. It stops the processes of all other rows (SIGSTOP) for that time, so
that no other row works on the GPU or the CPU. Peaks are those of the process's own allocator.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "DUEL_TURN"
"""The folder of a row's two files; without the variable a row waits for nobody."""
READY, GO, DONE = "ready", "go", "done"
_POLL_S = 0.005


def wait() -> None:
    """Say that the warm-up is over, and wait until the driver has stopped the other rows."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    driver = os.getppid()
    (Path(folder) / READY).touch()
    while not (Path(folder) / GO).exists():
        if os.getppid() != driver:
            raise SystemExit("the driver has ended")
        time.sleep(_POLL_S)


def end() -> None:
    """Say that the timed steps are over."""
    folder = os.environ.get(VARIABLE)
    if folder is not None:
        (Path(folder) / DONE).touch()
