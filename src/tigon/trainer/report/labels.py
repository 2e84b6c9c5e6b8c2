"""The labels of a classification in the report and the terminal: scores of each label, and the confusion table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tigon.data.labelled_rows import scores
from tigon.report.table import Table

MOST_COLUMNS = 10
"""Most labels of a confusion table. With more, the pairs that are confused most are listed."""
MOST_PAIRS = 20


def line(table: Mapping[str, Any]) -> str:
    """The accuracy and the macro F1. table: as `Objective.table` returns it."""
    _, accuracy, macro_f1 = scores(table["confusion"])
    n = sum(map(sum, table["confusion"]))
    return f"accuracy {accuracy:.1%}, macro F1 {macro_f1:.1%}, of {n:,} labels for evaluation"


def tables(table: Mapping[str, Any]) -> tuple[Table, Table]:
    """The scores of each label, and how often each was given as another one."""
    labels, confusion = table["labels"], table["confusion"]
    each, _, _ = scores(confusion)
    rows = [
        (label, f"{one['rows']:,}", *(f"{one[name]:.1%}" for name in ("precision", "recall", "f1")))
        for label, one in zip(labels, each, strict=True)
        if one["f1"] == one["f1"]  # the label occurs
    ]
    return Table(("label", "rows", "precision", "recall", "F1"), rows), _confusion(labels, confusion)


def _confusion(labels: Sequence[str], confusion: Sequence[Sequence[int]]) -> Table:
    if len(labels) <= MOST_COLUMNS:
        rows = [(label, *(f"{n:,}" for n in row)) for label, row in zip(labels, confusion, strict=True)]
        return Table(("is \\ given as", *labels), rows)
    pairs = [(n, labels[i], labels[j]) for i, row in enumerate(confusion) for j, n in enumerate(row) if i != j and n]
    pairs.sort(key=lambda pair: -pair[0])
    return Table(("is", "given as", "rows"), [(a, b, f"{n:,}") for n, a, b in pairs[:MOST_PAIRS]], texts=(0, 1))
