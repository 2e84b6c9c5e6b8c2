"""Linear layers with LoRA adapters that read the same input, such as q, k, v or gate and up, as one op:

    yᵢ = x Wᵢᵀ + bᵢ + sᵢ · (x Aᵢᵀ) Bᵢᵀ

`lora_linear` for each layer reads x once per adapter, writes one gradient of x per layer and adds them up. Here the
matrices Aᵢ are stacked to A, so that x is read once for all adapters, and the layers' products add to one gradient:

    forward     h = x Aᵀ            yᵢ = sᵢ · hᵢ Bᵢᵀ + bᵢ       yᵢ += x Wᵢᵀ
    backward    gᵢ = sᵢ · dyᵢ Bᵢ    dx = g A                    dx += dyᵢ Wᵢ        dA = gᵀ x       dBᵢ = sᵢ · dyᵢᵀ hᵢ

The weights are frozen. Every product is the vendor's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, first_order, no_autocast, product_dtype
from tigon.ops.linear.lora_linear import (
    Weight,
    check_lora_linear,
    dense,
    lora_linear,
    lora_linear_oracle,
    low_rank_into,
    scaled_product,
)
from tigon.ops.linear.nf4 import BLOCK, OUTER_BLOCK, nf4_weight

# N tokens, H input width, F output width of a layer, R rank of a layer, S sum of the ranks.


@dataclass(frozen=True)
class LoraLayer:
    """One of the layers that read the same input."""

    weight: Weight
    """(F, H), frozen; or a function that makes it for each product, such as the dequantisation of a 4-bit weight."""
    lora_a: Tensor
    """(R, H)."""
    lora_b: Tensor
    """(F, R)."""
    scaling: float = 1.0
    bias: Tensor | None = None
    """(F,)."""


class LoraLinears(torch.autograd.Function):
    """Tensors after `layers`: stored weights (None for those that are made), biases, Aᵢ, Bᵢ."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, layers: Sequence[LoraLayer], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        stored, biases, a_RH, b_FR = _parts(tensors)
        ctx.made = [layer.weight if callable(layer.weight) else None for layer in layers]
        weights = _weights(stored, ctx.made)
        ctx.scalings = [layer.scaling for layer in layers]
        ctx.spans = _spans([a.shape[0] for a in a_RH])
        x_NH = x.reshape(-1, x.shape[-1])
        with no_autocast(x):
            h_NS = x_NH @ _stacked(a_RH, x.dtype).t()
            results = []
            for i, b in enumerate(b_FR):
                y = x.new_empty(*x.shape[:-1], b.shape[0])
                y_NF = low_rank_into(
                    y.view(len(x_NH), b.shape[0]), h_NS[:, ctx.spans[i]], b.to(x.dtype), ctx.scalings[i], biases[i]
                )
                y_NF.addmm_(x_NH, dense(weights[i], x.dtype).t())
                results.append(y)
        ctx.save_for_backward(x, h_NS, *stored, *a_RH, *b_FR)
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx: Context, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, h_NS, *saved = ctx.saved_tensors
        n = len(dys)
        stored, a_RH, b_FR = saved[:n], saved[n : 2 * n], saved[2 * n :]
        weights = _weights(stored, ctx.made)
        want_x, _, *wanted = ctx.needs_input_grad
        want_biases, want_a, want_b = wanted[n : 2 * n], wanted[2 * n : 3 * n], wanted[3 * n :]
        dy_NF = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        dx: Tensor | None = None
        das: list[Tensor | None] = [None] * n
        d_biases: list[Tensor | None] = [None] * n
        dbs: list[Tensor | None] = [None] * n
        with no_autocast(x):
            if want_x or any(want_a):
                g_NS = torch.empty_like(h_NS)
                for i, dy in enumerate(dy_NF):
                    low_rank_into(g_NS[:, ctx.spans[i]], dy, b_FR[i].to(x.dtype).t(), ctx.scalings[i])
            if want_x:
                dx = g_NS @ _stacked(a_RH, x.dtype)
                for i, dy in enumerate(dy_NF):
                    dx.addmm_(dy, dense(weights[i], x.dtype))
                dx = dx.view(x.shape)
            if any(want_a):
                like = torch.empty(g_NS.shape[1], x.shape[-1], dtype=a_RH[0].dtype, device=x.device)
                da_SH = scaled_product(g_NS.t(), x.reshape(-1, x.shape[-1]), like, 1.0)
                das = [da_SH[span] if want else None for span, want in zip(ctx.spans, want_a, strict=True)]
            for i, dy in enumerate(dy_NF):
                if want_biases[i]:
                    d_biases[i] = dy.sum(0)
                if want_b[i]:
                    dbs[i] = scaled_product(dy.t(), h_NS[:, ctx.spans[i]], b_FR[i], ctx.scalings[i])
        return dx, None, *[None] * n, *d_biases, *das, *dbs


def _parts(tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], ...]:
    n = len(tensors) // 4
    return tuple(tensors[i * n : (i + 1) * n] for i in range(4))


def _weights(stored: Sequence[Tensor | None], made: Sequence[Callable[[], Tensor] | None]) -> list[Weight]:
    return [each if kept is None else kept for kept, each in zip(stored, made, strict=True)]  # type: ignore[misc]


