"""`python -m benchmarks several-cards`: its rows can be compared, and what a call found is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.pages.several_cards import PLANS
from benchmarks.several_cards import rows
from benchmarks.several_cards.checkpoints import STD, Checkpoints
from tigon.errors import RecipeError
from tigon.objectives import recipe_checks
from tigon.recipe.keys import ModelConfig
from tigon.trainer import model as models

EVERY = {row.name: row for row in rows.every()}


def test_checkpoint_has_the_tensors_of_the_preset_and_random_values_in_as_many_layers_as_asked(tmp_path: Path) -> None:
    section = {"name": "llama-3.2-1b", "config": {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}}
    folder = Checkpoints(tmp_path).path(section, dense_layers=1)
    assert Checkpoints(tmp_path).path(section, dense_layers=1) == folder, "it is written once"
    named = ModelConfig(name=str(folder))
    config = models.load_config(named)
    model = models.build(named, config, dtype=torch.bfloat16, device=None, seed=0)
    shapes = models.parameter_shapes(models.load_config(ModelConfig(**section)))
    assert models.shapes_of(model) == shapes and config.hidden_size == 64
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
        elif ".layers.1." in name:
            assert not weight.any(), name
        else:
            assert weight.float().std().item() == pytest.approx(STD, rel=0.1), name


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


@pytest.mark.parametrize("card", PLANS)
def test_every_timed_row_has_a_plan(card: str) -> None:
    plans = json.loads(PLANS[card].read_text(encoding="utf-8"))["rows"]
    assert plans.keys() == {name for name, row in EVERY.items() if row.is_planned}
    assert all("ms" in plan for plan in plans.values())


def test_rows_are_chosen_with_the_rows_whose_losses_they_repeat() -> None:
    chosen = [row.name for stage in rows.chosen(["four, tensor groups"]) for row in stage]
    assert chosen == ["losses, one", "losses, four, tensor groups of two", "8B, 16 layers, four, tensor groups of two"]
    chosen = [row.name for stage in rows.chosen(["8B, ZeRO-3", "losses, DPO, DDP"]) for row in stage]
    assert chosen == ["8B, ZeRO-3", "losses, DPO, one", "losses, DPO, DDP"], "a whole name is that row's alone"
    assert rows.chosen([]) == rows.STAGES
    with pytest.raises(KeyError, match="no such row"):
        rows.chosen(["no such row"])
    assert rows.worst_difference([2.0, 1.1], [2.0, 1.0, 9.0]) == pytest.approx(0.1)
    assert rows.worst_difference([], [1.0]) == math.inf
