"""All objectives, and the choice of a recipe's. No other file chooses."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tigon import objectives
from tigon.errors import RecipeError, UsageError
from tigon.models.loading.classifier import task_of
from tigon.objectives.base import Objective, PlannedObjective
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.rules import post_training as post_training_rules
from tigon.recipe.keys import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TAKES_EVERY_RECIPE = "causal_lm"
_CHOOSES = __name__.rpartition(".")[2]


def _found() -> dict[str, type[Objective]]:
    """The `OBJECTIVE` of each file of this folder, by the file's name; ordinary training comes last."""
    names = [info.name for info in pkgutil.iter_modules(objectives.__path__) if info.name != _CHOOSES]
    modules = {name: importlib.import_module(f"{objectives.__name__}.{name}") for name in names}
    classes = {name: module.OBJECTIVE for name, module in modules.items() if hasattr(module, "OBJECTIVE")}
    return {name: classes[name] for name in sorted(classes, key=lambda name: (name == _TAKES_EVERY_RECIPE, name))}


OBJECTIVES = _found()
"""Every recipe has the first objective whose `of_recipe` does not return None; the last takes every recipe."""


def objective_of(
    recipe: Recipe, config: PreTrainedConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
) -> Objective:
    """The objective of a run, checked against its model.

    Args:
        recipe: The recipe of the run.
        config: The model's config.
        shapes: Returns the shapes of the model's parameters by name; called only if needed.

    Raises:
        RecipeError: The heads do not fit the model.
    """
    made = ((name, objective.of_recipe(recipe, config, shapes)) for name, objective in OBJECTIVES.items())
    name, chosen = next((name, objective) for name, objective in made if objective is not None)
    wanted = recipe.train.objective
    if wanted not in ("auto", name):
        raise RecipeError(
            f"train.objective is {wanted}, but the recipe's other keys set {name}; choose auto, or one of "
            f"{', '.join(OBJECTIVES)} together with its keys"
        )
    return chosen


def config_for(recipe: Recipe, config: PreTrainedConfig) -> Any:
    """The config of the model that a recipe's objective trains. config: that of the recipe's model.

    Raises:
        RecipeError: The objective does not fit the model.
    """
    chosen = OBJECTIVES.get(recipe.train.objective, Objective)
    classified = chosen.config_for(config)
    if chosen.writes_text and task_of(classified) is not None:
        raise RecipeError(
            f"model.name: {recipe.model.name} is a classifier ({classified.architectures[0]}), which predicts no next "
            "token; set train.objective: classify or classify_tokens, or name the model from before its classification"
        )
    return classified


def planned_objective(recipe: Recipe) -> PlannedObjective:
    """The post-training objective that `train.objective` names, for a plan without rows, packages or a run.

    Raises:
        UsageError: A key of `post_training` does not go with it, or its teacher's config cannot be read.
    """
    for rule in post_training_rules.KEY_RULES:
        if rule.breaks(recipe):
            raise UsageError(f"{rule.reason}.")
    chosen = OBJECTIVES[recipe.train.objective]
    assert issubclass(chosen, PostTraining), "other objectives have flags of their own"
    return chosen.planned_for(recipe)
