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
