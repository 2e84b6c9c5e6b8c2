"""Reward functions that a recipe names as `module:function`, checked before and while they are called."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tigon.errors import RecipeError, one_line
from tigon.objectives.post_training.reward_entries import KEY, RewardEntry
from tigon.trainer.post_training.named_objects import load_object, place_of

Function = Callable[..., list[float | None]]
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes to a reward function besides the columns of the rows."""


def load_rewards(
    entries: Sequence[RewardEntry],
    *,
    columns: Collection[str] | None = None,
    note: Callable[[str, Sequence[Any], Sequence[Any], Sequence[float | None]], None] | None = None,
) -> list[Function]:
    """The reward functions of a recipe.

    Args:
        entries: The recipe's entries.
        columns: The columns of the rows, which the functions may take; None: they are not compared.
        note: Called with a function's title, prompts, completions and rewards, each time that it has been called.

    Raises:
        RecipeError: A name is not `module:function`, its module or the function does not exist, or it takes other
            arguments or columns.
    """
    loaded = []
    for entry in entries:
        function = load_object(KEY, entry.function, example="my_rewards:politeness")
        _check_parameters(entry, function, columns)
        loaded.append(_checked(entry, function, several=len(entries) > 1, note=note))
    return loaded


def _checked(entry: RewardEntry, function: Callable[..., Any], *, several: bool, note: Any) -> Function:
    """several: Whether there are other functions, so that this one may give None, TRL's word for "does not apply"."""
    named = f"{KEY}: {entry.function}"

    @functools.wraps(function)
    def checked(*, completions: list[Any], **columns: Any) -> list[float | None]:
        try:
            rewards = function(completions=completions, **{**columns, **entry.arguments})
        except (Exception, SystemExit) as error:
            raise RecipeError(f"{named} failed: {one_line(error)}{place_of(error)}") from error
        if not isinstance(rewards, list) or len(rewards) != len(completions):
            count = f"{len(rewards)} values" if isinstance(rewards, list) else type(rewards).__name__
            raise RecipeError(
                f"{named} returned {count} for {len(completions)} completions; return a list with a number for each"
            )
        for i, reward in enumerate(rewards):
            if not _is_number(reward) and not (reward is None and several):
                raise RecipeError(
                    f"{named} returned {reward!r:.40} for completion {i} of {len(completions)}; return a finite number "
                    "for each"
                )
        if note is not None:
            note(entry.title, columns["prompts"], completions, rewards)
        return rewards

    checked.__name__ = entry.title  # TRL names the metrics by it
    return checked


def _check_parameters(entry: RewardEntry, function: Callable[..., Any], columns: Collection[str] | None) -> None:
    """Refuse a function that TRL cannot call by name with completions, any columns and the entry's arguments."""
    attribute = entry.function.rpartition(":")[2]
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        parameters = ()
    takes_rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_rest or not any(p.name == "completions" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise RecipeError(
            f"{KEY}: {entry.function}: define it as `def {attribute}(completions, **kwargs)`, which returns a number "
            "for each completion"
        )
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    for name in entry.arguments:
        if name not in named:
            raise RecipeError(f"{KEY}: {entry.function} has no argument {name}; it takes {', '.join(named)}")
    for name, parameter in named.items():
        needed = parameter.default is parameter.empty and name not in (*GIVEN, *entry.arguments)
        if needed and parameter.kind is parameter.KEYWORD_ONLY:
            raise RecipeError(f"{KEY}: {entry.function} needs {name}; set arguments: {{{name}: ...}} beside it")
        if needed and columns is not None and name not in columns:
            raise RecipeError(
                f"{KEY}: {entry.function} takes the column {name}, and the rows have {', '.join(columns)}; add it to "
                "the rows"
            )
    if entry.function.startswith("tigon.rewards:"):  # these take no completions too, and then check their arguments
        nothing: dict[str, Any] = {p.name: [] for p in named.values() if p.default is p.empty}
        try:
            function(**{**nothing, **entry.arguments})
        except Exception as error:
            words = str(error) if isinstance(error, RecipeError) else one_line(error)
            raise RecipeError(f"{KEY}: {entry.function}: {words}") from error


def _is_number(reward: object) -> bool:
    """Whether a reward is finite: of Python, NumPy, or a tensor with one element."""
    if isinstance(reward, torch.Tensor):
        return reward.numel() == 1 and bool(torch.isfinite(reward).all())
    return isinstance(reward, numbers.Real) and math.isfinite(reward)
