"""Locks a folder by one of its files, so that two runs do not write into it. The system releases a killed process's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tigon.errors import RunFolderError

LOCK_PATIENCE = 7  # seconds to wait for another process's lock


@contextmanager
def locked(path: Path, file: str, work: str) -> Iterator[None]:
    """Lock a folder for the block. The system releases the lock of a killed process.

    `filelock.FileLock` is not used. It locks a separate file, which would stay in every run folder. It makes that
    file again if another process has removed the folder, and here that removal is an error.

    Args:
        path: The folder.
        file: The file in it that is locked.
        work: The activity of the process that has the lock, for the message.

    Raises:
        RunFolderError: Another process has the lock for `LOCK_PATIENCE` seconds, or has removed the folder.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    with _opened(path / file) as handle:
        for patience in range(LOCK_PATIENCE, -1, -1):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not patience:
                    raise RunFolderError(f"{path}: another process is {work}; wait for its end, or stop it") from None
                time.sleep(1)  # data loader processes notice after 5 s that their run was killed
            except OSError:  # a file system without locks
                break
        if not _is_at(handle, path / file):  # the process with the lock has removed the folder, or made it again
            raise RunFolderError(f"{path}: another process has removed this folder; start the run again")
        yield


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("r+b")
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be opened to lock its folder: {error.strerror}; make it readable and writable"
        ) from None


def _is_at(handle: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_in_use(file: Path) -> bool:
    """Whether a process has locked the folder by this file; False if the system cannot tell."""
    try:
        import fcntl

        with file.open("r+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ModuleNotFoundError, OSError):  # Windows, or a file system without locks
        return False
    return False
