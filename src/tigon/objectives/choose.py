"""Chooses the objective of a recipe. No other file does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tigon.objectives import medusa
from tigon.objectives.base import Objective
from tigon.objectives.causal_lm import CausalLM
from tigon.recipe.keys import Recipe


def objective_of(recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]) -> Objective:
    """The objective of a run, checked against its model. Raises RecipeError.

    config: the model's config. shapes: returns the shapes of its parameters by name; called only if needed.
    """
    if recipe.heads.stage is None:
        return CausalLM(recipe.model)
    return medusa.MedusaTraining(recipe.model, recipe=recipe, spec=medusa.check(recipe, config, shapes()))
