"""RMSNorm with a gate, as after a gated delta rule, Kimi delta attention or a Mamba 2 scan.

    y = x̂ · w · f(gate)            x̂ = x / sqrt(mean(x²) + eps)
    y = ŝ · w, with s = x · f(gate) if the gate is first

f is SiLU or the sigmoid. The mean may be over groups of the width. The unfused model stores fp32 copies of x, x̂, the
gate and their products. The op saves x and the gate. The formulas of the backward are at the top of
`kernels/gated_norm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, Primitive, check_dtype, check_whole, first_order
from tigon.ops.norms.norm import check_parameter, check_scalars

KERNELS = "tigon.kernels.gated_norm"
MAX_WIDTH = 8192
GateActivation = Literal["silu", "sigmoid"]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class GatedNormOptions(NamedTuple):
    """The options besides the tensors."""

    eps: float
    groups: int
    silu: bool
    """The gate's activation is SiLU, otherwise the sigmoid."""
    gate_first: bool


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rstd(s: Tensor, options: GatedNormOptions) -> Tensor:
    """1 / sqrt(mean + eps) of each group, repeated for its columns."""
    mean = s.unflatten(-1, (options.groups, -1)).square().mean(-1, keepdim=True)
    rstd: Tensor = (mean + options.eps).rsqrt().expand(*mean.shape[:-1], s.shape[-1] // options.groups)
    return rstd.flatten(-2)


def _fwd_reference(x: Tensor, gate: Tensor, weight: Tensor, options: GatedNormOptions) -> Tensor:
    s, g = _wide(x), _wide(gate)
    f = F.silu(g) if options.silu else g.sigmoid()
    if options.gate_first:
        s = s * f
    y = s * _rstd(s, options) * weight.to(s.dtype)
    return (y if options.gate_first else y * f).to(x.dtype).contiguous()


class GatedNormGradients(NamedTuple):
    """A weight's gradient that is not wanted is empty."""

    dx: Tensor
    dgate: Tensor
    dweight: Tensor


def _bwd_reference(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, options: GatedNormOptions, want_dw: bool
) -> GatedNormGradients:
    wide = _wide(x)
    acc = wide.dtype
    dy, g, w = dy.to(acc), gate.to(acc), weight.to(acc)
    sigma = g.sigmoid()
    f = g * sigma if options.silu else sigma
    df = sigma + f * (1 - sigma) if options.silu else sigma * (1 - sigma)
    s, gated = (wide * f, dy) if options.gate_first else (wide, dy * f)
    rstd = _rstd(s, options)
    c, shat = gated * w, s * rstd
    mean = (c * shat).unflatten(-1, (options.groups, -1)).mean(-1, keepdim=True)
    ds = rstd * (c - shat * mean.expand(*mean.shape[:-1], s.shape[-1] // options.groups).flatten(-2))
    dx, dg = (ds * f, ds * wide * df) if options.gate_first else (ds, dy * w * shat * df)
    rows = tuple(range(x.ndim - 1))
    products = gated * shat
    dw = weight.new_empty(0)
    if want_dw:
        dw = (products.sum(rows) if rows else products).to(weight.dtype)
    return GatedNormGradients(dx.to(x.dtype).contiguous(), dg.to(gate.dtype).contiguous(), dw)


def _fwd_fake(x: Tensor, gate: Tensor, weight: Tensor, options: GatedNormOptions) -> Tensor:
    return x.new_empty(x.shape)


def _bwd_fake(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, options: GatedNormOptions, want_dw: bool
) -> GatedNormGradients:
    return GatedNormGradients(
        x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape if want_dw else (0,))
    )


def _complete_bwd(results: Any, dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *_: object) -> Any:
    dx, dgate, dw = results
    return dx, dgate, weight.new_empty(0) if dw is None else dw


gated_norm_fwd = Primitive(
    "gated_norm_fwd", reference=_fwd_reference, kernel=f"{KERNELS}:gated_norm_fwd", fake=_fwd_fake
)
gated_norm_bwd = Primitive(
    "gated_norm_bwd",
    reference=_bwd_reference,
    kernel=f"{KERNELS}:gated_norm_bwd",
    complete=_complete_bwd,
    fake=_bwd_fake,
)


class GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        groups: int,
        silu: bool,
        gate_first: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.options = GatedNormOptions(eps, groups, silu, gate_first)
        return gated_norm_fwd(x, gate, weight, ctx.options)  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        gradients = gated_norm_bwd(dy, *ctx.saved_tensors, ctx.options, wanted[2])
        return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), *[None] * 4


_gated_rms_norm = Differentiable(
    "gated_rms_norm",
    GatedRMSNorm.apply,
    "(Tensor x, Tensor gate, Tensor weight, float eps, int groups, bool silu, bool gate_first) -> Tensor",
)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    activation: GateActivation = "silu",
    gate_first: bool = False,
    groups: int = 1,
) -> Tensor:
    """Compute `rms_norm(x, weight) * f(gate)` in one pass.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64, any strides; never written to.
        gate: the shape and device of x; its dtype may differ, unless one of both is fp64.
        weight: (H,). Its dtype may be wider than x's.
        eps: added to the mean square.
        activation: f, "silu" or "sigmoid".
        gate_first: the gate is multiplied before the norm, as in Mamba 2.
        groups: the parts of the width that are normalised by themselves.

    Returns:
        (..., H), in x's dtype. Everything before is fp32, or fp64 for fp64.

    Raises:
        ShapeError: x is 0-dim; gate has another shape or device; weight is not (H,) or is on another device; groups
            does not divide H; or a group is wider than 8192.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64, or some are fp64 and others are not.
        OptionError: activation is unknown, eps is not finite or negative, or groups is not positive.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    eps, _ = check_scalars(eps)
    _check(x, gate, weight, groups)
    if activation not in _ACTIVATIONS:
        raise OptionError(f"activation={activation!r} is not known; choose one of {', '.join(_ACTIVATIONS)}.")
    arguments = (x, gate, weight, eps, int(groups), activation == "silu", bool(gate_first))
    if torch.compiler.is_compiling():
        return _gated_rms_norm(*arguments)  # type: ignore[no-any-return]
    return GatedRMSNorm.apply(*arguments)  # type: ignore[no-any-return]


def _check(x: Tensor, gate: Tensor, weight: Tensor, groups: int) -> None:
    check_dtype(x, gate, weight)
    check_parameter("weight", weight, x)
    if gate.shape != x.shape or gate.device != x.device:
        raise ShapeError(
            f"gate is {tuple(gate.shape)} on {gate.device}, x is {tuple(x.shape)} on {x.device}; they must agree."
        )
    if (gate.dtype is torch.float64) != (x.dtype is torch.float64):
        gates = f"gate is {gate.dtype} and x is {x.dtype}"
        raise DtypeError(f"{gates}; the limit is float64 for both or for neither. Cast one of them.")
    check_whole("groups", groups)
    if groups < 1:
        raise OptionError(f"groups={groups} must be at least 1.")
    if x.shape[-1] % groups or x.shape[-1] // groups > MAX_WIDTH:
        raise ShapeError(
            f"x is {tuple(x.shape)} and groups={groups}; the groups must divide the width and have at most "
            f"{MAX_WIDTH} columns."
        )


def gated_rms_norm_oracle(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    activation: GateActivation = "silu",
    gate_first: bool = False,
    groups: int = 1,
) -> Tensor:
    """The unfused formula, as Qwen3.5 and Mamba 2 implement it."""
    f = _ACTIVATIONS[activation](_wide(gate))
    s = _wide(x) * f if gate_first else _wide(x)
    parts = s.unflatten(-1, (groups, -1))
    y: Tensor = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = weight * y.to(x.dtype)
    return (y if gate_first else y * f).to(x.dtype)


# --- the record ---


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    options = dict(case.options)
    weight_dtype = options.pop("weight_dtype", dtype)
    return {
        "x": randn(*case.shape, dtype=dtype, device=device),
        "gate": randn(*case.shape, dtype=dtype, device=device),
        "weight": randn(case.shape[-1], dtype=weight_dtype, device=device),
        **options,
    }


def _cost(x: Tensor, gate: Tensor, *_: object, **__: object) -> Cost:
    # forward x, gate -> y; backward dy, x, gate -> dx, dgate
    return Cost(moved_bytes=8 * x.nbytes, saved_bytes=x.nbytes + gate.nbytes)


GATED_RMS_NORM = Op(
    name="gated_rms_norm",
    call=gated_rms_norm,
    oracle=gated_rms_norm_oracle,
    make=_make,
    grads=("x", "gate", "weight"),
    case=Case(id="delta-rule", shape=(2, 9, 3, 32)),
    cost=_cost,
    # These are errors of all cases on a CPU.
    errors={"fp32": 1.9e-07, "bf16": 2.6e-03, "fp16": 2.5e-04},
)
