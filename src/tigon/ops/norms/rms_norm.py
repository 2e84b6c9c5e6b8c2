"""RMSNorm and add + RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4).

    y = x̂ · (w + offset),   x̂ = s · rstd,   rstd = 1 / sqrt(mean(s²) + eps),   s = x  or  x + residual

Statistics are fp32 for every input dtype. `casting` says where the normalised value is rounded. Model families differ
only in this (the 191 RMSNorm classes of transformers 5.23 have five distinct bodies):

    llama    x̂ is rounded to x's dtype, then multiplied by w; the result has the promoted dtype of x and w
    gemma    x̂ · (w + offset) in fp32, rounded once, to x's dtype; Gemma's offset is 1, Gemma 4's and OLMo-2's is 0
    fp32     another name for gemma's order, for families that do not add an offset

The op saves x (or the sum) and rstd for the backward.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops import known_amax
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, check_dtype, first_order
from tigon.ops.norms import norm

Casting = Literal["llama", "gemma", "fp32"]
# casting -> whether the product with the weight is computed in fp32
_FP32_WEIGHT = {"llama": False, "gemma": True, "fp32": True}


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, options: norm.NormOptions, find_amax: bool
) -> tuple[Tensor, Any, Tensor]:
    """(y, x + residual, rstd). find_amax: note y's largest magnitudes for the FP8 layer that reads it."""
    amax = known_amax.parts_for_result(x) if find_amax else None
    if amax is None:
        y, s, _, rstd = norm.norm_fwd(x, residual, weight, None, options)
    else:
        y, s, _, rstd = norm.norm_fwd_amax(x, residual, weight, None, options, amax)
        known_amax.note(y, amax[0])
    return y, s, rstd


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        offset: float,
        fp32_weight: bool,
        find_amax: bool = False,
    ) -> Tensor:
        y, _, rstd = _normed(x, None, weight, norm.norm_options(eps, offset, False, fp32_weight), find_amax)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps, ctx.offset, ctx.fp32_weight = eps, offset, fp32_weight
        return y

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        want_dx, want_dw = ctx.needs_input_grad[:2]
        options = norm.norm_backward_options(ctx.offset, False, ctx.fp32_weight, want_dx, want_dw, False)
        dx, dw, _ = norm.norm_bwd(dy, None, x, weight, rstd, rstd, options)
        return (dx if want_dx else None, dw if want_dw else None, *[None] * (len(ctx.needs_input_grad) - 2))


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        offset: float,
        fp32_weight: bool,
        find_amax: bool = False,
    ) -> tuple[Tensor, Tensor]:
        y, s, rstd = _normed(x, residual, weight, norm.norm_options(eps, offset, False, fp32_weight), find_amax)
        ctx.save_for_backward(s, weight, rstd)
        ctx.eps, ctx.offset, ctx.fp32_weight = eps, offset, fp32_weight
        ctx.wanted = known_amax.wanted_for_gradient(x)
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight, rstd = ctx.saved_tensors
        want_dx, want_dr, want_dw = ctx.needs_input_grad[:3]
        others = [None] * (len(ctx.needs_input_grad) - 3)
        if dy is None:
            return (ds if want_dx else None, ds if want_dr else None, None, *others)
        options = norm.norm_backward_options(ctx.offset, False, ctx.fp32_weight, want_dx or want_dr, want_dw, False)
        amax = known_amax.parts_for(s, 1) if ctx.wanted and want_dx else None
        if amax is None:
            dx, dw, _ = norm.norm_bwd(dy, ds, s, weight, rstd, rstd, options)
        else:
            dx, dw, _ = norm.norm_bwd_amax(dy, ds, s, weight, rstd, rstd, options, amax)
            known_amax.note(dx, amax[0])
        # x and residual enter only through their sum, so they share one gradient tensor.
        return (dx if want_dx else None, dx if want_dr else None, dw if want_dw else None, *others)


_rms_norm = Differentiable(
    "rms_norm", RMSNorm.apply, "(Tensor x, Tensor? weight, float eps, float offset, bool fp32_weight) -> Tensor"
)
_add_rms_norm = Differentiable(
    "add_rms_norm",
    AddRMSNorm.apply,
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool fp32_weight) -> (Tensor, Tensor)",
)


