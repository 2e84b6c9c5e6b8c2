"""Rows with labels: their columns, the order of labels, the label of each token, and the scores."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("datasets")

from tigon.data import labelled_rows
from tigon.data.documents import BadRows, Document
from tigon.data.labelled_rows import LabelEncoder, LabelledRows, label_names
from tigon.data.packing import IGNORE_INDEX
from tigon.data.tokenizer import train_bpe
from tigon.errors import DataError
from tigon.models.loading.classifier import SEQUENCE, TOKEN


def read(*rows: dict[str, Any], task: str = SEQUENCE) -> list[Document]:
    return [LabelledRows(task).read(row, f"a.jsonl:{i}") for i, row in enumerate(rows, start=1)]


def encoder(labels: tuple[str, ...], *, length: int = 64, cuts: bool = False) -> LabelEncoder:
    words = ["Ada lives in Paris.", "Bob sleeps in Oslo."] * 3
    return LabelEncoder(train_bpe(words, 300), labels, 300, BadRows(), length, cuts)


def test_labels_that_are_numbers_are_ordered_by_size_and_names_by_alphabet():
    numbers = read(*({"text": "x", "label": n} for n in (10, 2, 0)))
    assert label_names(numbers, ()) == ("0", "2", "10")
    for odd in ("²", "--5", "٣"):  # names, though `isdigit` or `lstrip` take them for numbers
        assert label_names(read({"text": "x", "label": odd}, {"text": "x", "label": "1"}), ()) == tuple(
            sorted((odd, "1"))
        )
    assert label_names(read({"text": "x", "label": "spam"}, {"text": "x", "label": "ham"}), ()) == ("ham", "spam")


def test_a_classifier_keeps_the_order_of_its_labels_and_refuses_a_new_one():
    known = ("spam", "ham", "LABEL_2")
    rows = read({"text": "x", "label": "ham"}, {"text": "x", "label": 2})
    assert label_names(rows, known) == known
    with pytest.raises(
        DataError, match=r"a.jsonl:1: the label 'eggs' is not one of the model's \(spam, ham, LABEL_2\)"
    ):
        label_names(read({"text": "x", "label": "eggs"}), known)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "column 'label' is missing"),
        ({"text": "x", "label": None}, "a label is None"),
        ({"text": "x", "label": True}, "a label is True"),
        ({"text": "x", "label": 0.5}, "a label is 0.5"),
        ({"text": " ", "label": "a"}, "the text is empty"),
        ({"text": 3, "label": "a"}, "text is int, not text"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row, words):
    with pytest.raises(DataError, match=f"a.jsonl:1: {words}"):
        read(row)


def test_tokens_and_labels_of_different_length_are_refused():
    with pytest.raises(DataError, match="two lists of one length"):
        read({"tokens": ["a", "b"], "labels": ["O"]}, task=TOKEN)


def test_one_label_in_all_rows_is_refused():
    with pytest.raises(DataError, match="every row has the label 'a'"):
        label_names(read({"text": "x", "label": "a"}), ())


def test_an_eval_row_with_a_label_that_no_training_row_has_is_named():
    with pytest.raises(DataError, match=r"a.jsonl:1: no row to train on has the label 'c'"):
        encoder(("a", "b")).encode(read({"text": "x", "label": "c"}))


def test_each_word_is_labelled_at_its_first_token_alone():
    (row,) = read({"tokens": ["Ada", "lives", "in", "Zanzibar", "."], "labels": [1, 0, 0, 2, 0]}, task=TOKEN)
    made = encoder(("0", "1", "2"))
    (encoded,) = made.encode([row])
    pieces = [made.tokenizer.decode([token]) for token in encoded.tokens]
    labelled = [
        (piece, number) for piece, number in zip(pieces, encoded.classes, strict=True) if number != IGNORE_INDEX
    ]
    assert "".join(pieces).strip() == "Ada lives in Zanzibar ."
    assert [number for _, number in labelled] == [1, 0, 0, 2, 0]
    assert [piece.strip()[:1] for piece, _ in labelled if piece.strip()][:2] == ["A", "l"]
    assert len(encoded.tokens) > len(labelled)  # Zanzibar is in several pieces


def test_a_long_row_is_refused_cut_or_dropped():
    rows = read({"text": "Ada lives in Paris. " * 20, "label": "a"}, {"text": "Bob", "label": "b"})
    whole = encoder(("a", "b")).encode(rows)
    with pytest.raises(DataError, match=r"over data.sequence_length 64"):
        labelled_rows.samples(whole, 64, too_long="error")
    dropped = labelled_rows.samples(whole, 64, too_long="drop")
    assert (len(dropped.samples), dropped.n_dropped) == (1, 1)
    cut = labelled_rows.samples(encoder(("a", "b"), length=16, cuts=True).encode(rows), 16, too_long="truncate")
    assert [len(sample.tokens_T) for sample in cut.samples] == [16, 1] and cut.n_truncated == 1


def test_scores_are_those_of_their_definitions():
    each, accuracy, macro_f1 = labelled_rows.scores([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    assert accuracy == 7 / 10
    assert each[0]["precision"] == 3 / 5 and each[0]["recall"] == 3 / 4 and each[1]["rows"] == 6
    assert math.isclose(macro_f1, ((2 * 3 / 9) + (2 * 4 / 11)) / 2)
    assert math.isnan(each[2]["f1"])  # it occurs nowhere
