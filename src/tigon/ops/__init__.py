"""The fused ops as public functions, and `OPS`, which maps each op's name to its record."""

from __future__ import annotations

from tigon.ops._op import Case, Cost, Op
from tigon.ops.glu import GEGLU, SWIGLU, geglu, swiglu
from tigon.ops.layer_norm import LAYER_NORM, layer_norm
from tigon.ops.losses.cross_entropy import CROSS_ENTROPY, cross_entropy
from tigon.ops.losses.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy, prepare_targets
from tigon.ops.losses.multi_head import (
    MULTI_HEAD_LINEAR_CROSS_ENTROPY,
    multi_head_linear_cross_entropy,
)
from tigon.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, add_rms_norm, rms_norm
from tigon.ops.rope import ROPE, rope

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        RMS_NORM,
        ADD_RMS_NORM,
        LAYER_NORM,
        ROPE,
        SWIGLU,
        GEGLU,
        CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY,
        MULTI_HEAD_LINEAR_CROSS_ENTROPY,
    )
}

__all__ = [
    "OPS",
    "Case",
    "Cost",
    "Op",
    "add_rms_norm",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "multi_head_linear_cross_entropy",
    "prepare_targets",
    "rms_norm",
    "rope",
    "swiglu",
]