def _check(x: Tensor, weight: Tensor | None, casting: str) -> bool:
    check_dtype(x, weight)
    norm.check_parameter("weight", weight, x)
    if casting not in _FP32_WEIGHT:
        raise OptionError(f"casting={casting!r} is not known; choose one of {', '.join(_FP32_WEIGHT)}.")
    return _FP32_WEIGHT[casting]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: Casting = "llama",
    find_amax: bool = False,
) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · (weight + offset).

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64, any strides; never written to.
        weight: (H,) or None. Its dtype may be wider than x's, for example fp32 master weights.
        eps: added to the mean square.
        offset: added to the weight; 1 for Gemma.
        casting: where the normalised value is rounded. "llama" rounds to x's dtype before the product with the weight.
            "gemma" and "fp32" round once, after the product.
        find_amax: let the kernel also find the largest magnitudes of the result, for the tensorwise `fp8_linear` layers
            that read it. torch.compile ignores it.

    Returns:
        (..., H), in x's dtype; with casting="llama" in the promoted dtype of x and weight.

    Raises:
        ShapeError: x is 0-dim, or weight is not (H,) or is on another device than x.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64, or weight is fp64 and x is not.
        OptionError: casting is unknown; or eps or offset is not a finite number, or eps is negative.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    eps, offset = norm.check_scalars(eps, offset)
    fp32_weight = _check(x, weight, casting)
    if torch.compiler.is_compiling():
        return _rms_norm(x, weight, eps, offset, fp32_weight)  # type: ignore[no-any-return]
    return RMSNorm.apply(x, weight, eps, offset, fp32_weight, find_amax)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: Casting = "llama",
    find_amax: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `s = x + residual` and `rms_norm(s)` in one pass.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64, any strides; never written to.
        residual: the shape, dtype and device of x; never written to.
        weight, eps, offset, casting, find_amax: as in `rms_norm`.

    Returns:
        (rms_norm(s), s), both (..., H). s has x's dtype; rms_norm(s) has the dtype that `rms_norm` returns.

    Raises:
        ShapeError: residual differs from x in shape, dtype or device; or x is 0-dim; or weight is not (H,) or is on
            another device than x.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64, or weight is fp64 and x is not.
        OptionError: casting is unknown; or eps or offset is not a finite number, or eps is negative.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    eps, offset = norm.check_scalars(eps, offset)
    fp32_weight = _check(x, weight, casting)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ShapeError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, x is {tuple(x.shape)} {x.dtype}; they must agree."
        )
    if residual.device != x.device:
        raise ShapeError(f"residual is on {residual.device}, x is on {x.device}; move one of them.")
    if torch.compiler.is_compiling():
        return _add_rms_norm(x, residual, weight, eps, offset, fp32_weight)  # type: ignore[no-any-return]
    return AddRMSNorm.apply(x, residual, weight, eps, offset, fp32_weight, find_amax)  # type: ignore[no-any-return]


def rms_norm_oracle(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting: Casting = "llama"
) -> Tensor:
    """The unfused formula, as the model families implement it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if not _FP32_WEIGHT[casting]:
        xhat = xhat.to(x.dtype)
        return xhat if weight is None else xhat * (weight + offset if offset else weight)
    return (xhat if weight is None else xhat * (weight.to(wide.dtype) + offset)).to(x.dtype)


def _add_rms_norm_oracle(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    s = x + residual
    return rms_norm_oracle(s, *args, **options), s


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    options = dict(case.options)
    weighted = options.pop("weighted", True)
    weight_dtype = options.pop("weight_dtype", dtype)
    width = case.shape[-1]
    weight = randn(width, dtype=weight_dtype, device=device) if weighted else None
    return {"x": randn(*case.shape, dtype=dtype, device=device), "weight": weight, **options}


def _make_add(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    inputs = _make(case, dtype, device)
    return {"x": inputs.pop("x"), "residual": randn(*case.shape, dtype=dtype, device=device), **inputs}


def _cost(x: Tensor, weight: Tensor | None = None, *_: object, **__: object) -> Cost:
    # forward x -> y; backward dy, x -> dx
    return Cost(moved_bytes=5 * x.nbytes, saved_bytes=x.nbytes + 4 * x.shape[:-1].numel())


def _add_cost(x: Tensor, residual: Tensor, weight: Tensor | None = None, *_: object, **__: object) -> Cost:
    # forward x, r -> s, y; backward dy, ds, s -> dx
    return Cost(moved_bytes=8 * x.nbytes, saved_bytes=x.nbytes + 4 * x.shape[:-1].numel())


RMS_NORM = Op(
    name="rms_norm",
    call=rms_norm,
    oracle=rms_norm_oracle,
    make=_make,
    grads=("x", "weight"),
    case=Case(id="llama", shape=(3, 37, 64)),
    cost=_cost,
    errors={"fp32": 1.8e-06, "bf16": 3.2e-03, "fp16": 3.0e-04},
)

ADD_RMS_NORM = Op(
    name="add_rms_norm",
    call=add_rms_norm,
    oracle=_add_rms_norm_oracle,
    make=_make_add,
    grads=("x", "residual", "weight"),
    case=Case(id="llama", shape=(3, 37, 64)),
    cost=_add_cost,
    errors={"fp32": 1.1e-07, "bf16": 3.5e-03, "fp16": 3.7e-04},
)
