"""What excludes what, and what has no effect without what, as data: the checks and the documents read them alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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


class Values(Protocol):
    """The values of recipe keys: a recipe, or the settings of a plan."""

    def knows(self, key: str) -> bool:
        """Whether it decides the key."""
        ...

    def value(self, key: str) -> Any: ...


@dataclass(frozen=True)
class Condition:
    """Compares the value of a recipe key with `wanted`. `test` is a key of `_TESTS`."""

    key: str
    test: str
    wanted: object

    def holds(self, settings: Values) -> bool:
        """False for a key that these settings do not decide: a plan has no `train.max_grad_norm`."""
        return settings.knows(self.key) and _TESTS[self.test](settings.value(self.key), self.wanted)

    def __str__(self) -> str:
        """The condition as Markdown."""
        wanted = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)
        if not wanted:
            return f"`{self.key}` {self.test} `[]`"
        return f"`{self.key}` {self.test} {', '.join(f'`{yaml_word(value)}`' for value in wanted)}"


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Refuses settings for which every condition in `when` holds."""

    when: tuple[Condition, ...]
    reason: str
    """Why they do not go together."""
    instead: str
    """The recipe keys to set in their place."""
    source: str
    """The place where the reason was read or seen."""
    untraceable: bool = False
    """The planner cannot predict such a run either, because there would be nothing to train."""

    def applies(self, settings: Values) -> bool:
        return all(condition.holds(settings) for condition in self.when)


@dataclass(frozen=True)
class Switch:
    """Recipe keys that have no effect unless `on` returns True. A recipe that sets one without it is refused."""

    keys: tuple[str, ...]
    key: str
    """The key that turns their technique on."""
    on: Callable[[Any], bool]
    """(the recipe with values in place of `auto`) -> whether they have an effect."""
    instead: str
    """The recipe line that makes the keys take effect."""


def yaml_word(value: object) -> str:
    """Formats a value as a recipe writes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_word, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if _PLAIN.fullmatch(str(value)) else json.dumps(str(value), ensure_ascii=False)
