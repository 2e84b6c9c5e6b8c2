"""`python -m benchmarks several-cards`: its rows can be compared, and what a call found is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from benchmarks.pages.several_cards import PLANS
from benchmarks.several_cards import rows
from tigon.errors import RecipeError
from tigon.objectives import recipe_checks

EVERY = {row.name: row for row in rows.every()}


def test_rows_of_losses_name_a_row_with_the_same_samples() -> None:
    compared = [row for row in EVERY.values() if row.equals]
    assert len(EVERY) == sum(map(len, rows.STAGES)) and len(compared) > 20
    for row in compared:
        other = EVERY[row.equals]
        keys = ("train.objective", "train.precision", "train.optimizer", "lora.rank", "model.name")
        assert [row.keys.get(key) for key in keys] == [other.keys.get(key) for key in keys], row.name
        if not row.post_training:
            samples = row.keys["train.steps"] * row.keys["train.batch_size"] * row.cards
            assert samples == rows.N_SAMPLES, row.name


@pytest.mark.parametrize("tiny", [False, True])
def test_recipe_of_a_row_is_one_that_tigon_train_takes(tiny: bool, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for row in EVERY.values():
        path.write_text(yaml.safe_dump(rows.sections(row, tiny=tiny)), encoding="utf-8")
        try:
            recipe = recipe_checks.load(path, gpu_present=lambda: True)
        except RecipeError as error:
            assert "muon" in str(error)
            continue
        assert recipe.sharding.gpus == row.cards and recipe.train.log_steps == 1


def test_every_timed_row_has_a_plan() -> None:
    plans = json.loads(PLANS.read_text(encoding="utf-8"))["rows"]
    assert plans.keys() == {name for name in EVERY if not name.startswith("losses")}
    assert all("ms" in plan for plan in plans.values())


def test_rows_are_chosen_with_the_rows_whose_losses_they_repeat() -> None:
    chosen = [row.name for stage in rows.chosen("four, tensor groups") for row in stage]
    assert chosen == ["losses, one", "losses, four, tensor groups of two", "8B, 16 layers, four, tensor groups of two"]
    assert rows.worst_difference([2.0, 1.1], [2.0, 1.0, 9.0]) == pytest.approx(0.1)
    assert rows.worst_difference([], [1.0]) == math.inf
