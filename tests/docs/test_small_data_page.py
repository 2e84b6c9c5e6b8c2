"""docs/your-data.md: what few rows teach, as the record gives it; the rows are those of the example."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import small_rows
from benchmarks.pages import small_data


def test_table_is_that_of_the_record() -> None:
    text = small_data.DOCUMENT.read_text(encoding="utf-8")
    assert small_data.written(text) == text, "make pages writes it again"


def test_example_has_the_rows_of_the_measurement(tmp_path: Path) -> None:
    train, held_out = small_rows.rows(80)
    small_rows.save(train, tmp_path / "rows.jsonl")
    example = small_data.ROOT / "examples" / "first-run" / "pirate.jsonl"
    assert (tmp_path / "rows.jsonl").read_bytes() == example.read_bytes()
    assert len({*train, *held_out}) == 80 + 16


def test_style_and_facts_are_counted_in_the_answers() -> None:
    answers = dict.fromkeys(small_rows.OTHER_KINDS, "Arr! Aye.") | {small_rows.OTHER_KINDS[0]: "The sky scatters it."}
    answers |= dict(small_rows.facts()[:8]) | {small_rows.facts()[1][0]: "Arr! The captain be Ann, matey."}
    assert small_rows.in_style(answers) == (9, 10)
    assert small_rows.facts_known(answers, 20) == (4, 5)
    assert small_rows.facts_known(answers, 80) == (7, 8)
