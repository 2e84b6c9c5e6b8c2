"""The two primitives behind rms_norm, add_rms_norm and layer_norm, with their composite path in PyTorch.

The formulas are at the top of `kernels/norm.py`. The composite path runs the same algorithm on whole tensors.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops import known_amax
from tigon.ops.dispatch import Primitive, check_number
from tigon.ops.signature import WRITTEN


class NormOptions(NamedTuple):
    """The options of the forward besides its tensors."""

    eps: float
    offset: float
    """Added to the weight."""
    center: bool
    """Subtract the mean: LayerNorm."""
    fp32_weight: bool
    """Compute the product with the weight in fp32, and round once."""


class NormBackwardOptions(NamedTuple):
    """The options that the backward needs, and which gradients it computes."""

    offset: float
    center: bool
    fp32_weight: bool
    want_dx: bool
    want_dw: bool
    want_db: bool


# A model repeats a few records. Finding one takes 0.09 us of host time, and making it 0.2 us.
norm_options = functools.lru_cache(maxsize=1 << 12)(NormOptions)
norm_backward_options = functools.lru_cache(maxsize=1 << 12)(NormBackwardOptions)


class NormResults(NamedTuple):
    """x is (..., H). A result that the options leave out is empty."""

    y: Tensor
    s: Tensor
    """x + residual, (..., H)."""
    mean: Tensor
    """(...), fp32."""
    rstd: Tensor
    """(...), fp32."""


class NormGradients(NamedTuple):
    """A gradient that is not wanted is empty."""

    dx: Tensor
    dw: Tensor
    db: Tensor


def check_scalars(eps: Any, offset: Any = 0.0) -> tuple[float, float]:
    """Return eps and offset (of the weight); raise `OptionError` unless both are finite numbers and eps is >= 0."""
    if type(eps) is float and type(offset) is float and 0.0 <= eps < math.inf and -math.inf < offset < math.inf:
        return eps, offset
    if not 0.0 <= check_number("eps", eps) < math.inf:
        raise OptionError(f"eps={eps} must be finite and not negative.")
    if not -math.inf < check_number("offset", offset) < math.inf:
        raise OptionError(f"offset={offset} must be finite; leave it out for none.")
    return float(eps), float(offset)


def check_parameter(name: str, parameter: Tensor | None, x: Tensor) -> None:
    """Raise unless `parameter` is None, or is (H,) on x's device and fp64 only if x is fp64."""
    if x.ndim == 0:
        raise ShapeError("x is 0-dim, but the norm runs over the last dimension. Pass (..., H).")
    if parameter is None:
        return
    if parameter.shape != x.shape[-1:]:
        raise ShapeError(f"{name} is {tuple(parameter.shape)}, x is {tuple(x.shape)}; {name} must be ({x.shape[-1]},).")
    if parameter.device != x.device:
        raise ShapeError(f"{name} is on {parameter.device}, x is on {x.device}; move one of them.")
    if parameter.dtype == torch.float64 != x.dtype:
        # x's dtype decides the precision, so the result would be computed in fp32 but labelled fp64.
        raise DtypeError(f"{name} is float64 and x is {x.dtype}; cast one of them.")


def _fwd_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
    amax: Tensor | None = None,
) -> NormResults:
    eps, offset, center, fp32_weight = options
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(x.dtype, torch.float32))
    mean, centred = wide.new_empty(0), wide
    if center:
        mean = wide.mean(-1)
        centred = wide - mean.unsqueeze(-1)
        # The rounded mean is off by up to half an ulp. Subtract the mean that remains, as the kernel does.
        left = centred.mean(-1)
        centred, mean = centred - left.unsqueeze(-1), mean + left
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1)
    y_dtype = x.dtype
    if not fp32_weight:
        y = y.to(x.dtype).to(wide.dtype)
        y_dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    # A torch.library operator must not return its input, so without a residual it returns no sum. The outputs are
    # contiguous like those of the fake and the kernel.
    s = s if residual is not None else x.new_empty(0)
    y = y.to(y_dtype)
    known_amax.search(amax, 0, y)
    return NormResults(y.contiguous(), s.contiguous(), mean.contiguous(), rstd.contiguous())


