"""Rows with labels for classification: a text with one label, or words with a label each.

Rows are `{"text": "...", "label": "spam"}` or `{"tokens": ["Ada", "sleeps"], "labels": ["PER", "O"]}`. A label is a
name or a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tigon.data.documents import BadRows, Document, Segment, string
from tigon.data.packing import Collator, Packed, Sample
from tigon.data.preferences import toy_rows
from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.errors import DataError
from tigon.models.loading.classifier import SEQUENCE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_LABELS = 20
"""Most labels that a message names."""


@dataclass(frozen=True)
class LabelledRows:
    """Reads rows with labels. task: `sequence` for one label per text, `token` for one per word."""

    task: str

    def read(self, row: dict[str, Any], where: str) -> Document:
        names = ("text", "label") if self.task == SEQUENCE else ("tokens", "labels")
        if missing := [name for name in names if name not in row]:
            has = ", ".join(map(str, row)) or "none"
            raise DataError(
                f"{where}: column {missing[0]!r} is missing (the row has {has}); this objective takes rows with "
                f"{' and '.join(names)}, and data.columns renames other columns"
            )
        if self.task == SEQUENCE:
            text = string(row, "text", where)
            labels: tuple[str, ...] = (_name(row["label"], where),)
        else:
            words, given = row["tokens"], row["labels"]
            if not (isinstance(words, list) and isinstance(given, list) and len(words) == len(given)):
                raise DataError(f"{where}: tokens and labels are to be two lists of one length, with a label per word")
            text = " ".join(string({"tokens": word}, "tokens", where) for word in words)
            labels = tuple(_name(label, where) for label in given)
        if not text.strip():
            raise DataError(f"{where}: the text is empty; fill it in or remove the row")
        unread = tuple(str(name) for name in row if name not in names)
        own = {"labels": labels} if self.task == SEQUENCE else {"labels": labels, "words": tuple(words)}
        return Document(where, (Segment(text, False),), row=own, format="labels", unread=unread)

    def toy_rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Polite and blunt answers, or their words with the thing marked."""
        for number, toy in enumerate(toy_rows(), start=1):
            where, answer = f"toy-answers:{number}", toy["completion"].strip()
            if self.task == SEQUENCE:
                yield where, {"text": answer, "label": "polite" if toy["label"] else "blunt"}
            else:
                words = answer.split()
                labels = ["thing" if word.strip(".,") == toy["thing"] else "other" for word in words]
                yield where, {"tokens": words, "labels": labels}


def _name(label: object, where: str) -> str:
    if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
        raise DataError(f"{where}: a label is {label!r:.60}; write a name or a whole number")
    return str(label)


