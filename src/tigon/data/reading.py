"""Reads `data.source`: the files, data sets and built-in text that it names, as documents."""

from __future__ import annotations

import io
import math
import os
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tigon._files import open_regular
from tigon.data import hub_datasets, row_files
from tigon.data import sources as named
from tigon.data.documents import TEXT, BadRows, Document, RowReader, Segment
from tigon.data.formats import detect, mapped_row, read_row
from tigon.data.messages import without_filled_nulls
from tigon.data.sources import BUILT_IN, TOY_ANSWERS, Source, unreadable
from tigon.errors import DataError

FIRST_LOOK_S = 0.6


def read(
    sources: Sequence[str | Source], reader: str | RowReader, max_text_mib: float | None, bad: BadRows | None = None,
    key: str = "data.source",
) -> list[Document]:  # fmt: skip
    """Read the documents of `sources` in order, up to `max_text_mib` of text.

    Args:
        sources: Files, folders, ids of data sets on the hub, or `python-docs`, with or without their own keys.
        reader: The format of sources without their own keys, or the reader of rows for post-training.
        max_text_mib: The value of `data.max_text_mib`; None: no limit.
        bad: The policy for unusable rows.
        key: The recipe key that names the sources, for messages.

    Raises:
        DataError: A file or row cannot be read, the first document is over the limit, or there is no text.
    """
    budget_bytes = math.inf if max_text_mib is None else max_text_mib * 2**20
    documents: list[Document] = []
    bad = bad or BadRows()
    listed = _listed(sources, reader)
    named.check(listed, key)
    if max_text_mib is None:
        named.check_memory(listed, lambda error: None)
    for document in _all(listed, reader, max_text_mib, bad):
        size_bytes = document.at_least_bytes or len(document.text.encode("utf-8", errors="replace"))
        budget_bytes -= size_bytes
        if budget_bytes < 0 and documents:
            break
        if budget_bytes < 0:
            at_least = "at least " if document.at_least_bytes else ""
            raise DataError(
                f"{document.origin}: the first document has {at_least}{size_bytes / 2**20:.3g} MiB of text, over "
                f"data.max_text_mib {max_text_mib:g}, and a document is read whole; raise it, or split the file"
            )
        documents.append(document)
    if not documents:
        names = ", ".join(source.name for source in listed)
        why = f"; {len(bad.problems)} rows were left out, the first: {bad.problems[0]}" if bad.problems else ""
        raise DataError(f"{names}: no text in these files; name files that are not empty in {key}{why}")
    return documents


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


def used_by_weight(documents: Sequence[Document]) -> list[Document]:
    """The documents of one pass over the data: each as often as its weight says.

    A fractional weight takes evenly spaced documents, so the result is deterministic.
    """
    if all(document.weight == 1 for document in documents):
        return list(documents)
    n_uses: list[int] = []
    n_seen: Counter[float] = Counter()
    for document in documents:
        weight, number = document.weight, n_seen[document.weight]
        n_seen[weight] += 1
        n_uses.append(math.floor((number + 1) * weight + 1e-9) - math.floor(number * weight + 1e-9))
    rounds = range(max(n_uses, default=0))
    return [document for n in rounds for document, uses in zip(documents, n_uses, strict=True) if uses > n]


def _listed(sources: Sequence[str | Source], reader: str | RowReader) -> list[Source]:
    own = reader if isinstance(reader, str) else "auto"
    return [source if isinstance(source, Source) else Source(source, format=own) for source in sources]


def _all(
    sources: Sequence[Source], reader: str | RowReader, max_text_mib: float | None, bad: BadRows
) -> Iterator[Document]:
    for source in sources:
        own = source.format if isinstance(reader, str) else reader
        documents = _documents(source, own, max_text_mib, bad)
        yield from documents if source.weight == 1 else (replace(each, weight=source.weight) for each in documents)


def _documents(source: Source, reader: str | RowReader, max_text_mib: float | None, bad: BadRows) -> Iterator[Document]:
    if source.name == BUILT_IN:
        if not isinstance(reader, str):
            raise DataError(
                f"{source.name} is text, and this objective takes rows; name .jsonl files, or {TOY_ANSWERS}"
            )
        yield from _python_docs()
    elif source.name == TOY_ANSWERS:
        if isinstance(reader, str):
            raise DataError(f"{source.name} is for post-training; set train.objective, for example dpo")
        yield from reader.toy_answers()
    elif source.is_hub:
        yield from _rows(hub_datasets.read_rows(source), source, reader, bad, filled=True)
    else:
        for path in named.files(source.name, bad.take):
            if _has_rows(path, reader):
                yield from _rows_of_file(path, source, reader, bad)
            else:
                yield from _text_file(path, max_text_mib, bad)


def _has_rows(path: Path, reader: str | RowReader) -> bool:
    """Whether the file holds rows instead of text.

    Raises:
        DataError: Neither the suffix nor `data.format` says what the file holds.
    """
    suffix = path.suffix.lower()
    if suffix in row_files.READERS or reader not in ("auto", TEXT):
        return True
    if reader == "auto" and suffix not in named.SUFFIXES:
        what = f"the suffix {path.suffix}" if suffix else "a name without a suffix"
        raise DataError(
            f"{path}: {what} does not say what the file holds; rename it to one of {', '.join(named.SUFFIXES)}, or "
            "set data.format: text to train on the text of the file"
        )
    return False


def _rows_of_file(path: Path, source: Source, reader: str | RowReader, bad: BadRows) -> Iterator[Document]:
    rows = row_files.read_rows(path, bad.take)
    return _rows(rows, source, reader, bad, filled=row_files.is_arrow(path))


def _rows(
    rows: row_files.Rows, source: Source, reader: str | RowReader, bad: BadRows, *, filled: bool
) -> Iterator[Document]:
    """The documents of rows. If the reader is `auto`, the first row that fits a format decides for all of them.

    filled: whether Arrow filled the rows' missing keys with null.
    """
    for where, row in rows:
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
            yield document


def _text_file(path: Path, max_text_mib: float | None, bad: BadRows) -> Iterator[Document]:
    try:
        with open_regular(path) as handle:
            size_bytes = os.fstat(handle.fileno()).st_size
            # Windows newlines do not count as text; at most half of a file can be such newlines
            if max_text_mib is not None and size_bytes // 2 > max_text_mib * 2**20:
                yield Document(str(path), at_least_bytes=size_bytes // 2)
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
        yield Document(str(path), (Segment(text, True),))


def _python_docs() -> Iterator[Document]:
    """The language reference that `help()` prints, then the sources of the standard library, both sorted."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"pydoc_data.topics[{name}]", (Segment(topics[name], True),))
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
                yield Document(path.relative_to(root).as_posix(), (Segment(text, True),))
