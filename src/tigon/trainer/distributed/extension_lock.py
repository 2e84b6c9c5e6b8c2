"""The lock file around the operators that DeepSpeed compiles. A lock file of a killed process is removed.

PyTorch creates a file `lock` in an operator's folder and removes it after compiling. If the file is already there, it
waits until the file is gone (torch.utils.file_baton), which is forever if the compiling process was killed.

tigon also locks its file with flock, which the system releases when the process ends. So a file of tigon's is stale if
no process has it locked and no compiler works in its folder. The file's mode distinguishes it from another program's.
For a file of another program, whose owner is unknown, tigon waits and prints a message with its path.

`filelock` is not used. PyTorch in other processes waits for any existing file, but `FileLock` leaves its file behind.
`SoftFileLock` removes it if the process that made it is gone, and does not look for compilers that outlived it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

from tigon.trainer.distributed import launch

OURS = 0o600  # the mode of tigon's lock files; PyTorch's are executable by their owner under any umask
LOOK_S = 0.1
LOCKED = b"tigon\n"  # the content of tigon's lock files, written after the file is locked
SAY_AFTER_S = 5  # compiling most operators takes longer; loading a compiled operator takes no time


class ExtensionLock:
    """A replacement of PyTorch's FileBaton. `try_acquire` waits until this process has the lock, and returns True.

    With FileBaton the first process compiles and the others load the result, so they fail if the first was killed. Here
    every process takes the lock in turn and runs Ninja, which compiles only if no earlier process has.
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = LOOK_S, warn_after_seconds: float | None = None):
        self.path = Path(lock_file_path)
        self._wait_s = wait_seconds
        self._handle: int | None = None

    def try_acquire(self) -> bool:
        began_s, has_said = time.monotonic(), False
        while not self._make():
            if self._remove_stale():
                continue
            if not has_said and launch.rank() == 0 and time.monotonic() - began_s > SAY_AFTER_S:
                _say(self._waiting())
                has_said = True
            time.sleep(self._wait_s)
        return True

    def wait(self) -> None:
        """Do nothing. FileBaton has this method, but every process here waits in `try_acquire`."""

    def release(self) -> None:
        if self._handle is None:
            return
        # Unlink before unlocking, so that the next process that locks the file notices that it is gone. If a user has
        # removed the file and another process has created its own, that one stays.
        if _is_at(self._handle, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = None

    def _make(self) -> bool:
        """Create and lock the file. Returns whether this process now has the lock."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, OURS)
        except FileExistsError:
            return False
        _lock(handle, wait=True)
        if not _is_at(handle, self.path):  # another process removed it as stale before it was locked
            os.close(handle)
            return False
        os.write(handle, LOCKED)
        self._handle = handle
        return True

    def _remove_stale(self) -> bool:
        """Remove the file if it is stale. Returns whether it is gone."""
        try:
            handle = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return True
        except OSError:  # a file of another user
            return False
        try:
            if not _is_ours(handle) or not _lock(handle, wait=False) or not _is_at(handle, self.path):
                return False
            if _is_new(handle) or _compilers(self.path.parent):
                return False
            self.path.unlink()
        finally:
            os.close(handle)
        _say(f"{self.path}: left by a process that was killed while it compiled; removed")
        return True

    def _waiting(self) -> str:
        pids = _compilers(self.path.parent)
        who = f"process {pids[0]} compiles there" if pids else "another process compiles there or was killed"
        return f"waiting for {self.path}: {who}; if no process compiles there, remove this file"


def install() -> None:
    """Make PyTorch use `ExtensionLock` for the operators that this process compiles."""
    if fcntl is None:
        return
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = ExtensionLock  # type: ignore[attr-defined, assignment]


def _is_ours(handle: int) -> bool:
    return os.fstat(handle).st_mode & 0o100 == 0


def _is_new(handle: int) -> bool:
    """Whether the process that created the file may not have locked it yet, which takes microseconds."""
    status = os.fstat(handle)
    return not status.st_size and abs(time.time() - status.st_mtime) < 2


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock the file with flock. Returns whether this process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process has the lock; or the file system lacks locks, and then no file counts as stale
        return False
    return True


def _compilers(folder: Path) -> list[int]:
    """The pids of this user's other processes whose working directory is `folder`. Ninja outlives a killed parent."""
    pids = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # the process has ended, or is another user's
            if link.samefile(folder):
                pids.append(int(link.parent.name))
    return [pid for pid in pids if pid != os.getpid()]


def _say(text: str) -> None:
    print(f"tigon: {text}", file=sys.stderr, flush=True)
