"""A temporary folder beside its result, which the next command removes if a signal has left it.

`tempfile.TemporaryDirectory` removes its folder at the end of the block. SIGKILL ends a process before that, and so
does SIGTERM in Python. A lock says whether the process that made a folder still works on it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

SIGNAL_EXIT = 128  # shells add the number of the signal that ended a process
_SIGNALS = ("SIGTERM", "SIGHUP")


@contextlib.contextmanager
def part_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in `parent` for a part of the result `name`, which is removed at the end of the block.

    Folders that earlier calls with these arguments have left are removed first, and named on stderr.

    Raises:
        OSError: The folder cannot be made.
        SystemExit: SIGTERM or SIGHUP came in the block.
    """
    prefix = f".{name}.part-"
    _remove_left(parent, prefix)
    with _ended_by_signals():
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with _locked(folder):
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _remove_left(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        if left.is_symlink() or not left.is_dir():
            continue
        with _locked(left) as is_ours:
            if is_ours and left.exists():
                shutil.rmtree(left, ignore_errors=True)
                print(f"removed  {left}, which a command that was killed has left", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block. The system releases the lock of a killed process.

    Yields:
        Whether the lock is this process's; False if another process has it, or the system has no locks.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):  # Windows; or somebody else's folder
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except OSError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(handle)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside the block, a signal that would end the process at once raises SystemExit with the shell's code for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(SIGNAL_EXIT + number)

    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    before = {number: signal.signal(number, end) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
