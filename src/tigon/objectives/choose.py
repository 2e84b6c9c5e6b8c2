"""Chooses the objective of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tigon.objectives import medusa
from tigon.objectives.base import Objective
from tigon.objectives.causal_lm import CausalLM
from tigon.recipe.keys import Recipe


def objective_of(recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]) -> Objective:
    """The objective of a run, checked against its model.

    Args:
        recipe: The recipe of the run.
        config: The model's config.
        shapes: Returns the shapes of the model's parameters by name; called only if needed.

    Raises:
        RecipeError: The heads do not fit the model.
    """
    if recipe.heads.stage is None:
        return CausalLM(recipe.model)
    return medusa.MedusaTraining(recipe.model, recipe=recipe, spec=medusa.check(recipe, config, shapes()))
