"""Rows for post-training in TRL's formats: which columns they have, the texts in them, and a generated data set.

A prompt or an answer is text, or a list of messages with `role` and `content`. A row becomes a document with its `row`,
which the trainer takes, and its `texts`, which count for the tokenizer and the length limit.
"""

from __future__ import annotations

import importlib.metadata
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tigon.data import cache
from tigon.data.chat.chat_template import special_tokens
from tigon.data.chat.messages import read_messages
from tigon.data.document_table import BATCH, Documents, read_stored
from tigon.data.documents import Document, Segment, string
from tigon.data.tokens import Tokens
from tigon.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

ROWS_TYPED = 1024
"""Rows whose types are found at a time."""
Content = str | list[dict[str, Any]]
"""Text, or messages in TRL's form."""


@dataclass(frozen=True)
class RowFormat:
    """One of TRL's formats: its columns, and what of a toy row goes into them."""

    name: str
    required: tuple[str, ...]
    """The columns that every row has."""
    optional: tuple[str, ...]
    """More columns with a prompt or an answer."""
    answers: tuple[str, ...]
    """The columns with an answer. Each answer makes one text, after the prompt."""
    has_label: bool = False
    """Whether the column `label` is true for a good answer and false for a bad one."""
    keeps_others: bool = False
    """Whether the trainer takes other columns too, for reward functions."""

    def read(self, row: dict[str, Any], where: str) -> Document:
        for name in self.required:
            if name not in row:
                has = ", ".join(map(str, row)) or "none"
                raise DataError(f"{where}: column {name!r} is missing (the row has {has}); {self._wanted()}")
        contents = {name: _content(row, name, where) for name in (*self.required, *self.optional) if name in row}
        if self.has_label and type(row.get("label")) is not bool:
            problem = "is missing" if "label" not in row else f"is {row['label']!r}"
            raise DataError(f"{where}: column 'label' {problem}; write true for a good answer, false for a bad one")
        if len({isinstance(content, str) for content in contents.values()}) > 1:
            kinds = ", ".join(f"{name!r} is {_KINDS[type(content)]}" for name, content in contents.items())
            raise DataError(f"{where}: {kinds}; write all of them as text, or all as messages")
        for name in self.answers:
            if name in contents and not _plain(contents[name]).strip():
                raise DataError(f"{where}: column {name!r} is empty; fill it in or remove the row")
        taken: dict[str, Any] = dict(row) if self.keeps_others else {}
        taken |= contents
        if self.has_label:
            taken["label"] = row["label"]
        return Document(where, row=taken, texts=tuple(self._texts(contents, where)), format=self.name)

    def _texts(self, contents: Mapping[str, Content], where: str) -> Iterator[Document]:
        prompt = contents.get("prompt", "" if isinstance(next(iter(contents.values())), str) else [])
        answers = [contents[name] for name in self.answers if name in contents]
        for answer in answers or ["" if isinstance(prompt, str) else []]:
            if isinstance(prompt, str) and isinstance(answer, str):
                parts = (Segment(prompt, False), Segment(answer, True))
                yield Document(where, tuple(part for part in parts if part.text))
            else:
                turns = [*prompt, *answer]
                yield Document(where, messages=read_messages(turns, where))

    def _wanted(self) -> str:
        names = [*self.required, *(("label",) if self.has_label else ())]
        return f"this objective takes rows with {' and '.join(names)}"

    def toy_rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, toy in enumerate(toy_rows(), start=1):
            row = {name: toy[name] for name in (*self.required, *self.optional)}
            if self.has_label:
                row["label"] = toy["label"]
            if self.keeps_others:
                row["thing"] = toy["thing"]
            yield f"toy-answers:{number}", row


PAIRS = RowFormat("preference pairs", ("chosen", "rejected"), ("prompt",), ("chosen", "rejected"))
"""A prompt with a better and a worse answer. Without `prompt` both columns begin with it."""
UNPAIRED = RowFormat("answers with labels", ("prompt", "completion"), (), ("completion",), has_label=True)
"""A prompt with one answer and its label."""
PROMPTS = RowFormat("prompts", ("prompt",), ("completion",), ("completion",), keeps_others=True)
"""A prompt. A `completion` is trained on only in the steps before the objective's own."""


def check_alike(documents: Iterable[Document]) -> None:
    """Raise DataError for a row that has other columns than the first, or text where the first has messages.

    The trainer would fill in missing columns with nothing, and stop without the number of the row.
    """
    rest = iter(documents)
    first = next(rest)
    assert first.row is not None
    for document in rest:
        assert document.row is not None
        for name in {**first.row, **document.row}:
            if name not in document.row or name not in first.row:
                has, lacks = (first, document) if name in first.row else (document, first)
                raise DataError(
                    f"{lacks.origin}: column {name!r} is missing, but {has.origin} has it; give all rows the same "
                    "columns"
                )
            one, other = (type(each.row[name]) for each in (first, document))  # type: ignore[index]
            if one is not other:
                raise DataError(
                    f"{document.origin}: column {name!r} is {_KINDS.get(other, other.__name__)}, but "
                    f"{_KINDS.get(one, one.__name__)} in {first.origin}; write it alike in all rows"
                )


_KINDS = {str: "text", list: "messages", bool: "true or false"}


Parts = tuple[Documents, Documents]
"""The rows to train on, and those for evaluation."""


