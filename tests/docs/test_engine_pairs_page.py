"""docs/several-gpus.md says which pairs the recipe's checks refuse, and which the tests train."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from benchmarks.pages import engine_pairs


def test_table_is_that_of_the_checks_and_the_tests() -> None:
    text = engine_pairs.DOCUMENT.read_text(encoding="utf-8")
    assert engine_pairs.written(text) == text, "make pages writes it again"


def test_every_pair_is_either_trained_by_a_test_or_refused_with_the_next_step() -> None:
    trained = {(feature.name, engine.title) for feature, engine in engine_pairs.WORKING}
    every = {(feature.name, engine.title) for feature in engine_pairs.FEATURES for engine in engine_pairs.ENGINES}
    assert trained | engine_pairs.REFUSED.keys() == every and not trained & engine_pairs.REFUSED.keys()
    assert all("; use " in reason or "; set " in reason for reason in engine_pairs.REFUSED.values())
