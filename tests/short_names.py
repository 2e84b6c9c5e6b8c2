"""Settings by the short names that the JSON of `tigon plan` has, such as `zero` and `lora_rank`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tigon.planner.render.json_names import KEY_OF
from tigon.techniques.keys.settings import Settings


def by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by recipe key. Names that are recipe keys stay."""
    return {KEY_OF.get(name, name): value for name, value in values.items()}


def settings_of(values: Mapping[str, Any]) -> Settings:
    return Settings.of(by_key(values))
