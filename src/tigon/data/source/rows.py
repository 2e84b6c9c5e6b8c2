"""Reads rows: files of JSONL, JSON, CSV and parquet, and data sets of the hub. Each row comes with its file and line.

A reader is a row of `READERS`, by the file's suffix. It passes each problem to `refuse`, which raises it or counts it.
`load_dataset` reads the data sets of the hub. It does not read files, because its readers of JSON and CSV name no line,
give up a file at its first malformed row, and fill in the columns that a row lacks.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon._files import open_regular
from tigon.data.source.sources import Refuse, Source, unreadable
from tigon.errors import DataError
from tigon.units import in_bytes

if TYPE_CHECKING:
    import datasets

MAX_ROW_BYTES = 2**28  # a row is one document; a longer line is not JSONL, or is text for a .txt file
MAX_JSON_BYTES = 2**31  # a .json file is read whole, and becomes about four times as large in memory
BYTE_ORDER_MARK = "\ufeff"
PARQUET_ROWS = 1024
"""Rows that are decoded at a time."""

Rows = Iterator[tuple[str, dict[str, Any]]]
"""(file and line, row)"""


def read_rows(path: Path, refuse: Refuse) -> Rows:
    """The rows of the file. A file with another suffix than those of READERS is read as JSONL.

    Args:
        path: The file.
        refuse: Called with an error for each row that cannot be read. If it returns, the row is skipped.

    Raises:
        DataError: The file cannot be read.
    """
    yield from READERS.get(path.suffix.lower(), _jsonl)(path, refuse)


def is_arrow(path: Path) -> bool:
    """Whether the file is a table of Arrow, which fills missing keys of nested objects with null."""
    return READERS.get(path.suffix.lower()) is _parquet


# --- JSON -------------------------------------------------------------------------------------------------------------


def _jsonl(path: Path, refuse: Refuse) -> Rows:
    """One object per line. Blank lines are allowed."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = _parse_row(line, where)
        except DataError as error:
            refuse(error)
        else:
            yield where, row


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of the file up to its size at opening. A file that grows while it is read might never end."""
    try:
        with open_regular(path) as handle:
            left_bytes = os.fstat(handle.fileno()).st_size
            number = 0
            while left_bytes > 0 and (line := handle.readline(min(left_bytes, MAX_ROW_BYTES + 1))):
                number += 1
                if len(line) > MAX_ROW_BYTES:
                    raise DataError(
                        f"{path}:{number}: a row of more than {MAX_ROW_BYTES // 2**20} MiB; a row is one document, so "
                        "split it, or name plain text .txt"
                    )
                left_bytes -= len(line)
                yield line
    except OSError as error:
        raise unreadable(path, error) from None


def _parse_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        # Without its end: an error at the end of a line would be in column 1 of the next one.
        row = json.loads(line.decode("utf-8").removeprefix(BYTE_ORDER_MARK).rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start} of the line); convert the file") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {_json_problem(error)}") from None
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: a row is a JSON object such as {{"text": ...}}, not {type(row).__name__}'
            + ("; name a file with one list of rows .json" if isinstance(row, list) else "")
        )
    return row


def _json_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON at column {error.colno}: {error.msg}; fix or remove it"
    if isinstance(error, RecursionError):
        return "JSON nested too deeply; fix or remove the row"
    return f"not a JSON row: {str(error)[:120]}; fix or remove the row"  # a number with more digits than Python reads


def _json(path: Path, refuse: Refuse) -> Rows:
    """A list of objects, or objects one after another. Rows are parsed one by one, so that each has its line."""
    try:
        text = _whole(path).decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        refuse(DataError(f"{path}: not UTF-8 text (byte {error.start}); convert the file to UTF-8"))
        return
    decoder, blank = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def skip(at: int) -> int:
        return blank.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text too

    at = skip(0)
    is_list = text[at : at + 1] == "["
    at = skip(at + is_list)
    line, counted = 1, 0
    while at < len(text) and not (is_list and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, end = decoder.raw_decode(text, at)
            if not isinstance(row, dict):
                refuse(DataError(f"{path}:{line}: a row is a JSON object, not {type(row).__name__}"))
            at = skip(end)
            if is_list and text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']' after a row", text, at)
            following = skip(at + 1) if is_list and text[at] == "," else at
            if following > at and text[following : following + 1] in ("", "]"):
                raise json.JSONDecodeError("Expecting a row after ','", text, following)
            at = following
        except json.JSONDecodeError as error:  # what follows cannot be told apart into rows
            refuse(DataError(f"{path}:{error.lineno}: {_json_problem(error)}"))
            return
        except (ValueError, RecursionError) as error:
            refuse(DataError(f"{path}:{line}: {_json_problem(error)}"))
            return
        if isinstance(row, dict):
            yield f"{path}:{line}", row
    if is_list and skip(at + 1) < len(text):
        line += text.count("\n", counted, at)
        refuse(DataError(f"{path}:{line}: text after the list's closing bracket; remove it"))


def _whole(path: Path) -> bytes:
    try:
        with open_regular(path) as handle:
            size_bytes = os.fstat(handle.fileno()).st_size
            if size_bytes > MAX_JSON_BYTES:
                raise DataError(
                    f"{path}: {in_bytes(size_bytes)}; a .json file is read whole, and may have "
                    f"{in_bytes(MAX_JSON_BYTES)}; write one object per line to {path.stem}.jsonl"
                )
            return handle.read(size_bytes)
    except OSError as error:
        raise unreadable(path, error) from None


# --- tables -----------------------------------------------------------------------------------------------------------


def _csv(path: Path, refuse: Refuse, delimiter: str = ",") -> Rows:
    """A header with the names of the columns, then a row per line; a field in quotes may have line breaks."""
    csv.field_size_limit(MAX_ROW_BYTES)
    number = 0

    def decoded() -> Iterator[str]:
        nonlocal number
        for line in _lines(path):
            number += 1
            try:
                yield line.decode("utf-8").removeprefix(BYTE_ORDER_MARK if number == 1 else "")
            except UnicodeDecodeError as error:
                refuse(DataError(f"{path}:{number}: not UTF-8 text (byte {error.start} of the line); convert the file"))

    reader = csv.reader(decoded(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        first = number + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            refuse(DataError(f"{path}:{first}: not valid CSV: {error}; fix the quotes, or remove the row"))
            continue
        if not any(value.strip() for value in values):
            continue
        if header is None:
            header = _header(values, path)
        elif len(values) != len(header):
            refuse(
                DataError(
                    f"{path}:{first}: {len(values)} fields, but the header has {len(header)} columns; put quotes "
                    f"around text with {delimiter!r}, or remove the row"
                )
            )
        else:
            yield f"{path}:{first}", dict(zip(header, values, strict=True))


def _header(names: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in names]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path}:1: the header names column {repeated!r} twice; the first line names the columns")
    return names


def _parquet(path: Path, refuse: Refuse) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with open_regular(path) as handle:
            for batch in pq.ParquetFile(handle).iter_batches(PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except OSError as error:
        if isinstance(error, pa.ArrowException) or not error.strerror:
            raise DataError(f"{path}: not a readable parquet file, after row {number}: {_short(error)}") from None
        raise unreadable(path, error) from None
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file, after row {number}: {_short(error)}") from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


READERS: Mapping[str, Callable[[Path, Refuse], Rows]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}


# --- data sets of the hub ---------------------------------------------------------------------------------------------

DEFAULT_SPLIT = "train"


def load(source: Source) -> Any:
    """The data set of the hub that `source` names, with images as the bytes of their files.

    Raises:
        DataError: It cannot be loaded; the message says what to do.
    """
    import datasets

    datasets.logging.set_verbosity_error()
    with _named(source):
        rows = datasets.load_dataset(
            source.name,
            source.subset,
            split=source.split or DEFAULT_SPLIT,
            revision=source.revision,
            streaming=source.streaming,
        )
        return with_stored_images(rows)


def loaded_rows(source: Source, rows: datasets.Dataset | datasets.IterableDataset) -> Rows:
    """(data set, split and number, row) of every row that `load` has loaded."""
    where = f"{source.name}/{source.split or DEFAULT_SPLIT}"
    with _named(source):
        for number, row in enumerate(rows, start=1):
            yield f"{where}:{number}", row


@contextmanager
def _named(source: Source) -> Iterator[None]:
    """Raise the block's errors as DataError with the data set's name."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the package raises a dozen kinds, builtin ones among them
        raise DataError(_message(source, source.split or DEFAULT_SPLIT, error)) from None