def fitting(
    rows: Parts, encoded: tuple[Tokens, Tokens], length: int, *, too_long: str
) -> tuple[Parts, tuple[Tokens, Tokens]]:
    """The rows whose texts can be trained on, and their texts.

    Args:
        rows: The rows as documents.
        encoded: Their texts as tokens. A text may be missing, because `data.bad_rows: skip` left it out.
        length: The most tokens of a text.
        too_long: The value of `data.too_long`; `drop` leaves rows with a longer text out.
    """
    origins = [part.origins() for part in encoded]
    missing: Counter[str] = Counter()
    for part in rows:
        for row in part:
            missing[row.origin] += len(row.texts)
    for own in origins:
        missing.subtract(own)
    out = {origin for origin, number in missing.items() if number > 0}
    if too_long == "drop":
        for own, tokens in zip(origins, encoded, strict=True):
            out.update(own[i] for i in np.flatnonzero(tokens.sizes > length))
    if not out:
        return rows, encoded
    train, evaluated = (
        part.select(np.array([i for i, row in enumerate(part) if row.origin not in out], dtype=int)) for part in rows
    )
    texts, for_eval = (
        tokens.select(np.array([origin not in out for origin in own], dtype=bool))
        for own, tokens in zip(origins, encoded, strict=True)
    )
    return (train, evaluated), (texts, for_eval)


def as_dataset(documents: Documents, cached: Path | None) -> datasets.Dataset:
    """The rows as TRL's trainers take them: a `datasets.Dataset` with the columns of the format.

    It is in memory only if its columns have other types in some rows, for example other keys of messages.

    cached: the cache. TRL stores the tokens beside the rows, and finds them again in another run with the same rows.
    """
    import datasets

    def rows(batch: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
        return [dict(read_stored(row, documents.reader).row or {}) for row in batch["row"]]

    features = None
    for batch in documents.rows.iter(ROWS_TYPED):
        own = datasets.Dataset.from_list(rows(batch)).features
        if features is not None and own != features:
            return datasets.Dataset.from_list([dict(document.row or {}) for document in documents])
        features = own
    if features is None:
        return datasets.Dataset.from_dict({})
    versions = [importlib.metadata.version(name) for name in ("trl", "transformers")]
    key = cache.key_of(documents.digest(), versions)

    def columns(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        of_batch = rows(batch)
        return {name: [row[name] for row in of_batch] for name in of_batch[0]}

    def mapped(folder: Path) -> datasets.Dataset:
        return documents.rows.map(
            columns,
            batched=True,
            batch_size=BATCH,
            features=features,
            remove_columns=documents.rows.column_names,
            cache_file_name=str(folder / "rows.arrow"),
            new_fingerprint=key,
        )

    return cache.made(cached, key, mapped)[0]


def is_chat(document: Document) -> bool:
    """Whether a row's prompt and answers are messages."""
    return any(text.messages for text in document.texts)


def without_template(parts: Parts, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning about rows of text for a chat model, or None. TRL's trainers apply the chat template to messages only.

    Text with a special token of the tokenizer counts as formatted by the user.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    marks = special_tokens(tokenizer, marks_only=True)
    formatted = marks.search if marks else lambda text: None
    rows = (row for part in parts for row in part)
    bare = sum(not is_chat(row) and not any(formatted(text.text) for text in row.texts) for row in rows)
    if not bare:
        return None
    return (
        f"{bare:,} of {sum(map(len, parts)):,} rows are text, to which TRL applies no chat template: the model learns "
        'outside the format of its chats; write prompt and answers as messages: [{"role": "user", "content": "..."}]'
    )


def _content(row: dict[str, Any], name: str, where: str) -> Content:
    if isinstance(row[name], list):
        read = read_messages(row[name], f"{where}: column {name!r}")
        return [message.as_mapping() for message in read]
    if not isinstance(row[name], str):
        raise DataError(f"{where}: column {name!r} is {type(row[name]).__name__}; write text or a list of messages")
    return string(row, name, where)


def _plain(content: Content) -> str:
    return content if isinstance(content, str) else "".join(turn["content"] for turn in content)


# --- the generated data set -------------------------------------------------------------------------------------------

_WORDS = (
    "open close clean paint repair carry measure fold store sell weigh move hide wash mark pack test return count "
    "replace",
    "box door table lamp chair window bottle basket clock ladder bicycle mirror carpet drawer kettle bucket helmet "
    "jacket pillow shelf camera candle guitar hammer kite pencil piano radio rope spoon tent torch towel wagon wheel "
    "blanket broom cup fence glove",
)
_ACTIONS, _THINGS = map(str.split, _WORDS)
_POLITE = (
    " Please {action} the {thing} slowly, and ask me if you need help.",
    " Please take your time and {action} the {thing} with care.",
    " Please look at the {thing} first, then {action} it gently.",
)
_BLUNT = (
    " Just {action} the {thing}, and do not ask me again.",
    " Any fool can {action} the {thing} without my help.",
    " Go and {action} the {thing}, I have no time for it.",
)


def toy_rows() -> Iterator[Mapping[str, Any]]:
    """800 questions, each with a polite and a blunt answer, in a fixed random order. `completion` is either of them."""
    generator = random.Random(0)
    questions = [(action, thing) for action in _ACTIONS for thing in _THINGS]
    generator.shuffle(questions)
    for action, thing in questions:
        chosen, rejected = (generator.choice(style).format(action=action, thing=thing) for style in (_POLITE, _BLUNT))
        polite = generator.random() < 0.5
        yield {
            "prompt": f"How do I {action} the {thing}?\nAnswer:",
            "chosen": chosen,
            "rejected": rejected,
            "completion": chosen if polite else rejected,
            "label": polite,
            "thing": thing,
        }
