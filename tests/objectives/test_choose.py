"""A recipe has one objective; its choice needs the model's shapes only if there are heads to fit to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")
from tigon.errors import RecipeError
from tigon.models.loading.config import load_config
from tigon.objectives.base import Objective
from tigon.objectives.choose import OBJECTIVES, objective_of
from tigon.objectives.medusa import MedusaTraining
from tigon.recipe.keys import HeadsConfig, ModelConfig, Recipe, TrainConfig
from tigon.trainer import model


def recipe_of(**heads: Any) -> Recipe:
    return Recipe(model=ModelConfig(name="tigon-demo"), train=TrainConfig(steps=1), heads=HeadsConfig(**heads))


def test_recipe_without_a_section_of_an_objective_trains_the_next_token() -> None:
    chosen = objective_of(recipe_of(), None, lambda: pytest.fail("the shapes were computed"))
    assert type(chosen) is Objective and chosen is not objective_of(recipe_of(), None, dict)


def test_recipe_with_a_stage_trains_heads_that_fit_the_model() -> None:
    config = load_config("tigon-demo")
    chosen = objective_of(recipe_of(stage=1, count=2), config, lambda: model.parameter_shapes(config))
    assert isinstance(chosen, MedusaTraining) and chosen.spec.count == 2 and chosen.spec.kind == "medusa"


def test_heads_that_would_learn_nothing_are_refused() -> None:
    config = load_config("tigon-demo")
    with pytest.raises(RecipeError, match=r"heads\.layers is 0 .* set heads\.layers to 1"):
        objective_of(recipe_of(stage=1, layers=0, output="shared"), config, lambda: model.parameter_shapes(config))


def test_last_objective_takes_every_recipe() -> None:
    classes = list(OBJECTIVES.values())
    assert classes[-1] is Objective and len(set(classes)) == len(classes)


@pytest.mark.parametrize("name", ["medusa", "unknown"])
def test_a_name_that_the_other_keys_do_not_set_is_refused(name: str) -> None:
    recipe = recipe_of()
    recipe = replace(recipe, train=replace(recipe.train, objective=name))
    with pytest.raises(RecipeError, match=rf"train\.objective is {name}, .* set causal_lm; choose auto, or one of"):
        objective_of(recipe, None, dict)
