"""Conditions on choices, and choices that exclude each other, as data: the checks and the documents read them alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tigon.techniques.records.choices import Choices

# Text that YAML reads as it stands, also inside a list.
_PLAIN = re.compile(r"[\w./~+-]([\w./~+ =:-]*[\w./~+-])?")
_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: bool(value == wanted),
    "is not": lambda value, wanted: bool(value != wanted),
    "is one of": lambda value, wanted: value in wanted,
    "is not one of": lambda value, wanted: value not in wanted,
    "is at least": lambda value, wanted: value is not None and bool(value >= wanted),
    "is above": lambda value, wanted: value is not None and bool(value > wanted),
    "includes": lambda value, wanted: wanted in value,
    "starts with": lambda value, wanted: str(value).startswith(wanted),
}


@dataclass(frozen=True)
class Condition:
    """Compares a field of Choices with `wanted`. `test` is a key of `_TESTS`."""

    field: str
    test: str
    wanted: Any

    def holds(self, choices: Choices) -> bool:
        return _TESTS[self.test](getattr(choices, self.field), self.wanted)

    def text(self, name: str) -> str:
        """The condition as Markdown, with the field called `name`."""
        wanted = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)
        return f"`{name}` {self.test} {', '.join(f'`{yaml_word(value)}`' for value in wanted)}"

    def __str__(self) -> str:
        return self.text(self.field)


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Refuses choices for which every condition in `when` holds."""

    when: tuple[Condition, ...]
    reason: str
    """Why they do not go together."""
    instead: str
    """The recipe keys to set in their place."""
    source: str
    """The place where the reason was read or seen."""
    untraceable: bool = False
    """The planner cannot predict such a run either, because there would be nothing to train."""

    def applies(self, choices: Choices) -> bool:
        return all(condition.holds(choices) for condition in self.when)


@dataclass(frozen=True, kw_only=True)
class KeyExclusion:
    """Refuses a recipe in which `when` holds and the value of `key` passes the test.

    For keys that `Choices` lacks.
    """

    when: Condition
    key: str
    test: str
    wanted: Any
    reason: str
    """The whole message, with what to do instead."""

    def applies(self, choices: Choices, value: Any) -> bool:
        """value: the value of the key."""
        return self.when.holds(choices) and _TESTS[self.test](value, self.wanted)


@dataclass(frozen=True, kw_only=True)
class KeySwitch:
    """Recipe keys that have no effect unless the condition `on` holds. A recipe that sets one without it is refused."""

    keys: tuple[str, ...]
    on: Condition
    instead: str
    """The recipe line that makes the condition hold."""


def yaml_word(value: Any) -> str:
    """Formats a value as a recipe writes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_word, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if _PLAIN.fullmatch(str(value)) else json.dumps(str(value), ensure_ascii=False)
