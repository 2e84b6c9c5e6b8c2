"""The operators of `experts`: products of sorted token-slots, the gated unit between them, and their composite path.

The T · K token-slots are sorted by expert. Rows of expert e are offsets[e] to offsets[e + 1]; order[m] is the slot of
sorted row m, which belongs to token order[m] // K.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError
from tigon.ops.dispatch import Primitive, check_number

_KERNELS = "tigon.kernels.experts"
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class ExpertUnit:
    """The gated unit of an expert: f(min(g, limit)) · (clamp(u, -limit, limit) + up_offset).

    GPT-OSS has `ExpertUnit(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)`.
    """

    activation: str = "silu"
    """f: "silu", "gelu" or "gelu_tanh"."""
    alpha: float = 1.0
    """For silu: f(g) = g · sigmoid(alpha · g)."""
    limit: float = math.inf
    """The bound of gate (from above) and up (from both sides)."""
    up_offset: float = 0.0
    """Added to up."""
    interleaved: bool = False
    """The columns of the first product are gate, up, gate, up, ... instead of all of gate and then all of up."""

    def __post_init__(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise OptionError(f"activation={self.activation!r} is not known; choose one of {', '.join(_ACTIVATIONS)}.")
        for name in ("alpha", "limit", "up_offset"):
            check_number(name, getattr(self, name))
        if not self.limit > 0:
            raise OptionError(f"limit={self.limit} must be above 0; leave it out for no limit.")
        if self.alpha != 1.0 and self.activation != "silu":
            raise OptionError(f"alpha={self.alpha} belongs to silu; activation is {self.activation!r}.")

    @property
    def values(self) -> tuple[str, float, float, float, bool]:
        """The unit as arguments of an operator."""
        return self.activation, float(self.alpha), float(self.limit), float(self.up_offset), self.interleaved

    def __call__(self, pre: Tensor) -> Tensor:
        """The unfused formula."""
        g, u = _halves(pre, self.interleaved)
        if self.limit != math.inf:
            g, u = g.clamp(max=self.limit), u.clamp(min=-self.limit, max=self.limit)
        if self.activation == "silu":
            f = F.silu(g) if self.alpha == 1.0 else g * torch.sigmoid(g * self.alpha)
        else:
            f = F.gelu(g, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return f * (u + self.up_offset if self.up_offset else u)


def _halves(pre: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return pre[..., ::2], pre[..., 1::2]
    half = pre.shape[-1] // 2
    return pre[..., :half], pre[..., half:]


# --- the composite path ---


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its sorted rows), without the experts that have none."""
    ends = offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            yield expert, slice(start, end)


