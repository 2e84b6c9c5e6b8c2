"""How a sweep tells a process which point to run, and how the process answers: with files.

The process creates the ready file if it was started ahead. It then reads one line from standard input, with the path of
its order and its environment. It ends when the sweep ends or dies, because the sweep holds the other end of its
standard input. Only Python's standard library is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def take_order() -> dict[str, Any]:
    """Create the ready file if the environment names one, then wait for the order on standard input and return it."""
    if ready_file := os.environ.get("TIGON_SWEEP_READY"):
        Path(ready_file).touch()
    message = json.loads(sys.stdin.readline() or sys.exit(1))
    _end_with_the_sweep()
    os.environ.update(message["environment"])
    order: dict[str, Any] = json.loads(Path(message["order"]).read_text(encoding="utf-8"))
    return order


def _end_with_the_sweep() -> None:
    def wait() -> None:
        os.read(0, 1)  # returns when the sweep closes its end or dies
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write(path: Path, value: Any) -> None:
    """Write JSON atomically, and return when it is on the disk."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=1)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)
