"""Inputs of heads whose logits are peaked, and the unfused formula with logits in fp32."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from helpers import Result, make, run, with_leaves
from tigon.ops import Case, Op

DEVIATION = 2.0
"""The standard deviation of the logits of the records' cases."""
FACTOR = 3.0
"""The op's limit, over the error of the unfused formula with fp32 logits. A few tokens and columns decide both errors,
which are rounding alone; logits in 16 bits exceed it tenfold."""


def peaked(op: Op, case: Case, dtype: torch.dtype, device: torch.device, deviation: float) -> dict[str, Any]:
    """The inputs of a case with larger weights of the heads."""
    return {
        name: (value * (deviation / DEVIATION)).to(value.dtype) if "weight" in name and _is_head(value) else value
        for name, value in make(op, case, dtype, device).items()
    }


def _is_head(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two 16-bit matrices, with an fp32 result.

    A GPU's matrix unit adds up with fewer bits than fp32 has, about four times as inexactly as an fp32 product (H100,
    2,048 terms). No head can be more exact than that unit, so the formula uses it too.
    """
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class Fp32Logits(torch.autograd.Function):
    """x @ weight.T + bias in fp32. The gradient is rounded to 16 bits before its products, as in any op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        logits = fp32_product(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)
        return logits if bias is None else logits + bias.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight, bias = ctx.saved_tensors
        g = gradient.to(x.dtype).flatten(0, -2)
        dw = fp32_product(g.t(), x.flatten(0, -2))
        return (
            fp32_product(g, weight).view(x.shape).to(x.dtype), dw.to(weight.dtype),
            None if bias is None else g.float().sum(0).to(bias.dtype),
        )  # fmt: skip


def of_fp32_logits(op: Op, inputs: dict[str, Any], upstream: list[Tensor]) -> Result:
    """The unfused formula with logits in fp32."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return Fp32Logits.apply(x, weight, bias)

    with patch.object(torch.nn.functional, "linear", linear):
        return run(op.oracle, op, with_leaves(op, inputs), upstream)
