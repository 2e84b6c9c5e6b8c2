"""Which attention implementation the model runs."""

from __future__ import annotations

from tigon.techniques.keys.settings import Settings
from tigon.techniques.records.technique import Declaration


def sinks_flag(settings: Settings) -> bool | None:
    """The flag `attention_sinks` of `tigon.patch` for these settings. None leaves models without sinks alone."""
    return None if settings.model.attention_sinks else False


DECLARATION = Declaration(keys=("model.attention", "model.attention_sinks"))
