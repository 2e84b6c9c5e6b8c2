"""The lock file around the operators that DeepSpeed compiles: one that a killed process left is removed.

PyTorch makes a file `lock` in the folder of an operator, removes it when the operator is compiled, and waits for ever
for one that is there (torch.utils.file_baton). A process that is killed while it compiles leaves its file. Here a
process also locks its file for the system (flock), which ends with the process: a file of ours that nobody has locked,
with no compiler left in its folder, is stale. The mode of the file tells ours from another program's, whose owner
cannot be known: that one is waited for, and a message names it.

`filelock` is not used. PyTorch in other processes takes any existing file for a lock, whereas FileLock leaves its file
behind and SoftFileLock decides by the process that made the file; neither looks for compilers that outlived it.
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

OURS = 0o600  # of our files; PyTorch's are executable for their owner, whatever the umask
LOOK_S = 0.1
LOCKED = b"tigon\n"  # what its owner writes into our file, once it has locked it
SAY_AFTER_S = 5  # most operators that another process compiles take longer; one that is compiled already takes none


class ExtensionLock:
    """In the place of PyTorch's FileBaton. `try_acquire` waits until this process has the lock, and is always True.

    FileBaton lets the others load what the first process compiled, and has them fail if it did not get to its end.
    Here each takes its turn: Ninja finds what is compiled already, or compiles it.
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
        """FileBaton's; nobody waits here who has not asked for the lock."""

    def release(self) -> None:
        if self._handle is None:
            return
        # Unlinked before it is unlocked, so that a process that locks it next sees that it is gone. A user may have
        # removed the file meanwhile, and another process made its own: that one stays.
        if _is_at(self._handle, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = None

    def _make(self) -> bool:
        """Whether the file is made and ours."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, OURS)
        except FileExistsError:
            return False
        _lock(handle, wait=True)
        if not _is_at(handle, self.path):  # another took it for stale, before it was locked
            os.close(handle)
            return False
        os.write(handle, LOCKED)
        self._handle = handle
        return True

    def _remove_stale(self) -> bool:
        """Whether the file was stale, and is gone."""
        try:
            handle = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return True
        except OSError:  # another user's
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
        here = _compilers(self.path.parent)
        who = f"process {here[0]} compiles there" if here else "another process compiles there, or was killed before"
        return f"waiting for {self.path}: {who}; if nothing compiles there any more, remove this file"


def install() -> None:
    """Have what PyTorch compiles from here on in this process take turns by `ExtensionLock`."""
    if fcntl is None:
        return
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = ExtensionLock  # type: ignore[attr-defined, assignment]


def _is_ours(handle: int) -> bool:
    return os.fstat(handle).st_mode & 0o100 == 0


def _is_new(handle: int) -> bool:
    """Whether its owner may be about to lock it; that takes microseconds."""
    status = os.fstat(handle)
    return not status.st_size and abs(time.time() - status.st_mtime) < 2


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int, *, wait: bool) -> bool:
    """Whether this process has the system's lock on the file now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process has it, or the file system knows no locks: then no file is ever taken for stale
        return False
    return True


def _compilers(folder: Path) -> list[int]:
    """Processes of this user on this machine that work in the folder: Ninja and compilers outlive a killed parent."""
    processes = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if link.samefile(folder):
                processes.append(int(link.parent.name))
    return [pid for pid in processes if pid != os.getpid()]


def _say(text: str) -> None:
    print(f"tigon: {text}", file=sys.stderr, flush=True)
