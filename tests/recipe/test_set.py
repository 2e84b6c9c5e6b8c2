"""`--set` changes a recipe's keys."""

from __future__ import annotations

import pytest

from tigon.errors import RecipeError
from tigon.objectives.recipe_checks import load


def loaded(tmp_path, text, *assignments):
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, assignments, gpu_present=lambda: False)


def test_steps_replace_the_epochs_of_the_file_and_epochs_the_steps(tmp_path):
    train = loaded(tmp_path, "train: {epochs: 3}\n", "train.steps=5").train
    assert (train.steps, train.epochs) == (5, None)
    train = loaded(tmp_path, "train: {steps: 5}\n", "num_train_epochs=2").train
    assert (train.steps, train.epochs) == (None, 2)


def test_both_in_set_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="both are given"):
        loaded(tmp_path, "train: {steps: 5}\n", "train.epochs=2", "train.steps=5")


PRESET = "model: {name: tigon-demo, config: {num_hidden_layers: 2}}\ndata: {vocab_size: 512}\ntrain: {steps: 1}\n"


def test_keys_of_the_files_preset_are_left_out_for_a_checkpoint_and_named(tmp_path, capsys):
    recipe = loaded(tmp_path, PRESET, "model.name=owner/model")
    assert recipe.model.config is None and recipe.data.vocab_size == 8192
    assert "left out model.config, data.vocab_size, which only the preset tigon-demo takes" in capsys.readouterr().err


def test_keys_of_the_preset_are_kept_for_another_preset_and_where_set_gives_them(tmp_path, capsys):
    recipe = loaded(tmp_path, PRESET, "model.name=smollm2-135m")
    assert recipe.model.config == {"num_hidden_layers": 2} and not capsys.readouterr().err
    assert loaded(tmp_path, PRESET, "model.name=owner/model", "data.vocab_size=600").data.vocab_size == 600
