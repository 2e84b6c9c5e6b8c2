"""All objectives, and the choice of a recipe's. No other file chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tigon.objectives.base import Objective
from tigon.objectives.causal_lm import CausalLM
from tigon.objectives.medusa import MedusaTraining
from tigon.recipe.keys import Recipe

OBJECTIVES: tuple[type[Objective], ...] = (MedusaTraining, CausalLM)
"""Every recipe has the first objective whose `of_recipe` does not return None; the last takes every recipe."""


def objective_of(recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]) -> Objective:
    """The objective of a run, checked against its model. Raises RecipeError.

    config: the model's config. shapes: returns the shapes of its parameters by name; called only if needed.
    """
    made = (objective.of_recipe(recipe, config, shapes) for objective in OBJECTIVES)
    return next(objective for objective in made if objective is not None)
