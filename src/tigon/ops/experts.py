"""The experts of a mixture (Shazeer et al. 2017, arXiv 1701.06538), each a gated MLP, as one op:

    y_t = Σ_k w_tk · (D_e unit(G_e x_t + b_e) + c_e)        e = the k-th expert of token t

The T · K token-slots are sorted by expert, stably. The first product reads its rows through the sorted order, so no
sorted copy of the hidden states exists. The second product writes each row to its slot, and one pass sums the weighted
slots of a token in fp32. No expert has a capacity, so no token is dropped and nothing is padded.

    saved       hidden, the weights of the slots, the order, and pre = G_e x + b_e
    backward    da = D_eᵀ dy                dw = <da, unit(pre)> + <dy, c_e>
                dpre = w · da · unit'(pre)  dx = Σ_k G_eᵀ dpre
                dD_e = Σ dy (w · unit)ᵀ     dG_e = Σ dpre xᵀ        db_e = Σ dpre       dc_e = Σ w · dy

The backward computes the gated unit again. It needs no product of the forward again: dw follows from da, so that the
experts' results are not saved. All sums have a fixed order; two runs give the same bits.

An index outside 0 ... E - 1 chooses no expert: the slot adds nothing and its weight's gradient is 0, as in transformers
with expert parallelism.

A projection W may have a low-rank adapter (LoRA, Hu et al. 2021, arXiv 2106.09685): W_e x + s · B_e A_e x. No product
B_e A_e is formed, so no matrix of the weights' size exists beside them. h = s · A_e x and g = B_eᵀ dy are two numbers
per rank and slot, and the products with B_e and A_eᵀ add to the same tile as the weight's:

    saved       h of both projections
    backward    dx += s · A_eᵀ g            dB_e = Σ dy hᵀ          dA_e = s · Σ g xᵀ

A weight may also be a function that makes it, such as the dequantisation of a 4-bit weight. The forward and the
backward call it once each, so that one dense weight of one projection exists at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    Differentiable,
    check_dtype,
    check_number,
    first_order,
    no_autocast,
    product_dtype,
)
from tigon.ops.expert_operators import (
    UNIT_SCHEMA,
    ExpertUnit,
    combine_slots,
    expert_unit_bwd,
    expert_unit_fwd,
    grouped_product,
    grouped_sum,
    grouped_weight_gradient,
)
from tigon.ops.linear.lora_linear import Weight, dense
from tigon.ops.linear.mxfp4 import BLOCK, CODE, mxfp4_weight

# T tokens, K experts per token, S = T · K slots, E experts, H hidden, F inner width of an expert, R rank of an adapter.


def _sorted_slots(experts_TK: Tensor, number_of_experts: int) -> tuple[Tensor, Tensor]:
    """(the slots in the order of their experts, the first sorted row of each expert and the end of the last)."""
    sorted_experts, order = torch.sort(experts_TK.reshape(-1), stable=True)
    bounds = torch.arange(number_of_experts + 1, device=experts_TK.device, dtype=sorted_experts.dtype)
    return order, torch.searchsorted(sorted_experts, bounds, out_int32=True)


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Weight, down: Weight,
        gate_up_bias: Tensor | None, down_bias: Tensor | None,
        gate_up_lora_a: Tensor | None, gate_up_lora_b: Tensor | None,
        down_lora_a: Tensor | None, down_lora_b: Tensor | None, gate_up_scaling: float, down_scaling: float,
        activation: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    ) -> Tensor:  # fmt: skip
        unit, dtype = (activation, alpha, limit, up_offset, interleaved), hidden.dtype
        stored_gate_up, ctx.make_gate_up = (None, gate_up) if callable(gate_up) else (gate_up, None)
        stored_down, ctx.make_down = (None, down) if callable(down) else (down, None)
        top_k = top_k_index.shape[1]
        with no_autocast(hidden):
            experts_TK = top_k_index.contiguous()
            weight = dense(gate_up, dtype)
            E = weight.shape[0]
            order, offsets = _sorted_slots(experts_TK, E)
            slots = _Slots(order, offsets, top_k)
            weights = top_k_weights.reshape(-1).to(torch.promote_types(top_k_weights.dtype, torch.float32))
            h_gate_up, b = _Adapter(gate_up_lora_a, gate_up_lora_b, gate_up_scaling).low(hidden, slots, True)
            pre = grouped_product(hidden, weight, gate_up_bias, h_gate_up, b, *slots, True, False)
            del weight
            y = expert_unit_fwd(pre, *unit)
            h_down, b = _Adapter(down_lora_a, down_lora_b, down_scaling).low(y, slots, False)
            weight = dense(down, dtype)
            z = grouped_product(y, weight, down_bias, h_down, b, *slots, False, True)
            del y, weight
            out = combine_slots(z, weights, experts_TK, E)
        routing, stored = (experts_TK, weights, order, offsets), (stored_gate_up, stored_down, down_bias)
        lora = (gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b)
        ctx.save_for_backward(hidden, *routing, pre, *stored, *lora, h_gate_up, h_down)
        ctx.unit, ctx.weights_dtype, ctx.weights_shape = unit, top_k_weights.dtype, top_k_weights.shape
        ctx.scalings = gate_up_scaling, down_scaling
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(dy):
            return _backward(ctx, dy)


def _scaled(lora: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """An adapter's matrix in the dtype of the products, rounded once."""
    if scaling != 1.0:
        lora = lora.to(torch.promote_types(lora.dtype, torch.float32)) * scaling
    return lora.to(dtype).contiguous()


