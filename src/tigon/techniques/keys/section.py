"""The base of a recipe's sections. pydantic checks types and limits; this file adds YAML's forms and the words.

A key is one typed field, declared by `key` with its default, help and limits. Recipes, `--set`, the flags of
`tigon plan`, the messages and the table of docs/recipe.md are made from that declaration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from pydantic import ConfigDict, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass
from typing_extensions import Unpack

T = TypeVar("T")

MAX_COUNT = 1_000_000_000  # for counts without another limit; larger values overflow in some library
MAX_NAME = 1024  # characters in a path or another name; Linux allows paths of 4,096 bytes
FP32_RANGE = (1.2e-38, 3.4e38)
CONFIG = ConfigDict(strict=True, extra="forbid")


class Limits(TypedDict, total=False):
    """The limits of a key's values, and what depends on it."""

    choices: Sequence[str]
    """The allowed values."""
    pattern: str
    """A regular expression for the allowed values, if `choices` does not list all of them."""
    note: str
    """The limits of a placeholder in `choices`, for messages."""
    minimum: float
    maximum: float
    above: float
    """A limit that the value must exceed."""
    prose: bool
    """The text may have line breaks."""
    invalid: Callable[[str], str | None]
    """Returns why a text is refused, as the end of a sentence; None if it is allowed."""
    traced: bool
    """A technique's key: a trace of the model depends on it."""
    planned: bool
    """A technique's key: a plan may depend on it, so the recipe of a plan names it. True if it is not given."""


def key(default: T, **limits: Unpack[Limits]) -> T:
    """Declare a recipe key. The docstring below it is its help, for the table of docs/recipe.md.

    Args:
        default: The default value; a tuple makes a list key.
        limits: What its values may be.
    """
    # pydantic reads ge, le and gt from the metadata of a dataclass field.
    metadata = {
        "ge": limits.get("minimum"),
        "le": limits.get("maximum"),
        "gt": limits.get("above"),
        "choices": tuple(limits.get("choices", ())),
        "regex": limits.get("pattern"),
        "note": limits.get("note", ""),
        "prose": limits.get("prose", False),
        "invalid": limits.get("invalid", lambda text: None),
        "traced": limits.get("traced", False),
        "planned": limits.get("planned", True),
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, config=CONFIG)
class Section:
    """A section of a recipe. Its subclasses are pydantic dataclasses, so `dataclasses.replace` checks values too."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_yaml_forms(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        return _of_yaml(value, hints(cls)[info.field_name], metadata_of(cls)[info.field_name])

    @field_validator("*", mode="after")
    @classmethod
    def _check_values(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        limits = metadata_of(cls)[info.field_name]
        for item in value if isinstance(value, tuple) else (value,):
            _check(item, limits)
        return value


_HINTS: dict[Any, Mapping[str, Any]] = {}
_METADATA: dict[Any, Mapping[str, Mapping[str, Any]]] = {}


def hints(section: type[Section]) -> Mapping[str, Any]:
    """Key -> its type."""
    if section not in _HINTS:
        _HINTS[section] = typing.get_type_hints(section)
    return _HINTS[section]


def metadata_of(section: type[Section]) -> Mapping[str, Mapping[str, Any]]:
    """Key -> what `key` declared."""
    if section not in _METADATA:
        _METADATA[section] = {f.name: f.metadata for f in dataclasses.fields(section)}
    return _METADATA[section]


def _of_yaml(value: object, hint: object, limits: Mapping[str, Any]) -> object:
    """Converts the forms in which YAML may give a value of this type."""
    targets = [option for option in _options(hint) if option is not types.NoneType]
    # YAML's word is null. A number cannot be called "none", as a text can.
    if len(targets) < len(_options(hint)) and str not in targets and value in ("none", "None"):
        return None
    if typing.get_origin(targets[0]) is tuple and value is not None:
        items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not items and limits["choices"]:
            raise ValueError(f"is empty; name one or more of {', '.join(limits['choices'])}")
        return items
    if float in targets and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 (without a dot) as text; an integer may be too large for a float
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    return value


def _options(hint: object) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _check(value: object, limits: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        _check_text(value, limits["prose"])
        if (
            not re.fullmatch(limits["regex"], value)
            if limits["regex"]
            else limits["choices"] and value not in limits["choices"]
        ):
            note = f", {limits['note']}" if limits["note"] else ""
            raise ValueError(f"is {shown(value)}; it must be {_wanted(limits['choices'])}{note}")
        if (why := limits["invalid"](value)) is not None:
            raise ValueError(f"is {shown(value)}; {why}")
    # Training uses fp32 at most. Smaller numbers would become 0 and larger ones infinite.
    if isinstance(value, float) and value != 0 and not FP32_RANGE[0] <= abs(value) <= FP32_RANGE[1]:
        raise ValueError(f"is {shown(value)}; fp32 holds numbers from {FP32_RANGE[0]} to {FP32_RANGE[1]}")


def _wanted(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _check_text(value: str, prose: bool) -> None:
    """Refuse text that is not a valid file name or that the run's files cannot store."""
    if not value.strip():
        raise ValueError(f"is {shown(value)}, empty; leave the key out, or give it a value")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"is {shown(value)}; remove the NUL or half character")
    if not prose and any(character < " " for character in value):
        raise ValueError(f"is {shown(value)}; remove its line breaks and tabs")
    if not prose and len(value) > MAX_NAME:
        raise ValueError(f"has {len(value)} characters; the limit is {MAX_NAME}")


