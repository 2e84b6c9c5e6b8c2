"""Which kernels the model runs: transformers' own, tigon's, or Liger Kernel's for comparison."""

from __future__ import annotations

from tigon.techniques.records.condition import Condition, Exclusion
from tigon.techniques.records.technique import Declaration

OF_TIGON = frozenset({"tigon", "no-flce"})
"""Values of `model.kernels` that patch the model with tigon's ops."""

DECLARATION = Declaration(
    keys=("model.kernels",),
    labels={
        "model.kernels": lambda settings: (
            f"kernels {settings.model.kernels}" if settings.model.kernels != "tigon" else ""
        )
    },
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
