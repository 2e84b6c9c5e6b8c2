"""Tokenises documents into an Arrow file that is mapped into memory, in several processes if there is much text.

The file is kept in a cache, so that the next start with the same data does not tokenise it again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from tigon.data import cache
from tigon.data.chat.chat_template import Rendering
from tigon.data.document_table import BATCH, Documents, read_stored, texts_of, to_bytes, to_text
from tigon.data.documents import BadRows, RowReader
from tigon.data.tokenizer import IGNORE_INDEX, Encoded, encode
from tigon.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

FORMAT = 3  # part of the key; increase it when `tokenizer.encode` or `chat_template` gives other tokens
BYTES_PER_PROCESS = 2**24
"""Least text for one more process. A process takes about a second to start."""


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Afterwards `os.environ` is the object that it was, with the variables that the block left.

    With several processes, `Dataset.map` puts a copy in its place (datasets 5.2). rich and others hold the first object
    and would not see any later change.
    """
    environ = os.environ
    try:
        yield
    finally:
        left, os.environ = os.environ, environ
        if left is not environ:
            for name in environ.keys() - left.keys():
                del environ[name]
            environ.update(left)


def features() -> datasets.Features:
    import datasets

    return datasets.Features(
        {
            "tokens": datasets.LargeList(datasets.Value("int32")),
            "learned": datasets.LargeList(datasets.Value("int8")),  # whether each token is
            "is_text": datasets.Value("bool"),
            "origin": datasets.Value("binary"),
            "notes": datasets.List(datasets.List(datasets.Value("string"))),
            "problem": datasets.Value("binary"),
        }
    )


