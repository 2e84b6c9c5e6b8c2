"""Removes the lock file of an operator of DeepSpeed if the process that compiled it was killed.

PyTorch creates a file `lock` in an operator's folder, keeps it open while it compiles, and removes it afterwards. If
the file is already there, it waits until the file is gone (torch.utils.file_baton), which is forever if the compiling
process was killed.

A file is stale if no process has it open, no compiler works in its folder, and nothing in the folder has changed for
`IDLE_S`. The last condition is for processes that this system cannot see, on another machine or in a container.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

IDLE_S = 60
LOOK_S = 0.1
SAY_AFTER_S = 5  # compiling most operators takes longer
PROCESSES = Path("/proc")


def wait_for_compilers() -> None:
    """Wait until no lock file blocks PyTorch, and remove stale ones. Call it in one process per machine."""
    for path in _locks():
        began_s, has_said = time.monotonic(), False
        while path.exists():
            if _is_stale(path):
                path.unlink(missing_ok=True)
                _say(f"{path}: left by a process that was killed while it compiled; removed")
            elif not has_said and time.monotonic() - began_s > SAY_AFTER_S:
                _say(f"waiting for {path}: {_who(path)}; if no process compiles there, remove this file")
                has_said = True
            time.sleep(LOOK_S)


def _locks() -> list[Path]:
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted((*root.glob("*/lock"), *root.glob("*/*/lock")))  # the default has a folder per Python and CUDA


def _is_stale(path: Path) -> bool:
    if not PROCESSES.is_dir() or any(_users(path)):
        return False
    with suppress(OSError):  # a file was removed meanwhile
        changed_s = max(each.stat().st_mtime for each in (path.parent, *path.parent.iterdir()))
        return time.time() - changed_s > IDLE_S
    return False


def _who(path: Path) -> str:
    pid = next(_users(path), None)
    return f"process {pid} compiles there" if pid else "another process compiles there or was killed"


def _users(path: Path) -> Iterator[int]:
    """The processes of this user that have the file open, or whose working directory is its folder.

    Ninja outlives a killed parent.
    """
    for process in PROCESSES.glob("[0-9]*"):
        for link, target in ((process / "cwd", path.parent), *((fd, path) for fd in _opened(process))):
            with suppress(OSError):  # the process has ended, or is another user's
                if link.samefile(target):
                    yield int(process.name)


def _opened(process: Path) -> list[Path]:
    with suppress(OSError):
        return list((process / "fd").iterdir())
    return []


def _say(text: str) -> None:
    print(f"tigon: {text}", file=sys.stderr, flush=True)
