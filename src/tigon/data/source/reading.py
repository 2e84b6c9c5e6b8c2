"""Reads `data.source`: the files, data sets and built-in text that it names, as documents in an Arrow file."""

from __future__ import annotations

import functools
import io
import math
import os
import sys
import sysconfig
import time
import tokenize
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tigon._files import open_regular
from tigon.data import cache
from tigon.data.chat.messages import without_filled_nulls
from tigon.data.document_table import Documents, features, stored, stored_problem, to_text
from tigon.data.documents import TEXT, BadRows, Document, RowReader
from tigon.data.source import rows
from tigon.data.source import sources as named
from tigon.data.source.formats import detect, mapped_row, read_row
from tigon.data.source.sources import BUILT_IN, TOY_ANSWERS, Source, unreadable
from tigon.errors import DataError

if TYPE_CHECKING:
    import datasets

FORMAT = 1  # part of the name in the cache; increase it when other rows or documents are read of the same files
ROWS_WRITTEN = 256
"""Rows in memory before they are written. Each may be a long text."""
FIRST_LOOK_S = 0.6


def read(
    sources: Sequence[str | Source],
    reader: str | RowReader,
    max_text_mib: float | None,
    bad: BadRows | None = None,
    key: str = "data.source",
    cached: Path | None = None,
) -> Documents:
    """Read the documents of `sources` in order, up to `max_text_mib` of text.

    Args:
        sources: Files, folders, ids of data sets on the hub, or `python-docs`, with or without their own keys.
        reader: The format of sources without their own keys, or the reader of rows for post-training.
        max_text_mib: The value of `data.max_text_mib`; None: no limit.
        bad: The policy for unusable rows.
        key: The recipe key that names the sources, for messages.
        cached: The cache. The rows are read from it if nothing of the sources has changed.

    Raises:
        DataError: A file or row cannot be read, the first document is over the limit, or there is no text.
    """
    bad = bad or BadRows()
    own = reader if isinstance(reader, str) else "auto"
    listed = [source if isinstance(source, Source) else Source(source, format=own) for source in sources]
    named.check(listed, key)
    reading = _Reading(listed, key, reader, bad.policy, max_text_mib)
    # With a limit little is read, and the walk through a folder ends early.
    name = None if cached is None or max_text_mib is not None else cache.key_of(*reading.identity())
    stored_rows, _ = cache.made(cached, name, functools.partial(_in_arrow, reading.rows))
    documents = Documents(stored_rows, None if isinstance(reader, str) else reader)
    problems = documents.column("problem")
    if problems.null_count < len(documents):
        bad.problems += [to_text(problem) for problem in problems.drop_null().to_pylist()]
        documents = documents.select(np.flatnonzero(problems.is_null()))
    return documents


def _in_arrow(rows: Callable[[], Iterator[dict[str, Any]]], folder: Path) -> datasets.Dataset:
    """The rows as a data set in a file of `folder`, or the data set that is there already."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_generator(
            rows, features=features(), cache_dir=str(folder), fingerprint="rows", writer_batch_size=ROWS_WRITTEN
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def first_look(sources: Sequence[Source], *, reader: RowReader | None = None, seconds: float = FIRST_LOOK_S) -> None:
    """Read the rows of local files for at most `seconds`, so that a malformed row ends the run before slow imports.

    Args:
        sources: The sources of a recipe whose `data.bad_rows` is error.
        reader: The reader of rows that are not text alone; None: each source has its format.
        seconds: The time after which the check stops; the rows that it has not seen are checked when they are read.

    Raises:
        DataError: A row cannot be used; the message names it.
    """
    end_s = time.perf_counter() + seconds
    bad = BadRows()
    for source in sources:
        if source.is_built_in or source.is_hub:
            continue
        for path in named.files(source.name, bad.take):
            own = reader or source.format
            if not _has_rows(path, own):
                continue
            for _ in _rows_of_file(path, source, own, bad):
                if time.perf_counter() > end_s:
                    return


_Read = tuple[Document, Mapping[str, Any]]
"""A document and the row that it was made of."""


@dataclass(frozen=True)
class _Reading:
    """One pass over the sources. Its fields are the arguments of `read`."""

    sources: Sequence[Source]
    key: str
    reader: str | RowReader
    policy: str
    max_text_mib: float | None
    loaded: dict[int, Any] = field(default_factory=dict)
    """The data sets of the hub, by the number of their source."""

    def identity(self) -> Iterator[Any]:
        """What the rows depend on."""
        yield from (FORMAT, self.policy, self.reader)
        for number, source in enumerate(self.sources):
            yield source
            if source.is_hub:
                files = getattr(self._loaded(number), "cache_files", None)  # a stream has none
                yield files and [(file["filename"], os.stat(file["filename"]).st_mtime_ns) for file in files]
                if not files:
                    yield uuid.uuid4()
            elif source.is_built_in:
                yield sys.version, sysconfig.get_path("stdlib")
            else:
                for path in named.files(source.name, lambda error: None):
                    status = os.stat(path)
                    yield str(path.resolve()), status.st_size, status.st_mtime_ns

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is stored: the documents in order up to the limit, and the problems of rows that are left out."""
        budget_bytes = math.inf if self.max_text_mib is None else self.max_text_mib * 2**20
        bad, n_problems, is_first = BadRows(self.policy), 0, True
        for number, source in enumerate(self.sources):
            for document, row in self._documents(number, source, bad):
                kept = stored(document, row, source.weight)
                size_bytes = document.at_least_bytes or kept["size"]
                budget_bytes -= size_bytes
                if budget_bytes < 0 and is_first:
                    at_least = "at least " if document.at_least_bytes else ""
                    raise DataError(
                        f"{document.origin}: the first document has {at_least}{size_bytes / 2**20:.3g} MiB of text, "
                        f"over data.max_text_mib {self.max_text_mib:g}, and a document is read whole; raise it, or "
                        "split the file"
                    )
                if budget_bytes < 0:
                    break
                is_first = False
                yield kept
            yield from map(stored_problem, bad.problems[n_problems:])
            n_problems = len(bad.problems)
            if budget_bytes < 0:
                return
        if is_first:
            names = ", ".join(source.name for source in self.sources)
            why = f"; {n_problems} rows were left out, the first: {bad.problems[0]}" if bad.problems else ""
            raise DataError(f"{names}: no text in these files; name files that are not empty in {self.key}{why}")

    def _documents(self, number: int, source: Source, bad: BadRows) -> Iterator[_Read]:
        reader = source.format if isinstance(self.reader, str) else self.reader
        if source.name == BUILT_IN:
            if not isinstance(reader, str):
                raise DataError(
                    f"{source.name} is text, and this objective takes rows; name .jsonl files, or {TOY_ANSWERS}"
                )
            yield from _texts(_python_docs())
        elif source.name == TOY_ANSWERS:
            if isinstance(reader, str):
                raise DataError(f"{source.name} is for post-training; set train.objective, for example dpo")
            yield from _of_rows(reader.toy_rows(), source, reader, bad, filled=False)
        elif source.is_hub:
            loaded = rows.loaded_rows(source, self._loaded(number))
            yield from _of_rows(loaded, source, reader, bad, filled=True)
        else:
            for path in named.files(source.name, bad.take):
                if _has_rows(path, reader):
                    yield from _rows_of_file(path, source, reader, bad)
                else:
                    yield from _text_file(path, self.max_text_mib, bad)

    def _loaded(self, number: int) -> Any:
        if number not in self.loaded:
            self.loaded[number] = rows.load(self.sources[number])
        return self.loaded[number]


