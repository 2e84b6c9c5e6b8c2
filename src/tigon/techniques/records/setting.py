"""A setting: all that recipes, `tigon plan`, the planner and the documents need to know about one field of Choices."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tigon.techniques.records.choices import Choices

Search = Literal["run", "placement", "recomputation", "long samples", "split"]
"""How the planner treats a setting that was left free.

run             tries every candidate with every candidate of the other `run` settings
placement       tries the rows of `sharding.PLACEMENTS`, which set several such settings together
recomputation   tries the candidates within one run, fastest first, until a batch fits
long samples    takes the first candidate after the last recomputation, if samples are long
split           divides the batch into micro-batches
"""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The flag of `tigon plan` for a setting."""

    name: str
    """Without the dashes."""
    help: str
    metavar: str | None = None
    words: tuple[str, ...] = ()
    """The values that the planner can predict, if they are fewer than the recipe's."""
    implies: tuple[tuple[str, Any], ...] = ()
    """(field, value) of other settings that the flag sets unless their own flags are given."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of Choices."""

    field: str
    key: str
    """The recipe key, `section.name`."""
    help: str
    """The key's meaning in docs/train.md."""
    words: tuple[str, ...] = ()
    """The values that it takes, if they can be listed."""
    pattern: str | None = None
    """A regular expression for the values, if `words` holds a placeholder such as `every-N`."""
    words_note: str = ""
    """The limits of that placeholder, for messages."""
    minimum: float | None = None
    maximum: float | None = None
    invalid: Callable[[str], str | None] = lambda text: None
    """(a value, or an item of a list) -> why it is refused, as the end of a sentence; None if it is allowed."""
    recipe_word: str | None = None
    """A further value that only recipes know; it is their default, and the trainer replaces it by one of `words`."""
    recipe_default: Any = None
    """A recipe's default, if it is not that of `Choices`."""
    flag: Flag | None = None
    traced: bool = False
    """A trace of the model depends on it."""
    search: Search | None = None
    """None: the planner changes the setting only on request."""
    candidates: Callable[[Any], tuple[Any, ...]] = lambda config: ()
    """(transformers config) -> the values that the search tries, best first."""
    always_written: bool = False
    """A plan's recipe names it even if it has its default, to replace the value of the recipe it is applied to."""
    label: Callable[[Choices], str] = lambda choices: ""
    """Its part of the few words that describe a run; empty if it changes nothing."""

    @property
    def default(self) -> Any:
        return _fields()[self.field].default

    @property
    def hint(self) -> Any:
        """Its type."""
        return _hints()[self.field]

    def problem(self, value: Any) -> str | None:
        """Returns what the value should have been, as the end of a sentence, or None if it is allowed."""
        if value is None and self.default is None:
            return None
        items = value if isinstance(value, tuple) else (value,)
        if self.words:
            allowed = all(re.fullmatch(self.pattern, item) if self.pattern else item in self.words for item in items)
            note = f", {self.words_note}" if self.words_note else ""
            if not allowed:
                return f"choose one of {', '.join(self.words)}{note}"
            return next(filter(None, map(self.invalid, items)), None)
        if self.minimum is None:
            return None
        if not isinstance(value, (int, float) if self.hint is float else int) or isinstance(value, bool):
            return "it must be a number" if self.hint is float else "it must be a whole number"
        if value < self.minimum:
            return f"it must be at least {self.minimum}"
        return f"it must be at most {self.maximum}" if self.maximum is not None and value > self.maximum else None


@functools.cache
def _fields() -> Mapping[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Choices)}


@functools.cache
def _hints() -> Mapping[str, Any]:
    return typing.get_type_hints(Choices)
