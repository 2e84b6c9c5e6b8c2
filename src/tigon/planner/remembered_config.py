"""The config of a model that an earlier plan has loaded, without importing transformers, which takes a second or two.

The plan of a known model reads a few plain values of its config: sizes, numbers of heads, whether embeddings are tied.
The disk cache holds these, and transformers is imported for any other use: another attribute, or a trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tigon._files import read_text
from tigon.models.loading.config import load_config
from tigon.models.loading.presets import PRESETS
from tigon.planner.trace import disk_cache

_PLAIN = (bool, int, float, str, type(None))


class RememberedConfig:
    """Stands for `load_config(name)`."""

    def __init__(self, name: str, stored: Mapping[str, Any]) -> None:
        self._name, self._loaded = name, None
        self._values: Mapping[str, Any] = stored["values"]
        self._json: str = stored["json"]
        self.module: str = stored["module"]
        """The module of the config's class."""

    def real(self) -> Any:
        """The transformers config."""
        if self._loaded is None:
            self._loaded = load_config(self._name)
        return self._loaded

    def to_json_string(self, *, use_diff: bool = True) -> str:
        """As of a transformers config."""
        return str(self.real().to_json_string()) if use_diff else self._json

    def get_text_config(self) -> RememberedConfig:
        """The config itself, which describes a language model; others are not remembered."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for such names before there are values
            raise AttributeError(name)
        return self._values[name] if name in self._values else getattr(self.real(), name)


def remembered_config(name: str) -> Any:
    """`load_config(name)`, or a `RememberedConfig` in its place. A hub id is always loaded.

    Raises:
        UsageError: as `load_config`.
    """
    question = question_of(name)
    if question is None:
        return load_config(name)
    try:
        return RememberedConfig(name, disk_cache.read("config", question))
    except (TypeError, LookupError):  # none, or another program's
        pass
    config = load_config(name)
    if config.get_text_config() is config and type(config).__module__.startswith("transformers."):
        values = {key: value for key, value in vars(config).items() if isinstance(value, _PLAIN)}
        text = config.to_json_string(use_diff=False)
        stored = {"values": values, "json": text, "module": type(config).__module__}
        disk_cache.write("config", question, stored)
    return config


def real_config(config: Any) -> Any:
    """The transformers config behind a `RememberedConfig`; any other config unchanged."""
    return config.real() if isinstance(config, RememberedConfig) else config


def question_of(name: str) -> str | None:
    """Text that holds all that a model's config is made of; None if that cannot be known without the network."""
    if name in PRESETS:
        return json.dumps(["preset", name])  # the presets are part of tigon's sources
    path = Path(name)
    try:
        file = path / "config.json" if path.is_dir() else path
        return json.dumps(["file", str(file.absolute()), read_text(file)]) if name and file.exists() else None
    except (OSError, UnicodeDecodeError):  # load_config says what is wrong
        return None