def _has_rows(path: Path, reader: str | RowReader) -> bool:
    """Whether the file holds rows instead of text.

    Raises:
        DataError: Neither the suffix nor `data.format` says what the file holds.
    """
    suffix = path.suffix.lower()
    if suffix in rows.READERS or reader not in ("auto", TEXT):
        return True
    if reader == "auto" and suffix not in named.SUFFIXES:
        what = f"the suffix {path.suffix}" if suffix else "a name without a suffix"
        raise DataError(
            f"{path}: {what} does not say what the file holds; rename it to one of {', '.join(named.SUFFIXES)}, or "
            "set data.format: text to train on the text of the file"
        )
    return False


def _rows_of_file(path: Path, source: Source, reader: str | RowReader, bad: BadRows) -> Iterator[_Read]:
    return _of_rows(rows.read_rows(path, bad.take), source, reader, bad, filled=rows.is_arrow(path))


def _of_rows(
    found: rows.Rows, source: Source, reader: str | RowReader, bad: BadRows, *, filled: bool
) -> Iterator[_Read]:
    """The documents of rows. If the reader is `auto`, the first row that fits a format decides for all of them.

    filled: whether Arrow filled the rows' missing keys with null.
    """
    for where, row in found:
        try:
            row = mapped_row(row, source.columns, where)
            if filled:
                row = without_filled_nulls(row)
            if reader == "auto":
                reader = detect(row, where, source.columns)
            document = read_row(reader, row, where) if isinstance(reader, str) else reader.read(row, where)
        except DataError as error:
            bad.take(error)
        else:
            yield document, row


def _texts(found: Iterable[tuple[str, str]]) -> Iterator[_Read]:
    """The documents of texts, given as (origin, text)."""
    for origin, text in found:
        yield read_row(TEXT, {TEXT: text}, origin), {TEXT: text}


def _text_file(path: Path, max_text_mib: float | None, bad: BadRows) -> Iterator[_Read]:
    try:
        with open_regular(path) as handle:
            size_bytes = os.fstat(handle.fileno()).st_size
            # Windows newlines do not count as text; at most half of a file can be such newlines
            if max_text_mib is not None and size_bytes // 2 > max_text_mib * 2**20:
                yield Document(str(path), at_least_bytes=size_bytes // 2), {}
                return
            content = handle.read(size_bytes)  # the file may still be growing
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(content.decode("utf-8"), final=True)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        bad.take(DataError(f"{path}:{line}: not UTF-8 text (byte {error.start}); convert the file to UTF-8"))
        return
    if text.strip():
        yield from _texts([(str(path), text)])


def _python_docs() -> Iterator[tuple[str, str]]:
    """The language reference that `help()` prints, then the sources of the standard library, both sorted."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"pydoc_data.topics[{name}]", topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    # tests repeat one another, and the two package folders contain third-party code
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in skipped)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix != ".py" or not path.is_file():
                continue
            try:
                with tokenize.open(path) as handle:  # honours the file's coding line
                    text = handle.read()
            except (SyntaxError, UnicodeDecodeError, OSError):  # a few files are invalid on purpose
                continue
            if text.strip():
                yield path.relative_to(root).as_posix(), text