def complaint(section: type[Section], error: Mapping[str, Any]) -> str:
    """The end of a sentence that begins with the key.

    Args:
        section: The section that refused a value.
        error: One of `ValidationError.errors()`.
    """
    name, value = error["loc"][0], error["input"]
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] in ("greater_than", "greater_than_equal", "less_than_equal", "finite_number"):
        return f"is {shown(value)}; it {limits_text(metadata_of(section)[name])}"
    targets = [option for option in _options(hints(section)[name]) if option is not types.NoneType]
    if typing.get_origin(targets[0]) is tuple:
        targets = list(_options(typing.get_args(targets[0])[0]))
    if typing.get_origin(targets[0]) is Mapping:
        return f"is a mapping such as {{name: value}}, not {article(kind(value))}"
    # only entries of data.source and post_training.rewards have two types: text, or a mapping
    return f"is {shown(value)}, {article(kind(value))}; it must be {article(type_name(targets[0]))}"


def limits_text(limits: Mapping[str, Any]) -> str:
    """The end of a sentence that states a value's limits; empty if the value has none."""
    if len(limits["choices"]) == 1:
        return f"must be {limits['choices'][0]}"
    if limits["choices"]:
        return "one of " + ", ".join(f"`{choice}`" for choice in limits["choices"])
    words = [
        f"above {limits['gt']:g}" if limits["gt"] is not None else "",
        f"at least {limits['ge']:,}" if limits["ge"] is not None else "",
        f"at most {limits['le']:,}" if limits["le"] is not None else "",
    ]
    return "must be " + " and ".join(word for word in words if word) if any(words) else ""


def type_name(hint: object) -> str:
    """A type by its name in YAML."""
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"{type_name(typing.get_args(hint)[0])} or list"
    types_by_name = (("text", str), ("integer", int), ("number", float), ("true/false", bool), ("null", types.NoneType))
    return next((name for name, one in types_by_name if hint is one), "mapping")


def shown(value: object) -> str:
    """A value as text for a message, at most 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


def kind(value: object) -> str:
    """The type of a value of YAML, in a word."""
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true/false value", "dict": "mapping"}
    name = type(value).__name__
    return names.get(name, "empty value" if value is None else name)


def article(noun: str) -> str:
    return noun if noun == "text" else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
