"""The sources that `data.source` and `data.eval_source` name, and the regular files in them.

A folder is walked in the order of its names, and lazily. Links that lead out of the folder are refused by name.
Following them would read files that the recipe does not name, and skipping them could leave out wanted data.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tigon._files import is_of_kernel, open_regular, refuse_special
from tigon._install import install_command
from tigon.errors import DataError
from tigon.models.loading.config import is_hub_id

BUILT_IN = "python-docs"
TOY_ANSWERS = "toy-answers"
"""Generated rows for post-training; `data.preferences` makes them."""
BUILT_INS = (BUILT_IN, TOY_ANSWERS)
SUFFIXES = (".csv", ".json", ".jsonl", ".md", ".ndjson", ".parquet", ".py", ".rst", ".tsv", ".txt")
"""The suffixes of files that are read, in lower case. `.JSONL` is read as `.jsonl`."""
NOT_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Files that the package `datasets` writes beside the rows of a folder."""
MAX_ENTRIES = 1_000_000
"""Limit on the entries of a folder with its subfolders. `/` of a small server has about as many. A large corpus with
one file per document has fewer. Listing this many takes a few seconds."""

Refuse = Callable[[DataError], None]


@dataclass(frozen=True)
class Source:
    """One source of a recipe, with the keys that hold for it."""

    name: str
    """A file, a folder, the id of a data set on the hub, or a built-in one."""
    weight: float = 1.0
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    streaming: bool = False

    @property
    def is_built_in(self) -> bool:
        return self.name in BUILT_INS

    @property
    def is_hub(self) -> bool:
        """Whether the name has the form `owner/name` and is no local path."""
        return not self.is_built_in and not has_known_suffix(Path(self.name)) and is_hub_id(self.name)

    @classmethod
    def of_entry(cls, entry: str | Mapping[str, Any], defaults: Source, key: str) -> Source:
        """The source of an entry of a recipe.

        Args:
            entry: A name, or a mapping with `source` and further keys.
            defaults: The source of the recipe's keys, which the mapping's keys replace.
            key: The recipe key that holds the entry, for messages.

        Raises:
            DataError: A key or value of the mapping is wrong.
        """
        given: dict[str, Any] = {"source": entry} if isinstance(entry, str) else dict(entry)
        others = {"weight": float, "columns": dict, "streaming": bool}
        kinds = {"source": str} | {f.name: others.get(f.name, str) for f in fields(cls) if f.name != "name"}
        for name, value in given.items():
            if name not in kinds:
                raise DataError(f"{key}: {name} is not a key of a source; its keys are {', '.join(kinds)}")
            kind = int if kinds[name] is float and type(value) is int else kinds[name]
            if not isinstance(value, kind):
                raise DataError(f"{key}: {name} is {value!r}; it must be {_KINDS[kinds[name]]}")
        if "source" not in given:
            raise DataError(f"{key}: an entry lacks the key source; write {{source: data.jsonl, weight: 2}}")
        if not 0 < given.get("weight", 1) <= MAX_WEIGHT:
            raise DataError(f"{key}: weight is {given['weight']}; it must be above 0 and at most {MAX_WEIGHT}")
        return replace(defaults, name=given.pop("source"), **given)


_KINDS = {str: "text", float: "a number", dict: "a mapping such as {prompt: question}", bool: "true or false"}
MAX_WEIGHT = 1000


def check(sources: Sequence[Source], key: str = "data.source") -> None:
    """Raise DataError for a source that is missing or can never be read, before anything is read.

    key: the recipe key that names the sources, for messages.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{key} needs the package datasets, which is not installed: {install_command('train')}")
    for source in sources:
        if not source.is_hub and not source.is_built_in:
            _check(source.name, key)


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
        raise DataError(
            f"{source}: no such file or folder; {key} takes paths, ids of data sets on the hub (owner/name), or "
            f"{BUILT_IN}"
        ) from None
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

    def refused(error: DataError) -> None:
        nonlocal empty
        empty = False
        refuse(error)

    for file in _Walk(path, refused).files():
        empty = False
        yield file
    if empty:
        raise DataError(f"{source}: no {', '.join(SUFFIXES)} file in this folder; put the data there")


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
            elif _is_data(path) and self._is_regular(path):
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
            if has_known_suffix(path) or _is_loop(error):
                self.refuse(DataError(f"{path}: a link to {os.readlink(path)}, which leads nowhere; remove the link"))
            return
        if self.blobs is not None and target.parent == self.blobs:
            if _is_data(path) and self._is_regular(path):
                yield path
            return
        if not target.is_relative_to(self.real_root):
            if target.is_dir() or has_known_suffix(path):
                self.refuse(DataError(f"{path}: a link out of the folder {self.root}, to {target}; {fix}"))
            return
        # the walk reaches folders inside, and files with a known suffix, without the link
        if target.is_dir() or has_known_suffix(target) or not has_known_suffix(path):
            return
        if target not in self.linked and self._is_regular(path):
            self.linked.add(target)
            yield path


def has_known_suffix(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _is_data(path: Path) -> bool:
    return has_known_suffix(path) and path.name not in NOT_DATA


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