class _Adapter(NamedTuple):
    """A low-rank adapter of each expert, or none."""

    a: Tensor | None
    b: Tensor | None
    scaling: float

    def low(self, x: Tensor, slots: _Slots, gather: bool) -> tuple[Tensor | None, Tensor | None]:
        """h = s · A_e x of each sorted row, and B in the dtype of x; (None, None) without an adapter."""
        if self.a is None or self.b is None:
            return None, None
        h = grouped_product(x, _scaled(self.a, self.scaling, x.dtype), None, None, None, *slots, gather, False)
        return h, _scaled(self.b, 1.0, x.dtype)

    def low_gradient(self, dy: Tensor, slots: _Slots, gather: bool) -> tuple[Tensor | None, Tensor | None]:
        """g = B_eᵀ dy of each sorted row, and s · Aᵀ, whose product adds to dx; (None, None) without an adapter."""
        if self.a is None or self.b is None:
            return None, None
        b_t = _scaled(self.b, 1.0, dy.dtype).transpose(1, 2)
        g = grouped_product(dy, b_t, None, None, None, *slots, gather, False)
        return g, _scaled(self.a, self.scaling, dy.dtype).transpose(1, 2)


class _Slots(NamedTuple):
    """The slots sorted by expert."""

    order: Tensor
    offsets: Tensor
    top_k: int


