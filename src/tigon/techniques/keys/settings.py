"""The keys of all techniques. A recipe is one, and so is the part of it that the planner searches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from tigon.errors import RecipeError
from tigon.techniques.keys.lora import LoraConfig
from tigon.techniques.keys.model import ModelKeys
from tigon.techniques.keys.section import CONFIG, Section, complaint
from tigon.techniques.keys.sharding import ShardingConfig
from tigon.techniques.keys.train import AUTO, TrainKeys

S = TypeVar("S", bound="Settings")
AUTO_PRECISION = "amp-bf16"  # `auto` on a GPU; every combination that amp-bf16 excludes is excluded with fp32 too


@dataclass(frozen=True, config=CONFIG)
class Settings:
    """The values of one run. Names such as `train.precision` are the recipe's keys."""

    train: TrainKeys = TrainKeys()
    model: ModelKeys = ModelKeys()
    lora: LoraConfig = LoraConfig()
    sharding: ShardingConfig = ShardingConfig()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """The settings of a run with these recipe keys. All others have their defaults, with values for `auto`."""
        return DEFAULT.having(values)

    def knows(self, key: str) -> bool:
        """Whether they decide this recipe key. A plan leaves out keys that change neither memory nor time."""
        return key in _PLANNED

    def value(self, key: str) -> Any:
        """The value of a recipe key."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def having(self: S, values: Mapping[str, Any]) -> S:
        """A copy with these values of recipe keys.

        Raises:
            RecipeError: A value is not allowed. The message begins with the key.
        """
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return replace(self, **{name: _with(name, getattr(self, name), given) for name, given in sections.items()})

    def resolved(self: S, *, precision: str | None = None) -> S:
        """A copy with values in place of `auto`.

        `train.checkpointing: auto` stands for `none` here; before a run on a GPU the trainer replaces it by a choice.

        Args:
            precision: The precision of this run; None: that of the recipe, or amp-bf16 for `auto`.
        """
        train = self.train
        checkpointing = "none" if train.auto_checkpointing else train.checkpointing
        chosen = precision or (AUTO_PRECISION if train.precision == AUTO else train.precision)
        return replace(self, train=replace(train, checkpointing=checkpointing, precision=chosen))


def _with(name: str, section: Section, given: Mapping[str, Any]) -> Any:
    try:
        return replace(section, **given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RecipeError(f"{name}.{first['loc'][0]} {complaint(type(section), first)}") from None


_DEFAULT = Settings()


def complaint_about(key: str, value: object) -> str | None:
    """The end of a sentence that begins with a technique's key and says what is wrong with a value; None if nothing."""
    try:
        _DEFAULT.having({key: value})
    except RecipeError as error:
        return str(error).removeprefix(f"{key} ")
    return None


KEYS: Mapping[str, Mapping[str, Any]] = {
    f"{section.name}.{f.name}": f.metadata
    for section in dataclasses.fields(Settings)
    for f in dataclasses.fields(getattr(_DEFAULT, section.name))
}
"""The techniques' keys, and what `section.key` declared for each."""
DEFAULT = _DEFAULT.resolved()
"""The defaults of a run, with values for `auto`."""
_PLANNED = frozenset(key for key, declared in KEYS.items() if declared["planned"])
