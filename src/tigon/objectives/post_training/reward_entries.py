"""The entries of `post_training.rewards`: a function, its weight, and its arguments. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tigon.errors import RecipeError

KEY = "post_training.rewards"
_EXAMPLE = "{function: my_rewards:polite, weight: 2}"


@dataclass(frozen=True)
class RewardEntry:
    """A reward function of a recipe."""

    function: str
    """`module:function`."""
    title: str
    """Its name in metrics and charts."""
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the function gets by name, besides completions and columns."""


def entries_of(given: Sequence[str | Mapping[str, Any]]) -> tuple[RewardEntry, ...]:
    """The entries of a recipe. Functions of one name get their module's name too, so that metrics tell them apart.

    Raises:
        RecipeError: An entry has another form, or two entries would have the same name.
    """
    read = [_read({"function": entry} if isinstance(entry, str) else entry) for entry in given]
    short = Counter(str(entry["function"]).rpartition(":")[2] for entry in read)
    entries = []
    for entry in read:
        function = entry["function"]
        name = function.rpartition(":")[2]
        title = entry.pop("name", name if short[name] == 1 else function)
        entries.append(RewardEntry(title=title, **entry))
    twice = [title for title, count in Counter(entry.title for entry in entries).items() if count > 1]
    if twice:
        raise RecipeError(f"{KEY}: two entries have the name {twice[0]}; give each its own, as in {{name: short}}")
    return tuple(entries)


def _read(entry: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, tuple[type, ...]] = {
        "function": (str,), "name": (str,), "weight": (float, int), "arguments": (dict,)
    }  # fmt: skip
    for name, value in entry.items():
        if name not in kinds:
            raise RecipeError(f"{KEY}: {name} is not a key of a reward; its keys are {', '.join(kinds)}")
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            wanted = {"weight": "a number", "arguments": "a mapping such as {most: 200}"}.get(name, "text")
            raise RecipeError(f"{KEY}: {name} is {value!r}; it must be {wanted}")
    if "function" not in entry:
        raise RecipeError(f"{KEY}: an entry lacks the key function; write {_EXAMPLE}")
    if not math.isfinite(entry.get("weight", 1)) or not entry.get("weight", 1):
        raise RecipeError(f"{KEY}: weight is {entry['weight']}; it must be a finite number other than 0")
    return {**entry, "weight": float(entry.get("weight", 1))}
