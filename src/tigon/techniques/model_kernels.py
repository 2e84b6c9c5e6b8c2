"""Which kernels the model runs: transformers' own, tigon's, or Liger Kernel's for comparison."""

from __future__ import annotations

from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration

OF_TIGON = frozenset({"tigon", "no-flce"})
"""Values of `model.kernels` that patch the model with tigon's ops."""


def sinks_flag(settings: Settings) -> bool | None:
    """The flag `attention_sinks` of `tigon.patch` for these settings. None leaves models without sinks alone."""
    return None if settings.model.attention_sinks else False


DECLARATION = Declaration(
    labels={"model.kernels": "kernels {}"},
    exclusions=(
        Exclusion(
            when=(Condition("model.kernels", "is", "liger"), Condition("sharding.zero", "is", 3)),
            reason="Liger reads the head's weight directly instead of calling its module, and stage 3 has left that "
            "weight empty",
            instead="model.kernels: tigon, or sharding.zero: 2",
            source="github.com/linkedin/Liger-Kernel/issues/767, issues/1048",
        ),
    ),
)