def _spans(ranks: Sequence[int]) -> list[slice]:
    ends = list(itertools.accumulate(ranks))
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def _stacked(a_RH: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([a.to(dtype) for a in a_RH])


def lora_linears(x: Tensor, layers: Sequence[LoraLayer]) -> tuple[Tensor, ...]:
    """Linear layers with low-rank adapters that read the same input.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64.
        layers: at least one. Their weights and the dtypes are as for `lora_linear`. The matrices A have one dtype.

    Returns:
        (..., F) for each layer, in the dtype of the products. Up to rounding these are the results of `lora_linear`.

    Raises:
        ShapeError: a tensor has the wrong shape, or the tensors are on several devices.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64.
        OptionError: layers is empty, a scaling is not a finite number, a weight requires a gradient, or the matrices
            A or the products have several dtypes.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    if not layers:
        raise OptionError("layers is empty; give at least one LoraLayer.")
    for layer in layers:
        check_lora_linear(x, layer.weight, layer.lora_a, layer.lora_b, layer.bias, None, layer.scaling)
        if isinstance(layer.weight, Tensor) and layer.weight.requires_grad:
            raise OptionError("a weight of lora_linears requires a gradient; use lora_linear for this layer.")
    dtypes = {product_dtype(x) if callable(each.weight) else product_dtype(x, each.weight) for each in layers}
    if len(dtypes) > 1 or len({layer.lora_a.dtype for layer in layers}) > 1:
        raise OptionError("the layers of lora_linears differ in their dtype; use lora_linear for each of them.")
    if x.ndim == 1:
        raise ShapeError(f"x is {tuple(x.shape)}; lora_linears takes (..., N, H).")
    if torch.compiler.is_compiling():
        return tuple(
            lora_linear(x, each.weight, each.lora_a, each.lora_b, scaling=each.scaling, bias=each.bias)
            for each in layers
        )
    (dtype,) = dtypes
    stored = [None if callable(each.weight) else each.weight.to(dtype) for each in layers]
    biases = [None if each.bias is None else each.bias.to(dtype) for each in layers]
    adapters = [each.lora_a for each in layers], [each.lora_b for each in layers]
    results: tuple[Tensor, ...] = LoraLinears.apply(x.to(dtype), layers, *stored, *biases, *adapters[0], *adapters[1])
    return results


# --- the record: two layers, the second one with a bias in some cases -------------------------------------------------


def _layers(tensors: dict[str, Any]) -> list[LoraLayer]:
    return [
        LoraLayer(
            weight=tensors[f"weight_{i}"],
            lora_a=tensors[f"lora_a_{i}"],
            lora_b=tensors[f"lora_b_{i}"],
            scaling=tensors.get(f"scaling_{i}", 1.0),
            bias=tensors.get(f"bias_{i}"),
        )
        for i in range(2)
    ]


def _call(x: Tensor, **tensors: Any) -> tuple[Tensor, ...]:
    return lora_linears(x, _layers(tensors))


def _oracle(x: Tensor, **tensors: Any) -> tuple[Tensor, ...]:
    return tuple(
        lora_linear_oracle(
            x, dense(each.weight, x.dtype), each.lora_a, each.lora_b, scaling=each.scaling, bias=each.bias
        )
        for each in _layers(tensors)
    )


def _nf4(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes a weight of NF4's format from random bytes."""
    blocks = rows * columns // BLOCK
    stored = (
        torch.linspace(-1, 1, 16, device=device),
        torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device=device),
        torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device),
        torch.linspace(-0.1, 0.1, 256, device=device),
        torch.full((-(-blocks // OUTER_BLOCK),), columns**-0.5, device=device),
        torch.tensor(columns**-0.5, device=device),
    )
    return lambda: nf4_weight(*stored, rows, columns, dtype)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, F_0, F_1, R = case.shape
    options = dict(case.options)
    adapter_dtype = options.pop("adapter_dtype", dtype)
    has_bias, nf4 = options.pop("bias", False), options.pop("nf4", False)
    tensors: dict[str, Any] = {"x": randn(*rows, H, dtype=dtype, device=device)}
    for i, F_ in enumerate((F_0, F_1)):
        rank = R + 2 * i
        tensors[f"weight_{i}"] = (
            _nf4(F_, H, dtype, device) if nf4 else randn(F_, H, dtype=dtype, device=device, scale=H**-0.5)
        )
        tensors[f"lora_a_{i}"] = randn(rank, H, dtype=adapter_dtype, device=device, scale=H**-0.5)
        tensors[f"lora_b_{i}"] = randn(F_, rank, dtype=adapter_dtype, device=device, scale=rank**-0.5)
    tensors["bias_1"] = randn(F_1, dtype=dtype, device=device) if has_bias else None
    return {**tensors, **options}


def _cost(x: Tensor, **tensors: Any) -> Cost:
    H, moved_bytes, flops, rank = x.shape[-1], 3 * x.nbytes, 0, 0
    N = x.numel() // H
    for i in range(2):
        R, F_ = tensors[f"lora_a_{i}"].shape[0], tensors[f"lora_b_{i}"].shape[0]
        moved_bytes += 2 * F_ * (H + N) * x.element_size()
        flops += 4 * N * F_ * H + 6 * N * R * (F_ + H)
        rank += R
    return Cost(moved_bytes=moved_bytes, saved_bytes=x.nbytes + N * rank * x.element_size(), flops=flops)


LORA_LINEARS = Op(
    name="lora_linears",
    call=_call,
    oracle=_oracle,
    make=_make,
    grads=("x", "lora_a_0", "lora_b_0", "lora_a_1", "lora_b_1", "bias_1"),
    case=Case(id="two-ranks", shape=(3, 7, 24, 40, 16, 4), options={"scaling_0": 2.0, "scaling_1": 0.5}),
    cost=_cost,
    has_kernel=False,
    # On an H100.
    errors={"fp32": 1.2e-06, "bf16": 3.8e-03, "fp16": 4.6e-04},
)
