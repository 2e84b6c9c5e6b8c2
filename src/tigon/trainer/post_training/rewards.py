"""Reward functions that a recipe names as `module:function`, checked before and while they are called."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tigon.errors import RecipeError


def load_rewards(names: Sequence[str]) -> list[Callable[..., list[float | None]]]:
    """The reward functions that the recipe names.

    Raises:
        RecipeError: A name is not `module:function`, or the module or the function does not exist.
    """
    return [_load(name, several=len(names) > 1) for name in names]


def _load(name: str, *, several: bool) -> Callable[..., list[float | None]]:
    """several: Whether there are other functions, so that this one may give None, TRL's word for "does not apply"."""
    where, separator, attribute = name.partition(":")
    if not (separator and where and attribute.isidentifier()):
        raise RecipeError(f"post_training.rewards: {name!r} is not module:function, e.g. my_rewards:politeness")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise RecipeError(f"post_training.rewards: {name}: the module cannot be imported: {_short(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        file = getattr(module, "__file__", None) or where
        raise RecipeError(f"post_training.rewards: {name}: {file} has no function {attribute}")
    if not _takes_completions(function):
        raise RecipeError(
            f"post_training.rewards: {name}: define it as `def {attribute}(completions, **kwargs)`, which returns a "
            "number for each completion"
        )

    @functools.wraps(function)
    def checked(*, completions: list[Any], **columns: object) -> list[float | None]:
        try:
            rewards = function(completions=completions, **columns)
        except (Exception, SystemExit) as error:
            raise RecipeError(f"post_training.rewards: {name} failed: {_short(error)}{_place(error)}") from error
        if not isinstance(rewards, list) or len(rewards) != len(completions):
            count = f"{len(rewards)} values" if isinstance(rewards, list) else type(rewards).__name__
            raise RecipeError(
                f"post_training.rewards: {name} returned {count} for {len(completions)} completions; return a list "
                "with a number for each"
            )
        for i, reward in enumerate(rewards):
            if not _is_number(reward) and not (reward is None and several):
                raise RecipeError(
                    f"post_training.rewards: {name} returned {reward!r:.40} for completion {i} of {len(completions)}; "
                    "return a finite number for each"
                )
        return rewards

    return checked


def _takes_completions(function: Callable[..., Any]) -> bool:
    """Whether a function takes `completions` and any other column by name, as TRL calls it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    takes_rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return takes_rest and any(p.name == "completions" or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_number(reward: object) -> bool:
    """Whether a reward is finite: of Python, NumPy, or a tensor with one element."""
    if isinstance(reward, torch.Tensor):
        return reward.numel() == 1 and bool(torch.isfinite(reward).all())
    return isinstance(reward, numbers.Real) and math.isfinite(reward)


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _place(error: BaseException) -> str:
    """Where the user's function failed, as the end of a sentence."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is this module's
    return f", in line {frames[0].lineno} of {frames[0].filename}" if frames else ""