def label_names(documents: Iterable[Document], known: Sequence[str]) -> tuple[str, ...]:
    """The names of the labels in the order of the model's outputs: numbers by size, or else names by alphabet.

    Args:
        documents: The rows to train on.
        known: The labels of a model that is a classifier already; empty for a new head.

    Raises:
        DataError: A row has a label that the model lacks, or all rows have the same one.
    """
    found: dict[str, str] = {}
    for document in documents:
        for label in (document.row or {})["labels"]:
            found.setdefault(label, document.origin)
    if known:
        for label, where in found.items():
            if _known_as(label, known) is None:
                raise DataError(
                    f"{where}: the label {label!r} is not one of the model's ({listed(known)}); name the model from "
                    "before its classification, or change the rows' labels"
                )
        return tuple(known)
    if len(found) < 2:
        only = next(iter(found), None)
        raise DataError(f"data.source: every row has the label {only!r}; classification needs two labels or more")
    if all(re.fullmatch(r"-?[0-9]+", label) for label in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _known_as(label: str, known: Sequence[str]) -> int | None:
    """The number of a label; a model without names calls its labels LABEL_0, LABEL_1 and so on."""
    return next((number for number, name in enumerate(known) if name in (label, f"LABEL_{label}")), None)


def listed(labels: Sequence[str]) -> str:
    """The names of labels for a message."""
    rest = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    return ", ".join(labels[:SHOWN_LABELS]) + rest


@dataclass(frozen=True, kw_only=True)
class EncodedLabels(Encoded):
    """A row as tokens, with the number of its label, or of each token's label."""

    classes: tuple[int, ...]
    is_cut: bool = False


@dataclass(frozen=True)
class LabelEncoder:
    """Turns rows with labels into tokens, as the tokenizer itself writes a text, with its special tokens.

    length: the most tokens of a row; cuts: whether a longer row is cut there.
    """

    tokenizer: PreTrainedTokenizerBase
    labels: tuple[str, ...]
    vocab_size: int
    bad: BadRows
    length: int
    cuts: bool

    def encode(self, documents: Sequence[Document]) -> list[EncodedLabels]:
        """The rows as tokens.

        Raises:
            DataError: A row cannot be used, and `bad` does not skip it.
        """
        encoded = []
        for document in documents:
            try:
                encoded.append(self._row(document))
            except DataError as error:
                self.bad.take(error)
        return encoded

    def _row(self, document: Document) -> EncodedLabels:
        row, where, text = document.row or {}, document.origin, document.text
        numbers = [_known_as(label, self.labels) for label in row["labels"]]
        if None in numbers:
            label = row["labels"][numbers.index(None)]
            raise DataError(f"{where}: no row to train on has the label {label!r} (they have {listed(self.labels)})")
        words = row.get("words")
        cut = {"truncation": True, "max_length": self.length} if self.cuts else {}
        made = self.tokenizer(text, return_offsets_mapping=words is not None, verbose=False, **cut)
        tokens = list(made["input_ids"])
        if not tokens:
            raise DataError(f"{where}: the tokenizer makes no token of it; remove the row")
        if max(tokens) >= self.vocab_size:
            raise DataError(
                f"{where}: the tokenizer gives id {max(tokens)}, but the model's vocabulary has {self.vocab_size}; use "
                "the model's own tokenizer"
            )
        classes = tuple(numbers) if words is None else _of_tokens(words, numbers, made["offset_mapping"])
        is_cut = self.cuts and len(tokens) == self.length and len(self.tokenizer(text)["input_ids"]) > self.length
        ignored = [IGNORE_INDEX] * len(tokens)
        return EncodedLabels(tokens, ignored, where, False, classes=classes, is_cut=is_cut)  # type: ignore[arg-type]


def counts_line(encoded: Sequence[EncodedLabels], labels: Sequence[str]) -> str:
    """A line that says how often each label occurs."""
    counts = Counter(number for row in encoded for number in row.classes if number != IGNORE_INDEX)
    return f"labels   {len(labels)}: " + listed([f"{name} {counts[i]:,}" for i, name in enumerate(labels)])


def _of_tokens(words: Sequence[str], numbers: Sequence[Any], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The label of each token: that of a word at its first token, and IGNORE_INDEX elsewhere.

    offsets: the characters of each token in the words joined by spaces.
    """
    begin, waiting = 0, []
    for word, number in zip(words, numbers, strict=True):
        waiting.append((begin, begin + len(word), number))
        begin += len(word) + 1
    classes = []
    for first, last in offsets:
        while waiting and waiting[0][1] <= first:
            waiting.pop(0)
        meets = bool(waiting) and first < last and last > waiting[0][0]
        classes.append(waiting.pop(0)[2] if meets else IGNORE_INDEX)
    return tuple(classes)


def samples(encoded: Sequence[EncodedLabels], length: int, *, too_long: str) -> Packed:
    """A sample per row, with at most `length` tokens.

    too_long: error, truncate or drop, for a longer row.

    Raises:
        DataError: `too_long` is error and a row is too long.
    """
    made, n_dropped = [], 0
    for row in encoded:
        n_tokens = len(row.tokens)
        if n_tokens > length and too_long == "error":
            raise DataError(
                f"{row.origin}: {n_tokens} tokens, over data.sequence_length {length}; raise it, or set data.too_long "
                "to truncate or drop"
            )
        if n_tokens > length or all(number == IGNORE_INDEX for number in row.classes):
            n_dropped += 1
            continue
        values = (row.tokens, row.classes, range(n_tokens))
        made.append(Sample(*(torch.tensor(list(each), dtype=torch.int32) for each in values)))
    n_cut = sum(row.is_cut for row in encoded)
    return Packed(made, sum(len(sample.tokens_T) for sample in made), n_cut, n_dropped)


@dataclass(frozen=True)
class LabelCollator(Collator):
    """Turns samples into input_ids, attention_mask (B, T), and labels: (B, 1) of texts, or (B, T) of tokens."""

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        ids = [sample.tokens_T.long() for sample in samples]
        labels = [sample.labels_T.long() for sample in samples]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
        }


def scores(confusion: Sequence[Sequence[int]]) -> tuple[list[dict[str, float]], float, float]:
    """Precision, recall and F1 of each label, the accuracy, and the macro F1.

    confusion: how often a label (row) was given as another one (column).

    A label that occurs neither in the rows nor in the answers has no F1, and is left out of the mean.
    """
    total, each = sum(map(sum, confusion)), []
    for number, row in enumerate(confusion):
        hits, support = row[number], sum(row)
        given = sum(other[number] for other in confusion)
        precision, recall = (hits / n if n else 0.0 for n in (given, support))
        f1 = 2 * hits / (given + support) if given + support else float("nan")
        each.append({"precision": precision, "recall": recall, "f1": f1, "rows": support})
    f1s = [one["f1"] for one in each if one["f1"] == one["f1"]]
    accuracy = sum(row[i] for i, row in enumerate(confusion)) / total if total else float("nan")
    return each, accuracy, sum(f1s) / len(f1s) if f1s else float("nan")