def _product_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    low_weight: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    top_k: int,
    gather: bool,
    scatter: bool,
) -> Tensor:
    y = x.new_zeros(order.shape[0], weight.shape[1])
    for expert, rows in _groups(offsets):
        slots = order[rows]
        part = F.linear(
            x[slots // top_k] if gather else x[rows], weight[expert], None if bias is None else bias[expert]
        )
        if low is not None and low_weight is not None:
            part.addmm_(low[rows], low_weight[expert].t())
        y[slots if scatter else rows] = part
    return y


def _weight_gradient_reference(a: Tensor, b: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    dw = torch.zeros_like(weight)
    dtype = torch.promote_types(a.dtype, weight.dtype)  # the gradient of an fp32 adapter is never rounded to 16 bits
    for expert, rows in _groups(offsets):
        dw[expert] = a[rows].t().to(dtype) @ b[rows].to(dtype)
    return dw


def _sum_reference(
    x: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, gather: bool
) -> Tensor:
    sums = x.new_zeros(offsets.shape[0] - 1, x.shape[1])
    for expert, rows in _groups(offsets):
        slots = order[rows]
        part = (x[slots // top_k] if gather else x[rows]).to(torch.promote_types(x.dtype, torch.float32))
        sums[expert] = (part if weights is None else part * weights[slots, None]).sum(0)
    return sums


def _combine_reference(z: Tensor, weights: Tensor | None, experts: Tensor, number_of_experts: int) -> Tensor:
    T, top_k = experts.shape
    parts = z.to(torch.promote_types(z.dtype, torch.float32)).view(T, top_k, z.shape[1])
    parts = parts.masked_fill(((experts < 0) | (experts >= number_of_experts))[:, :, None], 0.0)
    return (parts if weights is None else parts * weights.view(T, top_k, 1)).sum(1).to(z.dtype)


def _unit_parts(pre: Tensor, unit: ExpertUnit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f(g), df/dg, u + offset, and du of the clamped u, as in kernels/experts.py."""
    from_dtype = torch.promote_types(pre.dtype, torch.float32)
    g, u = (half.to(from_dtype) for half in _halves(pre, unit.interleaved))
    dg_cut, du_cut = g <= unit.limit, (u >= -unit.limit) & (u <= unit.limit)
    g, u = g.clamp(max=unit.limit), u.clamp(min=-unit.limit, max=unit.limit)
    if unit.activation == "gelu":
        cdf = torch.special.ndtr(g)
        f, df = g * cdf, cdf + g * torch.exp(-0.5 * g * g) * 0.3989422804014327
    elif unit.activation == "silu":
        s = torch.sigmoid(unit.alpha * g)
        f = g * s
        df = s + f * (1 - s) * unit.alpha
    else:
        scale, cubic = 1.5957691216057308, 0.044715
        s = torch.sigmoid(scale * (g + cubic * g**3))
        f = g * s
        df = s + f * (1 - s) * scale * (1 + 3 * cubic * g * g)
    return f, df.where(dg_cut, 0.0), u + unit.up_offset, du_cut.to(from_dtype)


def _unit(activation: str, alpha: float, limit: float, up_offset: float, interleaved: bool) -> ExpertUnit:
    return ExpertUnit(activation=activation, alpha=alpha, limit=limit, up_offset=up_offset, interleaved=interleaved)


def _unit_fwd_reference(
    pre: Tensor, activation: str, alpha: float, limit: float, up_offset: float, interleaved: bool
) -> Tensor:
    f, _, u, _ = _unit_parts(pre, _unit(activation, alpha, limit, up_offset, interleaved))
    return (f * u).to(pre.dtype)


def _unit_bwd_reference(
    pre: Tensor, da: Tensor | None, weights: Tensor, order: Tensor, offsets: Tensor,
    activation: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    want_dpre: bool, want_wy: bool, want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dpre, wy, dweights = _unit_bwd_fake(
        pre,
        da,
        weights,
        order,
        offsets,
        activation,
        alpha,
        limit,
        up_offset,
        interleaved,
        want_dpre,
        want_wy,
        want_dweight,
    )
    f, df, u, du = _unit_parts(pre, _unit(activation, alpha, limit, up_offset, interleaved))
    weight = weights[order, None]
    if want_wy:
        wy.copy_(weight * f * u)
    if da is not None:
        rows = torch.arange(len(order), device=order.device)
        there = (rows >= offsets[0]) & (rows < offsets[-1])
        if want_dweight:
            dweights[order] = (da.to(f.dtype) * f * u).sum(1).where(there, 0.0)
        if want_dpre:
            dy = weight * da
            dg, d_up = _halves(dpre, interleaved)
            dg.copy_(dy * u * df)
            d_up.copy_(dy * f * du)
    return dpre, wy, dweights


def _unit_bwd_fake(
    pre: Tensor, da: Tensor | None, weights: Tensor, order: Tensor, offsets: Tensor,
    activation: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    want_dpre: bool, want_wy: bool, want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    S, width = pre.shape
    return (
        pre.new_empty(pre.shape if want_dpre else (0,)),
        pre.new_empty((S, width // 2) if want_wy else (0,)),
        weights.new_empty((S,) if want_dweight else (0,)),
    )


# --- the operators ---

grouped_product = Primitive(
    "grouped_product",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? low, Tensor? low_weight, Tensor order, Tensor offsets, int top_k,"
    " bool gather, bool scatter) -> Tensor",
    reference=_product_reference,
    kernel=f"{_KERNELS}:grouped_product",
    fake=lambda x, weight, bias, low, low_weight, order, *_: x.new_empty((order.shape[0], weight.shape[1])),
)
grouped_weight_gradient = Primitive(
    "grouped_weight_gradient",
    "(Tensor a, Tensor b, Tensor offsets, Tensor weight) -> Tensor",
    reference=_weight_gradient_reference,
    kernel=f"{_KERNELS}:grouped_weight_gradient",
    fake=lambda a, b, offsets, weight: torch.empty_like(weight),
)
grouped_sum = Primitive(
    "grouped_sum",
    "(Tensor x, Tensor? weights, Tensor order, Tensor offsets, int top_k, bool gather) -> Tensor",
    reference=_sum_reference,
    kernel=f"{_KERNELS}:grouped_sum",
    fake=lambda x, weights, order, offsets, *_: x.new_empty((offsets.shape[0] - 1, x.shape[1])),
)
combine_slots = Primitive(
    "combine_slots",
    "(Tensor z, Tensor? weights, Tensor experts, int number_of_experts) -> Tensor",
    reference=_combine_reference,
    kernel=f"{_KERNELS}:combine",
    fake=lambda z, weights, experts, number_of_experts: z.new_empty((experts.shape[0], z.shape[1])),
)
UNIT_SCHEMA = "str activation, float alpha, float limit, float up_offset, bool interleaved"
expert_unit_fwd = Primitive(
    "expert_unit_fwd",
    f"(Tensor pre, {UNIT_SCHEMA}) -> Tensor",
    reference=_unit_fwd_reference,
    kernel=f"{_KERNELS}:unit_fwd",
    fake=lambda pre, *_: pre.new_empty((pre.shape[0], pre.shape[1] // 2)),
)
expert_unit_bwd = Primitive(
    "expert_unit_bwd",
    f"(Tensor pre, Tensor? da, Tensor weights, Tensor order, Tensor offsets, {UNIT_SCHEMA},"
    " bool want_dpre, bool want_wy, bool want_dweight) -> (Tensor, Tensor, Tensor)",
    reference=_unit_bwd_reference,
    kernel=f"{_KERNELS}:unit_bwd",
    fake=_unit_bwd_fake,
)
