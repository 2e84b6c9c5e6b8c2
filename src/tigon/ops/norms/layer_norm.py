"""LayerNorm (Ba et al. 2016, arXiv 1607.06450, eq. 3-4).

    y = x̂ · w + b,   x̂ = (x - mean) · rstd,   rstd = 1 / sqrt(mean((x - mean)²) + eps)

Mean and rstd are computed and saved in fp32. If they were saved in bf16, the weight gradient would be off by 1 % at a
mean of ten standard deviations. The variance takes a second pass over x, because E[x²] - mean² cancels for such inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, check_dtype, first_order
from tigon.ops.norms import norm


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, _, mean, rstd = norm.norm_fwd(x, None, weight, bias, norm.norm_options(eps, 0.0, True, True))
        ctx.save_for_backward(x, weight, mean, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        options = norm.norm_backward_options(0.0, True, True, want_dx, want_dw, want_db)
        dx, dw, db = norm.norm_bwd(dy, None, x, weight, mean, rstd, options)
        return dx if want_dx else None, dw if want_dw else None, db if want_db else None, None


_layer_norm = Differentiable(
    "layer_norm", LayerNorm.apply, "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension: (x - mean) / sqrt(variance + eps) · weight + bias.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64, any strides; never written to.
        weight, bias: (H,) or None. Both have the same dtype, which may be wider than x's.
        eps: added to the variance.

    Returns:
        (..., H), in x's dtype.

    Raises:
        ShapeError: x is 0-dim, or weight or bias is not (H,) or is on another device than x.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64, or weight or bias is fp64 and x is not.
        OptionError: eps is not a number, is negative or is not finite.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_dtype(x, weight, bias)
    eps, _ = norm.check_scalars(eps)
    norm.check_parameter("weight", weight, x)
    norm.check_parameter("bias", bias, x)
    apply = _layer_norm if torch.compiler.is_compiling() else LayerNorm.apply
    return apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def layer_norm_oracle(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """PyTorch's layer_norm, computed in the wider dtype if the parameters' dtype differs from x's."""
    wide = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    options = dict(case.options)
    mean, weight_dtype = options.pop("mean", 0.0), options.pop("weight_dtype", dtype)
    has_weight, has_bias = options.pop("weight", True), options.pop("bias", True)
    width = case.shape[-1]
    return {
        "x": (torch.randn(*case.shape, device=device) + mean).to(dtype),
        "weight": randn(width, dtype=weight_dtype, device=device) if has_weight else None,
        "bias": randn(width, dtype=weight_dtype, device=device) if has_bias else None,
        **options,
    }


def _cost(x: Tensor, weight: Tensor | None = None, *_: object, **__: object) -> Cost:
    # forward x -> y; backward dy, x -> dx
    return Cost(moved_bytes=5 * x.nbytes, saved_bytes=x.nbytes + 8 * x.shape[:-1].numel())


LAYER_NORM = Op(
    name="layer_norm",
    call=layer_norm,
    oracle=layer_norm_oracle,
    make=_make,
    grads=("x", "weight", "bias"),
    case=Case(id="plain", shape=(3, 37, 64)),
    cost=_cost,
    errors={"fp32": 2.6e-06, "bf16": 2.0e-03, "fp16": 2.9e-04},
)
