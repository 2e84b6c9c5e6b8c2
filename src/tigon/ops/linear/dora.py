"""DoRA (Liu et al. 2024, arXiv 2402.09353): a linear layer with an adapter, whose rows have trained lengths m:

    y = m / ‖W + s B A‖ · (x Wᵀ + s · (x Aᵀ) Bᵀ) + bias          the norm is of each row

The backward pass treats the norms as constants (section 4.3 of the paper). They need no dense B A: for a row w of W and
a row b of B, ‖w + s b A‖² = ‖w‖² + 2 s b · (A w) + s² b (A Aᵀ) bᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops.dispatch import Context, first_order, no_autocast
from tigon.ops.linear.lora_linear import Weight, lora_linear, scaled_product

# N tokens, H input width, F output width, R rank.

ROWS = 4096
"""Rows of the gradient of the scale that are summed at a time, because the product is in fp32."""


@torch.no_grad()
def row_norms(weight: Weight, lora_a_RH: Tensor, lora_b_FR: Tensor, scaling: float) -> Tensor:
    """The norm of each row of W + s B A, (F,), in the dtype of A, as PEFT's."""
    weight_FH = weight() if callable(weight) else weight
    wide = torch.promote_types(lora_a_RH.dtype, torch.float32)
    a_RH, b_FR = lora_a_RH.to(wide), lora_b_FR.to(wide)
    with no_autocast(weight_FH):
        squares_F = torch.linalg.vector_norm(weight_FH, dim=1, dtype=wide).square_()
        cross_FR = scaled_product(weight_FH, lora_a_RH.to(weight_FH.dtype).t(), b_FR, 2 * scaling)
        squares_F += (b_FR * cross_FR.add_(b_FR @ (a_RH @ a_RH.t()), alpha=scaling**2)).sum(1)
    norms_F: Tensor = squares_F.clamp_min_(0).sqrt_().to(lora_a_RH.dtype)
    return norms_F


class ScaledColumns(torch.autograd.Function):
    """y · scale in y's dtype. The gradient of the scale is summed in fp32 or wider."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, scale_F: Tensor) -> Tensor:
        ctx.save_for_backward(y, scale_F)
        return torch.mul(y, scale_F, out=torch.empty_like(y))

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, scale_F = ctx.saved_tensors
        want_y, want_scale = ctx.needs_input_grad
        d_y = torch.mul(dy, scale_F, out=torch.empty_like(dy)) if want_y else None
        d_scale: Any = None
        if want_scale:
            wide = torch.promote_types(y.dtype, torch.float32)
            parts = zip(dy.flatten(0, -2).split(ROWS), y.flatten(0, -2).split(ROWS), strict=True)
            d_scale = sum((a.to(wide) * b).sum(0) for a, b in parts).to(scale_F.dtype)
        return d_y, d_scale


def dora_linear(
    x: Tensor,
    weight: Weight,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    *,
    scaling: float,
    bias: Tensor | None = None,
    fp8: str | None = None,
) -> Tensor:
    """As `lora_linear`, with rows of the lengths `magnitude` (F,)."""
    y = lora_linear(x, weight, lora_a, lora_b, scaling=scaling, fp8=fp8)
    scale_F = magnitude / row_norms(weight, lora_a, lora_b, scaling)
    scaled: Tensor = (y * scale_F).to(y.dtype) if torch.compiler.is_compiling() else ScaledColumns.apply(y, scale_F)
    return scaled if bias is None else scaled + bias.to(scaled.dtype)