def _stored(encoded: Sequence[Encoded], problems: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of texts, and after them those of texts that cannot be used."""
    none: list[Any] = [[] for _ in problems]
    return {
        "tokens": [np.asarray(each.tokens, dtype=np.int32) for each in encoded] + none,
        "learned": [(np.asarray(each.labels) != IGNORE_INDEX).astype(np.int8) for each in encoded] + none,
        "is_text": [each.is_text for each in encoded] + [False for _ in problems],
        "origin": [to_bytes(each.origin) for each in encoded] + [b"" for _ in problems],
        "notes": [[list(note) for note in each.notes] for each in encoded] + none,
        "problem": [None for _ in encoded] + [to_bytes(problem) for problem in problems],
    }


class Tokens(Sequence[Encoded]):
    """Texts as tokens. rows: a data set with the columns of `features`.

    One after another, the tokens of all texts are one sequence. Text `i` begins at `begins[i]` and has `sizes[i]`
    tokens.
    """

    def __init__(self, rows: datasets.Dataset, kept: npt.NDArray[np.int64] | None = None) -> None:
        """kept: the places of the texts in `rows`, in order; None: all that have no problem."""
        self.rows = rows
        table = rows.data  # the columns as they are in the file
        chunks = [table.column(name).chunks for name in ("tokens", "learned")]
        self._tokens, self._learned = ([chunk.flatten().to_numpy() for chunk in column] for column in chunks)
        self._starts = [0, *itertools.accumulate(map(len, self._tokens))]
        sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(chunk.offsets.to_numpy()) for chunk in chunks[0])])
        problems = table.column("problem")
        self.problems = [to_text(problem) for problem in problems.drop_null().to_pylist()]
        self._kept = np.flatnonzero(problems.is_null()) if kept is None else kept
        self.begins = (np.cumsum(sizes) - sizes)[self._kept]
        self.sizes = sizes[self._kept]
        self.are_text = np.asarray(table.column("is_text"))[self._kept]

    @classmethod
    def of(cls, encoded: Sequence[Encoded]) -> Tokens:
        """The same texts, as they are or in memory."""
        import datasets

        if isinstance(encoded, Tokens):
            return encoded
        return cls(datasets.Dataset.from_dict(_stored(encoded, ()), features=features()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self.rows, self._kept)  # another process maps the file too

    def select(self, which: npt.NDArray[np.bool_]) -> Tokens:
        """The texts for which `which` is true."""
        return Tokens(self.rows, self._kept[which])

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> list[Encoded]: ...
    def __getitem__(self, index: int | slice) -> Encoded | list[Encoded]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.rows.select_columns(["is_text", "origin", "notes"])[int(self._kept[index])]
        tokens, learned = self.span(int(self.begins[index]), int(self.sizes[index]))
        labels = np.where(learned, tokens, IGNORE_INDEX)
        notes = tuple((kind, what) for kind, what in row["notes"])
        return Encoded(tokens.tolist(), labels.tolist(), to_text(row["origin"]), row["is_text"], notes)

    def span(self, begin: int, size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """(tokens, whether each is learned) of a part of one text, which begins at `begin` in the sequence."""
        chunk = bisect_right(self._starts, begin, hi=len(self._tokens)) - 1
        at = begin - self._starts[chunk]
        return self._tokens[chunk][at : at + size], self._learned[chunk][at : at + size].view(bool)

    def origins(self) -> list[str]:
        """The file and line of each text."""
        return [to_text(origin) for origin in self.rows.data.column("origin").take(self._kept).to_pylist()]

    def noted(self) -> list[Encoded]:
        """The texts with notes."""
        from pyarrow import compute

        n_notes = compute.list_value_length(self.rows.data.column("notes"))
        return [self[int(i)] for i in np.flatnonzero(n_notes.to_numpy()[self._kept])]

    def learns_any_of(self, ids: Iterable[int]) -> bool:
        """Whether a token of `ids` is learned anywhere in the file."""
        wanted = list(ids)
        chunks = zip(self._tokens, self._learned, strict=True)
        return any(bool((np.isin(tokens, wanted) & learned.view(bool)).any()) for tokens, learned in chunks)


def learns_an_end(encoded: Sequence[Encoded], tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> bool:
    """Whether a token that ends an answer is learned anywhere in the data set."""
    return Tokens.of(encoded).learns_any_of(
        token for token in (tokenizer.eos_token_id, *rendering.ends) if token is not None
    )


@dataclass(frozen=True)
class _Batch:
    """Tokenises a batch of rows, in a process of `datasets`."""

    reader: RowReader | None
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    rendering: Rendering
    policy: str
    run: int
    """The process that takes the tokens."""

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        try:
            os.kill(self.run, 0)
        except ProcessLookupError:  # killed, so nobody ends this process
            os._exit(1)
        texts = [text for row in batch["row"] for text in texts_of(read_stored(row, self.reader))]
        bad = BadRows(self.policy)
        encoded = encode(texts, self.tokenizer, vocab_size=self.vocab_size, bad=bad, rendering=self.rendering)
        return _stored(encoded, bad.problems)


@dataclass
class Encoder:
    """Turns documents into tokens.

    folder: the cache; None: nothing is kept. n_cached: how many texts' tokens came from the cache.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    rendering: Rendering
    bad: BadRows
    folder: Path | None
    n_cached: int = 0

    def encode(self, documents: Documents) -> Tokens:
        """The tokens of the documents' texts.

        Raises:
            DataError: A document cannot be used, and `bad` does not skip it.
        """
        if not len(documents):
            return Tokens.of(())
        tokens, is_cached = cache.made(self.folder, self._key(documents), functools.partial(self._mapped, documents))
        for problem in tokens.problems:
            self.bad.take(DataError(problem))
        self.n_cached += len(tokens) * is_cached
        return tokens

    def _mapped(self, documents: Documents, folder: Path) -> Tokens:
        batch = _Batch(documents.reader, self.tokenizer, self.vocab_size, self.rendering, self.bad.policy, os.getpid())
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.folder is None:  # every process of the run tokenises
            n_cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        n_processes = min(n_cores, documents.n_bytes // BYTES_PER_PROCESS, len(documents))
        with _environment_kept():
            rows = documents.rows.map(
                batch,
                batched=True,
                batch_size=BATCH,
                writer_batch_size=BATCH,
                features=features(),
                remove_columns=documents.rows.column_names,
                num_proc=n_processes if n_processes > 1 else None,
                cache_file_name=str(folder / "tokens.arrow"),
                load_from_cache_file=True,
                new_fingerprint=folder.name,
            )
        return Tokens(rows)

    def _key(self, documents: Documents) -> str | None:
        """What the tokens depend on. None if the tokenizer cannot be written as text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self.folder is None or backend is None:
            return None
        template = str(self.tokenizer.chat_template)
        return cache.key_of(
            FORMAT,
            [importlib.metadata.version(name) for name in ("tokenizers", "transformers")],
            (type(self.tokenizer).__name__, backend.to_str(), self.tokenizer.special_tokens_map, template),
            # Llama 3's template writes the date into a chat.
            time.strftime("%Y-%m-%d") if "strftime_now" in template else "",
            (self.rendering, self.vocab_size, self.bad.policy),
            documents.digest(),
        )
