"""Which kernels the model runs: transformers' own, tigon's, or Liger Kernel's for comparison."""

from __future__ import annotations

from tigon.techniques.records.condition import Condition, Exclusion
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration

OF_TIGON = frozenset({"tigon", "no-flce"})
"""Values of `model.kernels` that patch the model with tigon's ops."""

# The planner changes the kernels only on request, because the others are slower.
_KERNELS = Setting(
    field="kernels", key="model.kernels",
    help="`tigon`: patch every op; `no-flce`: patch all ops except the linear cross entropy; `none`: do not patch; "
    "`liger`: use Liger Kernel instead, for comparison.",
    words=("none", "no-flce", "tigon", "liger"),
    flag=Flag(name="kernels", help="none, no-flce, tigon or liger."),
    traced=True, always_written=True,
    label=lambda choices: f"kernels {choices.kernels}" if choices.kernels != "tigon" else "",
)  # fmt: skip

DECLARATION = Declaration(
    settings=(_KERNELS,),
    exclusions=(
        Exclusion(
            when=(Condition("kernels", "is", "liger"), Condition("zero", "is", 3)),
            reason="Liger reads the head's weight directly instead of calling its module, and stage 3 has left that "
            "weight empty",
            instead="model.kernels: tigon, or sharding.zero: 2",
            source="github.com/linkedin/Liger-Kernel/issues/767, issues/1048",
        ),
    ),
)
