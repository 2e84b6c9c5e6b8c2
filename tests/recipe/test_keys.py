"""The recipe's keys: a value is checked wherever it comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tigon.errors import RecipeError
from tigon.objectives import recipe_checks
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.techniques.keys.lora import LoraConfig
from tigon.techniques.keys.settings import KEYS, Settings


def test_sections_take_no_value_that_a_recipe_file_may_not_have() -> None:
    with pytest.raises(ValidationError):
        TrainConfig(batch_size=0)
    with pytest.raises(ValidationError):
        replace(LoraConfig(), rank=8.0)
    with pytest.raises(RecipeError, match=r"^lora\.rank is 0; it must be at least 1 and at most 4,096$"):
        Settings.of({"lora.rank": 0})
    with pytest.raises(RecipeError, match=r"^train\.optimizer is 'adam'; it must be one of adamw, "):
        Recipe().having({"train.optimizer": "adam"})


@pytest.mark.parametrize("name", ["1", "null", "true", "2020-01-01"])
def test_name_that_yaml_reads_as_no_text_is_an_unknown_key(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"train:\n  steps: 1\n  {name}: 2\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml(:3)?: train\..* is not a recipe key"):
        recipe_checks.load(path, gpu_present=lambda: False)


def test_settings_of_a_recipe_have_its_values_and_no_auto() -> None:
    recipe = Recipe().having({"lora.rank": 4, "sharding.zero": 2})
    settings = recipe.settings()
    assert {key: recipe.value(key) for key in KEYS} | {
        "train.precision": "amp-bf16", "train.checkpointing": "none",
    } == {key: settings.value(key) for key in KEYS}  # fmt: skip
    assert settings == Settings.of({"lora.rank": 4, "sharding.zero": 2}) and hash(settings)
    assert recipe.settings(precision="fp32").train.precision == "fp32"