def _backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
    hidden, experts_TK, weights, order, offsets, pre, stored_gate_up, stored_down, down_bias, *low_rank = (
        ctx.saved_tensors
    )
    gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b, h_gate_up, h_down = low_rank
    want_x, _, want_w, want_gate_up, want_down, want_b, want_c, *want_lora = ctx.needs_input_grad[:11]
    want_gate_up_a, want_gate_up_b, want_down_a, want_down_b = want_lora
    gate_up_scaling, down_scaling = ctx.scalings
    dtype, top_k = hidden.dtype, experts_TK.shape[1]
    sorted_slots = _Slots(order, offsets, top_k)
    gate_up_adapter = _Adapter(gate_up_lora_a, gate_up_lora_b, gate_up_scaling)
    down_adapter = _Adapter(down_lora_a, down_lora_b, down_scaling)
    want_dpre = want_x or want_gate_up or want_b or want_gate_up_a or want_gate_up_b
    dx = dw = d_gate_up = d_down = db = dc = None
    d_gate_up_a = d_gate_up_b = d_down_a = d_down_b = da = g = None
    if want_dpre or want_w or want_down_a:
        g, a_t = down_adapter.low_gradient(dy, sorted_slots, True)
        if want_dpre or want_w:
            weight = dense(ctx.make_down or stored_down, dtype).transpose(1, 2)
            da = grouped_product(dy, weight, None, g, a_t, order, offsets, top_k, True, False)
            del weight
    want_wy, dpre, wy, dweights = want_down or want_down_a, pre, pre, weights
    if want_dpre or want_wy or want_w:
        dpre, wy, dweights = expert_unit_bwd(pre, da, weights, order, offsets, *ctx.unit, want_dpre, want_wy, want_w)
    del da
    if want_w:
        if down_bias is not None:
            dweights = dweights + _bias_part(dy, down_bias, experts_TK).to(dweights.dtype)
        dw = dweights.view(ctx.weights_shape).to(ctx.weights_dtype)
    if want_down_a:
        d_down_a = grouped_weight_gradient(g, wy, offsets, down_lora_a).mul_(down_scaling)
    if want_down or want_down_b:
        rows = dy[order // top_k]
        if want_down:
            d_down = grouped_weight_gradient(rows, wy, offsets, stored_down)
        if want_down_b:
            d_down_b = grouped_weight_gradient(rows, (h_down * weights[order, None]).to(dtype), offsets, down_lora_b)
        del rows
    del wy, g
    if want_c:
        dc = grouped_sum(dy, weights, order, offsets, top_k, True)
    if want_b:
        db = grouped_sum(dpre, None, order, offsets, top_k, False)
    if want_x or want_gate_up_a:
        g, a_t = gate_up_adapter.low_gradient(dpre, sorted_slots, False)
    if want_gate_up_b:
        d_gate_up_b = grouped_weight_gradient(dpre, h_gate_up, offsets, gate_up_lora_b)
    if want_gate_up or want_gate_up_a:
        rows = hidden[order // top_k]
        if want_gate_up:
            d_gate_up = grouped_weight_gradient(dpre, rows, offsets, stored_gate_up)
        if want_gate_up_a:
            d_gate_up_a = grouped_weight_gradient(g, rows, offsets, gate_up_lora_a).mul_(gate_up_scaling)
        del rows
    if want_x:
        weight = dense(ctx.make_gate_up or stored_gate_up, dtype)
        slots = grouped_product(dpre, weight.transpose(1, 2), None, g, a_t, order, offsets, top_k, False, True)
        del dpre, weight
        dx = combine_slots(slots, None, experts_TK, offsets.shape[0] - 1)
    lora = (d_gate_up_a, d_gate_up_b, d_down_a, d_down_b)
    return dx, None, dw, d_gate_up, d_down, db, dc, *lora, *(None,) * 7


def _bias_part(dy: Tensor, down_bias: Tensor, experts_TK: Tensor) -> Tensor:
    """<dy, c_e> of every slot; 0 for a slot without an expert."""
    E = down_bias.shape[0]
    wide = torch.promote_types(dy.dtype, torch.float32)
    of_all = dy.to(wide) @ down_bias.to(wide).t()
    picked = of_all.gather(1, experts_TK.long().clamp(0, E - 1))
    return picked.masked_fill((experts_TK < 0) | (experts_TK >= E), 0.0).reshape(-1)


_experts = Differentiable(
    "experts",
    Experts.apply,
    "(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
    " Tensor? down_bias, Tensor? gate_up_lora_a, Tensor? gate_up_lora_b, Tensor? down_lora_a, Tensor? down_lora_b,"
    f" float gate_up_scaling, float down_scaling, {UNIT_SCHEMA}) -> Tensor",
)

_PLAIN_UNIT = ExpertUnit()


def experts(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    unit: ExpertUnit = _PLAIN_UNIT,
    transposed: bool = False,
    gate_up_lora_a: Tensor | None = None,
    gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    gate_up_scaling: float = 1.0,
    down_scaling: float = 1.0,
) -> Tensor:
    """The weighted sum of each token's experts, each expert a gated MLP, with low-rank adapters if there are any.

    Args:
        hidden: (T, H), fp16, bf16, fp32 or fp64. Under autocast, hidden and all weights are cast to autocast's dtype.
        top_k_index: (T, K), int32 or int64, the experts of each token. An index outside 0 ... E - 1 chooses no expert.
        top_k_weights: (T, K), any of the four dtypes; it multiplies the experts' results.
        gate_up: (E, 2F, H), the first projection of each expert: all rows of gate, then all of up, unless the unit says
            that they alternate. Or a function that returns it: it is called in the forward and in the backward, so
            that a 4-bit weight is dequantised for one product at a time. Such a weight is frozen.
        down: (E, H, F), the second projection, or a function that returns it.
        gate_up_bias: (E, 2F) or None.
        down_bias: (E, H) or None.
        unit: the gated unit; by default silu(gate) · up.
        transposed: gate_up is (E, H, 2F) and down is (E, F, H), as in GPT-OSS. They are read in place.
        gate_up_lora_a: (E, R, H), the first matrix of each expert's adapter of gate_up, in any of the four dtypes. It
            is cast to the products' dtype; its gradient has its own dtype. None: gate_up has no adapter.
        gate_up_lora_b: (E, 2F, R), the second matrix; given if and only if gate_up_lora_a is.
        down_lora_a: (E, R, F), likewise for down; the two ranks may differ.
        down_lora_b: (E, H, R).
        gate_up_scaling: multiplies the result of gate_up's adapter; PEFT's `lora_alpha / r`.
        down_scaling: multiplies the result of down's adapter.

    Returns:
        (T, H), in hidden's dtype.

    Raises:
        ShapeError: a tensor has the wrong shape, or the tensors are on several devices.
        DtypeError: a dtype is not supported.
        OptionError: top_k_index is not int32 or int64, a scaling is not a finite number, or one matrix of an adapter is
            given without the other.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    gate_up, down = _as_read(gate_up, transposed), _as_read(down, transposed)
    lora = (gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b)
    for name, scaling in (("gate_up_scaling", gate_up_scaling), ("down_scaling", down_scaling)):
        if not -math.inf < check_number(name, scaling) < math.inf:
            raise OptionError(f"{name}={scaling} must be finite.")
    _check(hidden, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias, lora)
    dtype = product_dtype(hidden, *(weight for weight in (gate_up, down) if isinstance(weight, Tensor)))
    if top_k_weights.dtype is torch.float64 and dtype is not torch.float64:
        top_k_weights = top_k_weights.float()  # no kernel computes in fp64
    if torch.compiler.is_compiling():  # an operator takes tensors only
        gate_up, down = (weight() if callable(weight) else weight for weight in (gate_up, down))
    arguments = (
        hidden.to(dtype), top_k_index, top_k_weights,
        gate_up if callable(gate_up) else gate_up.to(dtype), down if callable(down) else down.to(dtype),
        None if gate_up_bias is None else gate_up_bias.to(dtype), None if down_bias is None else down_bias.to(dtype),
        *lora, float(gate_up_scaling), float(down_scaling), *unit.values,
    )  # fmt: skip
    out: Tensor = _experts(*arguments) if torch.compiler.is_compiling() else Experts.apply(*arguments)
    return out.to(hidden.dtype)


def _as_read(weight: Weight, transposed: bool) -> Weight:
    """The weight with one row per output."""
    if not transposed:
        return weight
    if callable(weight):
        return lambda: weight().transpose(1, 2)
    return weight.transpose(1, 2) if weight.ndim == 3 else weight


def _check(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    lora: tuple[Tensor | None, ...],
) -> None:
    stored = [None if callable(weight) else weight for weight in (gate_up, down)]
    check_dtype(hidden, top_k_weights, *stored, gate_up_bias, down_bias, *lora)
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise OptionError(f"top_k_index is {top_k_index.dtype}; it must be int32 or int64.")
    for name, a, b in (("gate_up", *lora[:2]), ("down", *lora[2:])):
        if (a is None) != (b is None):
            raise OptionError(f"{name}_lora_{'b' if b is None else 'a'} is missing; an adapter has both matrices.")
    first = stored[0]
    if hidden.ndim != 2 or top_k_index.ndim != 2:
        raise ShapeError(
            f"hidden is {tuple(hidden.shape)} and top_k_index {tuple(top_k_index.shape)}; they must be (T, H) and "
            "(T, K)."
        )
    if first is not None and (first.ndim != 3 or not first.shape[0] or first.shape[1] % 2):
        raise ShapeError(f"gate_up is {tuple(first.shape)}; it must be (E, 2F, H) with at least one expert.")
    T, H = hidden.shape
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "top_k_index": (top_k_index, (T, top_k_index.shape[1])),
        "top_k_weights": (top_k_weights, tuple(top_k_index.shape)),
    }
    if first is not None:  # the shape of a weight that is made is known when it is made
        E, twice, _ = first.shape
        ranks = [0 if b is None else b.shape[-1] for b in (lora[1], lora[3])]
        wanted |= {
            "gate_up": (first, (E, twice, H)),
            "down": (stored[1], (E, H, twice // 2)),
            "gate_up_bias": (gate_up_bias, (E, twice)),
            "down_bias": (down_bias, (E, H)),
            "gate_up_lora_a": (lora[0], (E, ranks[0], H)),
            "gate_up_lora_b": (lora[1], (E, twice, ranks[0])),
            "down_lora_a": (lora[2], (E, ranks[1], twice // 2)),
            "down_lora_b": (lora[3], (E, H, ranks[1])),
        }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"{name} is {tuple(tensor.shape)}; with hidden {(T, H)} it must be {tuple(shape)}.")
        if tensor is not None and tensor.device != hidden.device:
            raise ShapeError(f"{name} is on {tensor.device} and hidden on {hidden.device}; move them to one device.")


def experts_oracle(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    unit: ExpertUnit = _PLAIN_UNIT,
    transposed: bool = False,
    gate_up_lora_a: Tensor | None = None,
    gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    gate_up_scaling: float = 1.0,
    down_scaling: float = 1.0,
) -> Tensor:
    """The unfused formula: a loop over the experts."""
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)

    def projected(
        e: int, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float
    ) -> Tensor:
        y = F.linear(x, weight[e], None if bias is None else bias[e])
        if a is None or b is None:
            return y
        return y + F.linear(F.linear(x, a[e].to(y.dtype)), b[e].to(y.dtype)) * scaling

    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(top_k_index == e)
        y = unit(projected(e, hidden[token], gate_up, gate_up_bias, gate_up_lora_a, gate_up_lora_b, gate_up_scaling))
        z = projected(e, y, down, down_bias, down_lora_a, down_lora_b, down_scaling)
        out = out.index_add(0, token, (z * top_k_weights[token, k, None]).to(out.dtype))
    return out


# --- the record ---


def _mxfp4(E: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes weights of MXFP4's format from random bytes, of about the size of `columns`."""
    packed = torch.randint(0, 256, (E, rows, columns // BLOCK, BLOCK // 2), dtype=torch.uint8, device=device)
    exponent = 125 - round(math.log2(columns) / 2)
    scales = torch.full(packed.shape[:-1], exponent, dtype=torch.uint8, device=device)
    code = torch.tensor(CODE, device=device)
    return lambda: mxfp4_weight(code, packed, scales, dtype)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (T, K, E, H). mxfp4: the weights are functions that make them."""
    T, K, E, H = case.shape
    options = dict(case.options)
    inner = options.pop("inner", 8)
    route, biased = options.pop("route", "random"), options.pop("biased", False)
    scale, weights_dtype = options.pop("scale", 1.0), options.pop("weights_dtype", dtype)
    transposed, lora = options.get("transposed", False), {}
    if rank := options.pop("rank", 0):
        adapter_dtype = options.pop("adapter_dtype", dtype)
        lora = {
            name: randn(E, rows, columns, dtype=adapter_dtype, device=device, scale=columns**-0.5)
            for name, rows, columns in (
                ("gate_up_lora_a", rank, H),
                ("gate_up_lora_b", 2 * inner, rank),
                ("down_lora_a", rank, inner),
                ("down_lora_b", H, rank),
            )
        }
    index = torch.rand(T, max(E, K), device=device).argsort(1)[:, :K] % E
    if route == "one":
        index = torch.full_like(index, E - 1)
    elif route == "half":  # every second expert has no tokens
        index = index // 2 * 2
    elif route == "outside":
        index[::3] = E
        index[1::3, 0] = -1
    gate_up: Weight = randn(E, 2 * inner, H, dtype=dtype, device=device, scale=scale * H**-0.5)
    down: Weight = randn(E, H, inner, dtype=dtype, device=device, scale=inner**-0.5)
    if options.pop("mxfp4", False):
        gate_up = _mxfp4(E, 2 * inner, H, dtype, device)
        down = _mxfp4(E, H, inner, dtype, device)
    elif transposed:
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return {
        "hidden": randn(T, H, dtype=dtype, device=device),
        "top_k_index": index,
        "top_k_weights": torch.rand(T, K, device=device).to(weights_dtype),
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": randn(E, 2 * inner, dtype=dtype, device=device) if biased else None,
        "down_bias": randn(E, H, dtype=dtype, device=device) if biased else None,
        **lora,
        **options,
    }


def _cost(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_lora_b: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    **options: object,
) -> Cost:
    S, H = top_k_index.numel(), hidden.shape[1]
    inner = gate_up.numel() // (2 * gate_up.shape[0] * H)
    slots = hidden.element_size() * S
    # per slot: x, pre, y, z forward; dy, da, pre, dpre, wy, x, dx backward. Weights: read twice, written once.
    moved = slots * (2 * H + 6 * inner) + slots * (5 * H + 11 * inner) + 3 * (gate_up.nbytes + down.nbytes)
    saved = hidden.nbytes + slots * 2 * inner + 24 * S
    flops = 18 * S * H * inner
    for b, outputs, inputs in ((gate_up_lora_b, 2 * inner, H), (down_lora_b, H, inner)):
        if b is not None:
            saved += slots * b.shape[-1]
            flops += 6 * S * b.shape[-1] * (outputs + inputs)
    return Cost(moved_bytes=moved, saved_bytes=saved, flops=flops)


EXPERTS = Op(
    name="experts",
    call=experts,
    oracle=experts_oracle,
    make=_make,
    grads=(
        "hidden", "top_k_weights", "gate_up", "down", "gate_up_bias", "down_bias",
        "gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b",
    ),
    case=Case(id="mixture", shape=(45, 2, 4, 24), options={"inner": 20}, product_orders=8),
    cost=_cost,
    # On an H100. The fp16 error is that of an adapter's gradient over nine tokens (lora-outside, down_lora_b).
    errors={"fp32": 3.6e-07, "bf16": 6.9e-03, "fp16": 1.4e-03},
)  # fmt: skip
