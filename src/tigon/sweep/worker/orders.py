"""How a sweep tells a process which point to run, and how the process answers.

The process's argument is a file descriptor on which it says that it is ready. It then reads one line from standard
input, with its order and its environment, and answers with a file. It ends when the sweep ends or dies, because the
sweep holds the other end of its standard input. Only Python's standard library is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def take_order() -> dict[str, Any]:
    """Say that this process is ready, then wait for the order on standard input and return it."""
    told = int(sys.argv[1])
    os.write(told, b"ready")
    os.close(told)
    message = json.loads(sys.stdin.readline() or sys.exit(1))
    _end_with_the_sweep()
    os.environ.update(message["environment"])
    order: dict[str, Any] = message["order"]
    return order


def _end_with_the_sweep() -> None:
    def wait() -> None:
        os.read(0, 1)  # returns when the sweep closes its end or dies
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write(path: Path, value: object) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the file atomically, and return when it is on the disk. A reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)
