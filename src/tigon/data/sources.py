"""Lists the regular files that `data.source` and `data.eval_source` name.

A folder is walked in the order of its names, and lazily. Links that lead out of the folder are refused by name.
Following them would read files that the recipe does not name, and skipping them could leave out wanted data.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tigon._files import is_of_kernel, open_regular, refuse_special
from tigon.errors import DataError
from tigon.units import in_bytes

BUILT_IN = "python-docs"
TOY_ANSWERS = "toy-answers"
"""Generated rows for post-training; `data.preferences` makes them."""
BUILT_INS = (BUILT_IN, TOY_ANSWERS)
SUFFIXES = (".jsonl", ".md", ".py", ".rst", ".txt")
MAX_ENTRIES = 1_000_000
"""Limit on the entries of a folder with its subfolders. `/` of a small server has about as many. A large corpus with
one file per document has fewer. Listing this many takes a few seconds."""

Refuse = Callable[[DataError], None]


def check(sources: Sequence[str], key: str = "data.source") -> None:
    """Raise DataError for a source that is missing or can never be read, before anything is read.

    key: the recipe key that names the sources, for messages.
    """
    for source in sources:
        if source not in BUILT_INS:
            _check(source, key)


def _check(source: str, key: str) -> None:
    if not source.strip():
        raise DataError(
            f"{key}: {source!r} names no file; name files or folders, `.` for the current one, or {BUILT_IN}"
        )
    path = Path(source)
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            _check_folder(path, key)
        else:
            open_regular(path).close()
    except FileNotFoundError:
        raise DataError(f"{source}: no such file or folder; {key} takes paths, or {BUILT_IN}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _check_folder(path: Path, key: str) -> None:
    whole = {Path("/"): "the root of the file system", _home(): "your home folder"}.get(path.resolve())
    if whole is None and is_of_kernel(path):
        whole = "a folder of the kernel"
    if whole:
        raise DataError(
            f"{path}: {key} is {whole}, which has many files that are not training data; name the folders with data"
        )


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:  # a user without one
        return None


def files(source: str, refuse: Refuse) -> Iterator[Path]:
    """The files of `source` to read, in order.

    refuse: called with an error for each entry of a folder that cannot be read. If it returns, the entry is skipped.
    """
    path = Path(source)
    if not path.is_dir():
        yield path
        return
    empty = True
    for file in _Walk(path, refuse).files():
        empty = False
        yield file
    if empty:
        raise DataError(f"{source}: no {', '.join(SUFFIXES)} file in this folder; put the data there")


def check_memory(sources: Sequence[str], refuse: Refuse) -> None:
    """Raise DataError if the files together are larger than the machine's memory, before any file is read.

    All text is held in memory, together with its tokens.
    """
    total_bytes = _memory_bytes()
    size_bytes = 0
    for source in sources:
        if source in BUILT_INS:
            continue
        for file in files(source, refuse):
            try:
                size_bytes += os.stat(file).st_size
            except OSError as error:
                raise unreadable(file, error) from None
            if total_bytes is not None and size_bytes > total_bytes:
                raise DataError(
                    f"{file}: the files up to this one have {in_bytes(size_bytes)}, but this machine has "
                    f"{in_bytes(total_bytes)} of memory; set data.max_text_mib, or name fewer files"
                )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on this system
        return None


def unreadable(path: Path, error: OSError) -> DataError:
    """Turn an OSError into a DataError."""
    fix = "" if ";" in (error.strerror or "") else "; fix that, or name another file"
    return DataError(f"{path}: cannot be read: {error.strerror}{fix}")


class _Walk:
    """The files of one folder."""

    def __init__(self, root: Path, refuse: Refuse) -> None:
        self.root, self.real_root = root, root.resolve()
        self.blobs = _hub_blobs(self.real_root)
        self.refuse = refuse
        self.n_entries = 0
        self.linked: set[Path] = set()
        """Targets of links that were already read under the link's name."""

    def files(self) -> Iterator[Path]:
        """Walk depth first with a stack, because folders may be nested deeper than Python's recursion limit."""
        stack = [iter(self._sorted(self.root))]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
                continue
            path = Path(entry.path)
            if entry.is_symlink():
                yield from self._of_link(path)
            elif entry.is_dir(follow_symlinks=False):
                stack.append(iter(self._sorted(path)))
            elif path.suffix in SUFFIXES and self._is_regular(path):
                yield path

    def _sorted(self, folder: Path) -> list[os.DirEntry[str]]:
        """The entries of `folder` by name. A folder that cannot be read is refused and gives an empty list."""
        entries = []
        try:
            with os.scandir(folder) as scanned:
                for entry in scanned:
                    self.n_entries += 1
                    if self.n_entries > MAX_ENTRIES:
                        raise DataError(
                            f"{self.root}: more than {MAX_ENTRIES:,} files and folders, at {folder}; name the folders "
                            "that hold the data, or put the text into fewer files (.jsonl)"
                        )
                    entries.append(entry)
        except OSError as error:
            self.refuse(unreadable(folder, error))
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def _is_regular(self, path: Path) -> bool:
        try:
            refuse_special(path)
        except OSError as error:
            self.refuse(unreadable(path, error))
            return False
        return True

    def _of_link(self, path: Path) -> Iterator[Path]:
        """The target of a link to a file in this folder, unless the walk reaches that file directly."""
        fix = "name its target in the recipe, or remove the link"
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop, before Python 3.13
            if path.suffix in SUFFIXES or _is_loop(error):
                self.refuse(DataError(f"{path}: a link to {os.readlink(path)}, which leads nowhere; remove the link"))
            return
        if self.blobs is not None and target.parent == self.blobs:
            if path.suffix in SUFFIXES and self._is_regular(path):
                yield path
            return
        if not target.is_relative_to(self.real_root):
            if target.is_dir() or path.suffix in SUFFIXES:
                self.refuse(DataError(f"{path}: a link out of the folder {self.root}, to {target}; {fix}"))
            return
        # the walk reaches folders inside, and files with a known suffix, without the link
        if target.is_dir() or target.suffix in SUFFIXES or path.suffix not in SUFFIXES:
            return
        if target not in self.linked and self._is_regular(path):
            self.linked.add(target)
            yield path


def _hub_blobs(folder: Path) -> Path | None:
    """The `blobs` folder, if `folder` is a snapshot in the Hugging Face hub's cache.

    The files of a snapshot are links to `blobs`, which is next to `snapshots`.
    """
    for snapshot in (folder, *folder.parents):
        if snapshot.parent.name == "snapshots":
            return snapshot.parent.parent / "blobs"
    return None


def _is_loop(error: Exception) -> bool:
    return isinstance(error, RuntimeError) or getattr(error, "errno", None) == errno.ELOOP
