"""Folders for the Arrow files of a run: a cache that later runs with the same data read, or one for this process.

An entry is a folder that is named by a hash of everything its content depends on, so no entry is ever out of date.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tigon.errors import DataError, TigonError

T = TypeVar("T")

MAX_CACHE_BYTES = 20 * 2**30
"""When the cache is larger, the entries that were not used for longest are removed."""
KEPT_S = 24 * 3600
"""For so long after its last use an entry is kept all the same, because a run may read it."""


def default_folder(kind: str = "tokens") -> Path:
    """`$XDG_CACHE_HOME/tigon/<kind>`, else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon" / kind


def key_of(*parts: object) -> str:
    """A hash of the `repr` of each part."""
    digest = hashlib.sha256()
    for part in parts:
        text = repr(part).encode("utf-8", errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()[:32]


def entry(folder: Path | None, key: str | None) -> Path:
    """The folder of an entry, which exists and may be written to.

    Args:
        folder: The cache. If it is None or cannot be written to, the entry is removed when this process ends.
        key: The hash that names the entry. None: it is not kept.
    """
    if folder is not None and key is not None:
        made = folder / key
        try:
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.utime(made)
        except OSError:  # a read-only home, or a file in the way
            pass
        else:
            if os.access(made, os.W_OK):
                return made
    return Path(tempfile.mkdtemp(dir=_scratch()))


@functools.cache
def _scratch() -> Path:
    """A folder in the system's folder for temporary files, removed when this process ends."""
    folder, owner = Path(tempfile.mkdtemp(prefix="tigon-data-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked process ends earlier
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def made(folder: Path | None, key: str | None, make: Callable[[Path], T]) -> tuple[T, bool]:
    """(what `make` makes in the folder of an entry, whether the entry was stored before).

    `make` reads a file that is there already. A file that it cannot read is made again.

    Raises:
        DataError: The disk is full.
    """
    place = entry(folder, key)
    is_cached = any(path.suffix in (".arrow", ".json") for path in place.rglob("*"))
    try:
        result = make(place)
    except TigonError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{place}: the data cannot be stored: {error.strerror}; make room there, or set XDG_CACHE_HOME to "
                "another folder"
            ) from None
        if not is_cached:
            raise
        shutil.rmtree(place)
        place.mkdir()
        is_cached, result = False, make(place)
    if folder is not None and place.parent == folder:
        with contextlib.suppress(OSError):  # another process removes entries too
            _prune(folder)
    return result, is_cached


def _prune(folder: Path) -> None:
    """Remove entries that no run has used for a day until the rest takes at most `MAX_CACHE_BYTES`."""
    used_s = {path: path.stat().st_mtime for path in folder.iterdir()}
    sizes = {path: sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file()) for path in used_s}
    total_bytes = sum(sizes.values())
    for path in sorted(used_s, key=lambda path: used_s[path]):
        if total_bytes <= MAX_CACHE_BYTES or time.time() - used_s[path] < KEPT_S:
            return
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        total_bytes -= sizes[path]
