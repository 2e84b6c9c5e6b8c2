"""The names of the techniques' keys in the JSON of `tigon plan`, which scripts read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tigon.techniques.keys.settings import DEFAULT, KEYS, Settings

_NAMES: Mapping[str, str] = {
    "lora.quantize": "quantized",
    "lora.quantize_to": "quantize_to",
    "sharding.sequence": "sequence_shards",
    "sharding.tensor": "tensor_shards",
    "train.gradient_accumulation": "accumulate",
    "train.gradient_accumulation_fusion": "accumulation_fusion",
}


def _name(key: str) -> str:
    section, _, name = key.partition(".")
    return _NAMES.get(key, f"lora_{name}" if section == "lora" else name)


KEY_OF: Mapping[str, str] = {_name(key): key for key in KEYS if DEFAULT.knows(key)}
"""Name in the JSON -> recipe key."""


def settings_mapping(settings: Settings) -> dict[str, Any]:
    """The settings as one flat mapping."""
    return {name: settings.value(key) for name, key in KEY_OF.items()}
