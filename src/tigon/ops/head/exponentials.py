"""The two products of bf16 logits that have left their own product as exponentials (`chunks.py`: `exp_logits`).

Chips with a `logits_tile` in kernels/chips.py do this (kernels/linear_cross_entropy.py). Each row of exponentials still
lacks a factor, which is applied to dX, and to X before dW's product. It also lacks the label's own term, which is added
to both in fp32. Label smoothing, a trained bias, an adapter, entropy and predictions need the pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops import dispatch
from tigon.ops.dispatch import Primitive, no_autocast
from tigon.ops.head.inputs import starts_aligned
from tigon.ops.losses.cross_entropy_rows import scale_rows
from tigon.ops.products import product_into

# N tokens, C tokens of a chunk, H hidden, V vocabulary.


def _label_term(factors: Tensor, target: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(c, label) per row; both are 0 if the label is ignored or invalid."""
    valid = (target >= 0) & (target < vocab)
    return torch.where(valid, factors[1], 0.0), torch.where(valid, target, 0).long()


def _scaled_product(e_NV: Tensor, weight_VH: Tensor, factors: Tensor, target: Tensor) -> Tensor:
    """f ⊙ (E W) + c ⊙ W[y], by one kernel if its tiles fill the chip, else by the vendor's product in fp32."""
    kernel = dispatch.uses_kernel(e_NV) and weight_VH.stride(1) == 1
    if kernel and starts_aligned(e_NV) and starts_aligned(weight_VH):
        from tigon.kernels.exponential_products import scaled_product, suits_scaled_product

        tile = dispatch.planned_chip(e_NV).logits_tile  # type: ignore[union-attr]
        if suits_scaled_product(e_NV.shape[0], weight_VH.shape[1], tile, e_NV.device.index):
            return scaled_product(e_NV, weight_VH, factors, target, tile)  # type: ignore[no-any-return]
    product = e_NV.new_empty((e_NV.shape[0], weight_VH.shape[1]), dtype=factors.dtype)
    product_into(e_NV, weight_VH, product, accumulate=False)
    if kernel:
        from tigon.kernels.exponential_products import scaled_rows

        return scaled_rows(product, weight_VH, factors, target)  # type: ignore[no-any-return]
    c, labels = _label_term(factors, target, weight_VH.shape[0])
    return (product * factors[0].unsqueeze(1) + weight_VH[labels] * c.unsqueeze(1)).to(e_NV.dtype)


def hidden_grad(
    e_NV: Tensor, weight_VH: Tensor, factors: Tensor, target: Tensor, index: Tensor | None, rows: int
) -> Tensor:
    """f ⊙ (E W) + c ⊙ W[y], rounded once, at the positions `index` of `rows` rows."""
    with no_autocast(e_NV):
        dx = _scaled_product(e_NV, weight_VH, factors, target)
    return dx if index is None else dx.new_zeros((rows, dx.shape[1])).index_copy_(0, index, dx)


def _exp_hidden_grad_fake(
    e_NV: Tensor, weight_VH: Tensor, factors: Tensor, target: Tensor, index: Tensor | None, rows: int
) -> Tensor:
    return e_NV.new_empty((rows, weight_VH.shape[1]))


exp_hidden_grad = Primitive(
    "linear_cross_entropy_exp_hidden_grad",
    "(Tensor e, Tensor weight, Tensor factors, Tensor target, Tensor? index, SymInt rows) -> Tensor",
    composite=hidden_grad,
    fake=_exp_hidden_grad_fake,
)


def weight_grad_into(
    e_CV: Tensor, x_CH: Tensor, factors: Tensor, target: Tensor, dw_VH: Tensor, accumulate: bool
) -> None:
    """dW (+)= Eᵀ (f ⊙ X), then adds c_i · x_i to row y_i."""
    scaled = scale_rows.body(x_CH)(x_CH, factors[0], None, x_CH.shape[0], x_CH.dtype)
    product_into(e_CV.t(), scaled, dw_VH, accumulate)
    if dispatch.uses_kernel(e_CV):
        from tigon.kernels.exponential_products import add_label_rows

        add_label_rows(x_CH if x_CH.stride(1) == 1 else x_CH.contiguous(), target, factors, dw_VH)
        return
    c, labels = _label_term(factors, target, dw_VH.shape[0])
    # In fp32 and rounded once, as in the kernel.
    touched = dw_VH.to(factors.dtype).index_add_(0, labels, x_CH.to(factors.dtype) * c.unsqueeze(1))
    dw_VH.copy_(touched)


def _exp_weight_grad_body(e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor) -> Tensor:
    dw_VH = x_NH.new_empty((e_NV.shape[1], x_NH.shape[1]))
    with no_autocast(e_NV):
        weight_grad_into(e_NV, x_NH, factors, target, dw_VH, accumulate=False)
    return dw_VH


def _exp_weight_grad_fake(e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor) -> Tensor:
    torch.empty_like(x_NH)
    return x_NH.new_empty((e_NV.shape[1], x_NH.shape[1]))


exp_weight_grad = Primitive(
    "linear_cross_entropy_exp_weight_grad",
    "(Tensor e, Tensor hidden, Tensor factors, Tensor target) -> Tensor",
    composite=_exp_weight_grad_body,
    fake=_exp_weight_grad_fake,
)


def add_exp_weight_grad(e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor, grad_VH: Tensor) -> None:
    """As `exp_weight_grad`, added to `grad`. It is not an operator, because compilers never see it."""
    if (trace := dispatch.planned()) is not None:
        torch.empty_like(x_NH)  # the scaled rows
        trace.count(flops=2.0 * e_NV.numel() * x_NH.shape[1], dtype=e_NV.dtype)
        return
    with no_autocast(e_NV):
        weight_grad_into(e_NV, x_NH, factors, target, grad_VH, accumulate=True)
