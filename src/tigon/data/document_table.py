"""Documents in an Arrow file that is mapped into memory, so that a data set may be larger than the memory.

The file holds rows, and a document is made of its row each time it is read. A row that cannot be used has a problem in
place of its content.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from tigon.data.documents import TEXT, Document, RowReader
from tigon.data.source.formats import read_row
from tigon.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow

BATCH = 64
"""Rows that are decoded at a time. Each may be a long text."""


def features() -> datasets.Features:
    """The columns. Names of files need not be UTF-8, so texts that may hold one are bytes."""
    import datasets

    return datasets.Features(
        {
            "row": datasets.Value("large_binary"),  # JSON: [file and line, format, row, columns that nothing reads]
            "shape": datasets.Value("string"),
            "weight": datasets.Value("float64"),
            "size": datasets.Value("int64"),  # bytes of text
            "problem": datasets.Value("binary"),
        }
    )


def stored(document: Document, row: Mapping[str, Any], weight: float = 1.0) -> dict[str, Any]:
    """What is stored of a document: its row, without the columns that nothing reads."""
    read = {name: value for name, value in row.items() if name not in document.unread}
    values = [document.origin, document.format, read, document.unread]
    content = json.dumps(values, ensure_ascii=False, default=_as_json)
    shape = [document.format, bool(document.messages), bool(document.segments), document.as_chat, document.unread]
    return {
        "row": to_bytes(content),
        "shape": json.dumps(shape),
        "weight": weight,
        "problem": None,
        "size": len(document.text.encode("utf-8", errors="replace")),
    }


def stored_problem(problem: str) -> dict[str, Any]:
    """What is stored of a row that cannot be used."""
    return {"row": b"", "shape": "", "weight": 0.0, "problem": to_bytes(problem), "size": 0}


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def to_text(content: bytes) -> str:
    return content.decode("utf-8", errors="surrogatepass")


def _as_json(value: object) -> str:
    """A value of a table that JSON does not have. Images become `data:` URLs, which rows of JSON may have too."""
    if callable(save := getattr(value, "save", None)):  # an image of Pillow, as the package datasets decodes them
        content = io.BytesIO()
        save(content, format="PNG")
        value = content.getvalue()
    return "data:;base64," + base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Documents(Sequence[Document]):
    """Documents, read from their rows.

    rows: a data set with the columns of `features`. reader: what has read the rows; None: their formats.
    """

    rows: datasets.Dataset
    reader: RowReader | None = None

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Documents:
        """Documents of rows in memory, as `stored` returns them."""
        import datasets

        return cls(datasets.Dataset.from_list(list(rows), features=features()))

    @classmethod
    def of_texts(cls, texts: Iterable[tuple[str, str]], weight: float = 1.0) -> Documents:
        """Plain texts, given as (origin, text)."""
        rows = ((read_row(TEXT, {TEXT: text}, origin), {TEXT: text}) for origin, text in texts)
        return cls.of_rows(stored(document, row, weight) for document, row in rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Documents: ...
    def __getitem__(self, index: int | slice) -> Document | Documents:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return read_stored(self.rows[index]["row"], self.reader)

    def __iter__(self) -> Iterator[Document]:
        for batch in self.rows.select_columns("row").iter(BATCH):
            for row in batch["row"]:
                yield read_stored(row, self.reader)

    def select(self, indices: npt.NDArray[np.int64]) -> Documents:
        """The documents at `indices`, in that order."""
        # Without a name, `datasets` would hash all indices.
        return replace(self, rows=self.rows.select(indices, new_fingerprint=uuid.uuid4().hex))

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """A column."""
        return self.rows.select_columns(name).with_format("arrow")[:][name]

    @property
    def n_bytes(self) -> int:
        """The bytes of text."""
        return int(np.sum(self.column("size").to_numpy()))

    def shapes(self) -> list[tuple[Document, int]]:
        """(an example, the number) of documents that agree in format, form and columns that nothing reads."""
        from pyarrow import compute

        column = self.column("shape")
        made = []
        for value in column.unique().to_pylist():
            number = compute.sum(compute.equal(column, value)).as_py()
            made.append((self[compute.index(column, value).as_py()], number))
        return made

    def digest(self) -> str:
        """A hash of the rows in their order."""
        digest = hashlib.sha256(repr(self.reader).encode())
        for batch in self.rows.select_columns("row").iter(BATCH):
            for row in batch["row"]:
                digest.update(hashlib.sha256(row).digest())
        return digest.hexdigest()


def read_stored(content: bytes, reader: RowReader | None) -> Document:
    """The document of the column `row`."""
    where, row_format, row, unread = json.loads(to_text(content))
    document = read_row(row_format, row, where) if reader is None else reader.read(row, where)
    return replace(document, unread=tuple(unread)) if unread else document


@dataclass(frozen=True)
class Texts(Iterable[str]):
    """All text of documents. It may be iterated over several times."""

    documents: Documents

    def __iter__(self) -> Iterator[str]:
        return (text.text for document in self.documents for text in texts_of(document))


def texts_of(document: Document) -> tuple[Document, ...]:
    """The texts of a row for post-training, or the document itself."""
    return (document,) if document.row is None else document.texts


def split_eval(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """(training, eval) documents. The eval split takes documents at even spacing, so that both parts have every kind.

    If there is only one text document, its last lines are the eval split.

    Raises:
        DataError: There is only one document, and it is not plain text or too short to split.
    """
    number = len(documents)
    if fraction == 0:
        return documents, documents[:0]
    if number == 1:
        only = documents[0]
        cut = only.text.rfind("\n", 0, int(len(only.text) * (1 - fraction))) + 1
        if not only.is_text or not 0 < cut < len(only.text):
            raise DataError(
                f"{only.origin}: one document cannot be split; set data.eval_source, or data.eval_fraction: 0"
            )
        weight = documents.rows[0]["weight"]
        kept, held = (Documents.of_texts([(only.origin, part)], weight) for part in (only.text[:cut], only.text[cut:]))
        return kept, held
    count = max(1, round(number * fraction))
    is_held = np.zeros(number, dtype=bool)
    is_held[(2 * np.arange(count) + 1) * number // (2 * count)] = True
    return documents.select(np.flatnonzero(~is_held)), documents.select(np.flatnonzero(is_held))


def used_by_weight(documents: Documents) -> Documents:
    """The documents of one pass over the data: each as often as its weight says.

    A fractional weight takes evenly spaced documents, so the result is deterministic.
    """
    weights = documents.column("weight").to_numpy()
    if (weights == 1).all():
        return documents
    n_uses = np.zeros(len(documents), dtype=int)
    for weight in np.unique(weights):
        (places,) = np.nonzero(weights == weight)
        ends = [math.floor(number * weight + 1e-9) for number in range(len(places) + 1)]
        n_uses[places] = np.diff(ends)
    rounds = [np.flatnonzero(n_uses > n) for n in range(n_uses.max(initial=0))]
    return documents.select(np.concatenate([np.zeros(0, dtype=int), *rounds]))
