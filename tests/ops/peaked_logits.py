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


class Fp32Logits(torch.autograd.Function):
    """x @ weight.T + bias in fp32. The gradient is rounded to 16 bits before its products, as in any op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        logits = x.float() @ weight.float().t()
        return logits if bias is None else logits + bias.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight, bias = ctx.saved_tensors
        g = gradient.to(x.dtype).float().flatten(0, -2)
        dw = g.t() @ x.float().flatten(0, -2)
        return (
            (g @ weight.float()).view(x.shape).to(x.dtype), dw.to(weight.dtype),
            None if bias is None else g.sum(0).to(bias.dtype),
        )  # fmt: skip


def of_fp32_logits(op: Op, inputs: dict[str, Any], upstream: list[Tensor]) -> Result:
    """The unfused formula with logits in fp32."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return Fp32Logits.apply(x, weight, bias)

    with patch.object(torch.nn.functional, "linear", linear):
        return run(op.oracle, op, with_leaves(op, inputs), upstream)