def with_stored_images(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows with images as the bytes of their files. Decoded, each would hold all of its pixels in memory."""
    import datasets

    stored = datasets.Image(decode=False)
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, stored)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):  # a list of images
            rows = rows.cast_column(name, type(feature)(stored))
    return rows


def _message(source: Source, split: str, error: Exception) -> str:
    name, reason = source.name, " ".join(str(error).split())[:200]
    if _is_offline(error):
        return (
            f"{name}: neither a local path nor downloaded before, and the hub cannot be reached; check the name, or "
            f"run `hf download --repo-type dataset {name} --local-dir DIR` where there is a network and name its files"
        )
    if type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError", "GatedRepoError"):
        return (
            f"{name}: neither a local path nor a data set of the hub that you may read; check the name, or log in with "
            "`hf auth login`"
        )
    if "Config name is missing" in reason or "BuilderConfig" in reason:
        return f"{name}: set data.subset to one of its subsets: {reason}"
    if "split" in reason.lower():
        return f"{name}: data.split is {split!r}: {reason}"
    return f"{name}: the data set cannot be read: {type(error).__name__}: {reason}"


def _is_offline(error: BaseException | None) -> bool:
    """Whether the network was missing, by the error or one that it came from."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or "Offline" in type(error).__name__:
            return True
        if type(error).__name__ in ("ConnectError", "LocalEntryNotFoundError"):
            return True
        error = error.__cause__ or error.__context__
    return False
