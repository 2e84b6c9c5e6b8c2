"""Tools and environments that a recipe names, as TRL's GRPOTrainer takes them, checked before the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tigon.errors import RecipeError, one_line
from tigon.trainer.post_training.named_objects import load_object


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """Load the functions that `post_training.tools` names.

    Raises:
        RecipeError: A function does not exist, or the chat template cannot describe it to the model.
    """
    tools = [load_object("post_training.tools", name, example="my_tools:add") for name in names]
    for name, tool in zip(names, tools, strict=True):
        _check_json_schema("post_training.tools", name, tool)
    return tools


def load_environment(name: str) -> type[Any]:
    """Load the class that `post_training.environment` names.

    Raises:
        RecipeError: The class does not exist, has no `reset`, or the chat template cannot describe one of its methods.
    """
    key = "post_training.environment"
    environment = load_object(key, name, form="module:Class", example="my_game:Game")
    if not inspect.isclass(environment) or not callable(getattr(environment, "reset", None)):
        raise RecipeError(f"{key}: {name}: write a class with a method reset(self, **columns), as TRL takes it")
    for attribute, method in inspect.getmembers(environment, inspect.isfunction):
        if attribute not in ("reset", "get_reward") and not attribute.startswith("_"):
            _check_json_schema(key, f"{name}.{attribute}", method)
    return environment


def _check_json_schema(key: str, name: str, function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    try:
        get_json_schema(function)
    except Exception as error:  # transformers raises several kinds
        raise RecipeError(
            f"{key}: {name} cannot be described to the model: {one_line(error)}; give each argument a type and a line "
            "under `Args:` in the docstring"
        ) from error
