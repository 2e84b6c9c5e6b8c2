"""A condition on Choices, as data: the check and the documents read the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tigon.techniques.choices import RECIPE_KEYS, Choices

_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: bool(value == wanted),
    "is not": lambda value, wanted: bool(value != wanted),
    "is one of": lambda value, wanted: value in wanted,
    "is not one of": lambda value, wanted: value not in wanted,
    "is at least": lambda value, wanted: value is not None and bool(value >= wanted),
    "starts with": lambda value, wanted: str(value).startswith(wanted),
}


@dataclass(frozen=True)
class Condition:
    """`field` of Choices, compared with `wanted` by one of the words of `_TESTS`."""

    field: str
    test: str
    wanted: Any

    def holds(self, choices: Choices) -> bool:
        return _TESTS[self.test](getattr(choices, self.field), self.wanted)

    def __str__(self) -> str:
        wanted = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)
        return f"`{RECIPE_KEYS[self.field]}` {self.test} {', '.join(f'`{yaml_word(value)}`' for value in wanted)}"


def yaml_word(value: Any) -> str:
    """A value as a recipe writes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