def _bwd_reference(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    options: NormBackwardOptions,
    amax: Tensor | None = None,
) -> NormGradients:
    offset, center, fp32_weight, want_dx, want_dw, want_db = options
    acc = rstd.dtype
    dy = dy.to(acc)
    wide = x.to(acc)
    xhat = (wide - mean.unsqueeze(-1) if center else wide) * rstd.unsqueeze(-1)
    dx = x.new_empty(0)
    if want_dx:
        g = dy if weight is None else dy * (weight.to(acc) + offset)
        grad = g - xhat * (g * xhat).mean(-1, keepdim=True)
        if center:
            grad = grad - g.mean(-1, keepdim=True)
        grad = grad * rstd.unsqueeze(-1)
        dx = (grad if ds is None else grad + ds.to(acc)).to(x.dtype)
        known_amax.search(amax, 0, dx)
    parameter = x if weight is None else weight
    rows = tuple(range(x.ndim - 1))
    rounded = xhat if fp32_weight else xhat.to(x.dtype).to(acc)
    dw = _sum_rows(dy * rounded, rows).to(parameter.dtype) if want_dw else parameter.new_empty(0)
    db = _sum_rows(dy, rows).to(parameter.dtype) if want_db else parameter.new_empty(0)
    return NormGradients(dx.contiguous(), dw, db)


def _sum_rows(t: Tensor, rows: tuple[int, ...]) -> Tensor:
    # sum(dim=()) would sum over all dimensions. A 1-D x has no rows to sum, but the result must not alias x.
    return t.sum(rows) if rows else t.clone()


def _fwd_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: NormOptions
) -> NormResults:
    y_dtype = x.dtype if options.fp32_weight or weight is None else torch.promote_types(x.dtype, weight.dtype)
    acc = torch.promote_types(x.dtype, torch.float32)
    return NormResults(
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(x.shape if residual is not None else (0,)),
        x.new_empty(x.shape[:-1] if options.center else (0,), dtype=acc),
        x.new_empty(x.shape[:-1], dtype=acc),
    )


def _bwd_fake(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    options: NormBackwardOptions,
) -> NormGradients:
    parameter = x if weight is None else weight
    return NormGradients(
        x.new_empty(x.shape if options.want_dx else (0,)),
        parameter.new_empty(x.shape[-1:] if options.want_dw else (0,)),
        parameter.new_empty(x.shape[-1:] if options.want_db else (0,)),
    )


def _fwd_amax_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
    amax: Annotated[Tensor, WRITTEN],
) -> NormResults:
    return _fwd_fake(x, residual, weight, bias, options)


def _bwd_amax_fake(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    options: NormBackwardOptions,
    amax: Annotated[Tensor, WRITTEN],
) -> NormGradients:
    return _bwd_fake(dy, ds, x, weight, mean, rstd, options)


def _complete_fwd(results: Any, x: Tensor, *_: object) -> tuple[Tensor, ...]:
    y, s, mean, rstd = results
    return y, x.new_empty(0) if s is None else s, rstd.new_empty(0) if mean is None else mean, rstd


def _complete_bwd(results: Any, dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, *_: object) -> Any:
    dx, dw, db = results
    parameter = x if weight is None else weight
    return (
        x.new_empty(0) if dx is None else dx,
        parameter.new_empty(0) if dw is None else dw,
        parameter.new_empty(0) if db is None else db,
    )


norm_fwd = Primitive(
    "norm_fwd",
    reference=_fwd_reference,
    kernel="tigon.kernels.norm:norm_fwd",
    complete=_complete_fwd,
    fake=_fwd_fake,
)
norm_bwd = Primitive(
    "norm_bwd",
    reference=_bwd_reference,
    kernel="tigon.kernels.norm:norm_bwd",
    complete=_complete_bwd,
    fake=_bwd_fake,
)
# Their own operators, because torch.compile wraps operators that write to an argument.
norm_fwd_amax = Primitive(
    "norm_fwd_amax",
    reference=_fwd_reference,
    kernel="tigon.kernels.norm:norm_fwd",
    complete=_complete_fwd,
    fake=_fwd_amax_fake,
)
"""As `norm_fwd`; the maximum of amax (1, parts), which is 0 before, becomes that of |y|."""
norm_bwd_amax = Primitive(
    "norm_bwd_amax",
    reference=_bwd_reference,
    kernel="tigon.kernels.norm:norm_bwd",
    complete=_complete_bwd,
    fake=_bwd_amax_fake,
)
"""As `norm_bwd`; the maximum of amax (1, parts), which is 0 before, becomes that of |dx|."""
