"""Norms, gated linear units, rotary embeddings and experts under Liger's names.

Two options are accepted and have no effect: `in_place`, because tigon never writes over an input or an incoming
gradient, and `row_mode`, because tigon chooses its launch itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.rows import form, function
from tigon.errors import OptionError, ShapeError
from tigon.ops.norms.rms_norm import Casting

# In Liger, "none" computes in x's dtype throughout. Here its statistics are fp32, which is more accurate.
CASTINGS: dict[str | int, Casting] = {
    "llama": "llama",
    "gemma": "gemma",
    "none": "llama",
    0: "llama",
    1: "gemma",
    -1: "llama",
}


def _casting_of(mode: str | int) -> Casting:
    """tigon's casting for Liger's name or number."""
    if mode not in CASTINGS:
        raise OptionError(f"casting_mode={mode!r} is not known; choose llama, gemma or none.")
    return CASTINGS[mode]


def rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:
    """`tigon.rms_norm` of X (..., H) with weight W (H,), in X's dtype."""
    return ops.rms_norm(X, W, eps, offset=offset, casting=_casting_of(casting_mode)).to(X.dtype)


def fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """`tigon.add_rms_norm` of input X and residual R: (normed, X + R)."""
    Y, S = ops.add_rms_norm(X, R, W, eps, offset=offset, casting=_casting_of(casting_mode))
    return Y.to(X.dtype), S


def swiglu(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """silu(gate_multiplier · a) · b · down_multiplier."""
    c = ops.swiglu(a if gate_multiplier == 1.0 else a * gate_multiplier, b)
    return c if down_multiplier == 1.0 else c * down_multiplier


def packed_swiglu(y: Tensor, in_place: bool = False) -> Tensor:
    """silu(gate) · up for a packed (..., 2F) = [gate | up]."""
    return ops.swiglu(y)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`tigon.rope` with half-split tables (T, R), (B, T, R) or 4-D with a dimension for heads.

    q and k are (B, heads, T, D), or (B, T, heads, D) with unsqueeze_dim=2. `position_ids` is ignored, as in
    transformers, because the tables already belong to the positions. A table that is wider than the rotated width holds
    each angle twice; the start of the first copy is used.
    """
    if cos.ndim == 4:
        cos, sin = cos.squeeze(unsqueeze_dim), sin.squeeze(unsqueeze_dim)
    half = (min(cos.shape[-1], q.shape[-1]) if rotary_dim is None else rotary_dim) // 2
    if cos.shape[-1] != 2 * half:
        cos, sin = (torch.cat((table[..., :half], table[..., :half]), -1) for table in (cos, sin))
    return ops.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`tigon.rope` of q and k (B, heads, T, D) with cos and sin (3, B, T, D) for time, height and width.

    `mrope_section` has the number of angles of each of the three; the sum is D / 2.
    """
    half = q.shape[-1] // 2
    time, height = mrope_section[:2]
    sections = (time, height, half - time - height)
    if cos.ndim != 4 or cos.shape[0] != 3 or min(sections) < 0:
        raise ShapeError(
            f"cos has the shape {tuple(cos.shape)} and mrope_section is {list(mrope_section)}; expected (3, B, T, "
            f"{2 * half}) and sections whose sum is {half}."
        )
    tables = []
    for table in (cos, sin):
        parts = table[..., :half].split(sections, -1)
        one = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)
        tables.append(torch.cat((one, one), -1))
    return ops.rope(q, k, *tables, unsqueeze_dim=unsqueeze_dim)


LigerRMSNormFunction = function("LigerRMSNormFunction", rms_norm)
LigerFusedAddRMSNormFunction = function("LigerFusedAddRMSNormFunction", fused_add_rms_norm)
LigerLayerNormFunction = function("LigerLayerNormFunction", form(ops.layer_norm, "X:x W:weight! B:bias! eps!"))
LigerSiLUMulFunction = function("LigerSiLUMulFunction", swiglu)
LigerFusedGateUpSiLUMulFunction = function("LigerFusedGateUpSiLUMulFunction", packed_swiglu)
LigerGELUMulFunction = function("LigerGELUMulFunction", form(ops.geglu, "a:gate b:up!"))
LigerRopeFunction = function("LigerRopeFunction", rope)
LigerQwen2VLMRopeFunction = function("LigerQwen2VLMRopeFunction", qwen2vl_mrope)
LigerFusedMoEFunction = function(
    "LigerFusedMoEFunction",
    form(ops.experts, "x:hidden! gate_up_proj:gate_up! down_proj:down! top_k_index! top_k_weights!"),
)

liger_rms_norm = form(rms_norm, "X W eps offset casting_mode in_place")
liger_fused_add_rms_norm = form(fused_add_rms_norm, "X R W eps offset casting_mode in_place=True")
liger_layer_norm = form(ops.layer_norm, "X:x W:weight! B:bias! eps!")
liger_swiglu = form(swiglu, "a b")
liger_geglu = form(ops.geglu, "a:gate b:up!")
liger_rope = liger_rotary_pos_emb = rope
liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb = qwen2vl_mrope
