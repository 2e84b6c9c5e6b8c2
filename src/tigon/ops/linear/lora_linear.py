"""A linear layer with a low-rank adapter (LoRA, Hu et al. 2021, arXiv 2106.09685, eq. 3):

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ

PEFT computes the adapter as separate layers. With fp32 adapters under autocast it casts x to fp32 and back, and it
multiplies and adds whole activations. Here a pass takes the products alone. The adapter's thin product writes the
result, and the layer's product adds to it:

    forward     h = x Aᵀ            y = s · h Bᵀ + b         y += x Wᵀ
    backward    g = dy B            dx = s · g A             dx += dy W         dA = s · gᵀ x        dB = s · dyᵀ h

In this order y is written once and read while the large product computes. The other order reads and writes y once more
in the thin product, which waits for memory. The small addend is also the one that is rounded to 16 bits.

With `fp8`, the factors of x Wᵀ and dy W are rounded to FP8, as in `fp8_linear.py`. The adapter's products, and the
gradient of a weight that is trained beside its adapter, are not.

Every product is the vendor's, without a kernel of tigon. Under torch.compile the op is the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    check_dtype,
    check_number,
    first_order,
    no_autocast,
    planned_device,
    product_dtype,
)
from tigon.ops.linear.fp8 import operand
from tigon.ops.linear.fp8_linear import check_scaling, factors_of, forward_product, fp8_linear, input_gradient
from tigon.ops.products import product_into

# N tokens, H input width, F output width, R rank.


Weight = Tensor | Callable[[], Tensor]
"""A weight (F, H), or a function that makes it, such as the dequantisation of a 4-bit weight."""


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight of a product. A weight that is made lives for one product, as in bitsandbytes."""
    return (weight() if callable(weight) else weight).to(dtype)


def low_rank_into(y_NF: Tensor, h_NR: Tensor, b_FR: Tensor, scaling: float, bias: Tensor | None = None) -> Tensor:
    """scaling · h Bᵀ + bias, written to y."""
    if bias is None:
        return y_NF.addmm_(h_NR, b_FR.t(), beta=0, alpha=scaling)  # with beta=0, what y holds is not read
    return torch.addmm(bias, h_NR, b_FR.t(), alpha=scaling, out=y_NF)


class Saved(torch.autograd.Function):
    """A node that saves what a layer's backward needs before the layer computes its large product.

    A recomputation ends when all tensors are saved. A function saves its own after its forward, so that the product of
    the last layer would be computed for nothing.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, *more: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *more)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


def saves_early(*tensors: Tensor | None) -> bool:
    """Whether saved tensors go to hooks, such as those of activation checkpointing, and there is a graph."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (
        top is not None
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
        and top(False) is not None
    )


def _low(x: Tensor, lora_a_RH: Tensor, adapter_x: Tensor | None) -> Tensor:
    """h = x Aᵀ, (N, R)."""
    with no_autocast(x):
        return F.linear(x if adapter_x is None else adapter_x, lora_a_RH.to(x.dtype)).flatten(0, -2)


class LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        lora_a_RH: Tensor,
        lora_b_FR: Tensor,
        adapter_x: Tensor | None,
        scaling: float,
        fp8: str | None = None,
        early: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """early: the result of `Saved`, and h."""
        stored_FH, ctx.made = (None, weight) if callable(weight) else (weight, None)
        b_FR = lora_b_FR.to(x.dtype)
        ctx.saved, h_NR = (None, _low(x, lora_a_RH, adapter_x)) if early is None else early
        with no_autocast(x):
            # y has x's leading dimensions from the start: a view of it would show a gated unit two holders.
            if fp8 is None:
                y, amax = x.new_empty(*x.shape[:-1], b_FR.shape[0]), None
                y_NF = low_rank_into(y.view(len(h_NR), b_FR.shape[0]), h_NR, b_FR, scaling, bias)
                y_NF.addmm_(x.reshape(-1, x.shape[-1]), dense(weight, x.dtype).t())
            else:
                factors = factors_of(x, dense(weight, x.dtype), fp8, columns=False)
                y, amax = forward_product(factors, x, bias), factors.weight_amax
                del factors
                y.view(-1, y.shape[-1]).addmm_(h_NR, b_FR.t(), alpha=scaling)
        if early is None:
            ctx.save_for_backward(x, stored_FH, lora_a_RH, lora_b_FR, adapter_x, h_NR, amax)
        ctx.scaling, ctx.fp8 = scaling, fp8
        return y

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, stored_FH, lora_a_RH, lora_b_FR, adapter_x, h_NR, amax = saved_tensors(ctx)
        weight: Weight = stored_FH if ctx.made is None else ctx.made
        want_x, want_weight, want_bias, want_a, want_b, want_entering, *_ = ctx.needs_input_grad
        s: float = ctx.scaling
        apart = adapter_x is not None
        dx = dw = db = da = d_b = d_entering = None
        dy_NF = dy.reshape(-1, dy.shape[-1])
        with no_autocast(x):
            g_NR = dy_NF @ lora_b_FR.to(x.dtype) if want_a or want_entering or (want_x and not apart) else None
            if want_x:
                if ctx.fp8 is not None:
                    cast = operand(dy_NF, ctx.fp8, rows=True, columns=False, gradient=True)
                    weight_FH = dense(weight, x.dtype)
                    dx = input_gradient(cast, weight_FH, amax, ctx.fp8, [dy_NF.shape[0]])
                    del weight_FH
                    if not apart and g_NR is not None:
                        dx.addmm_(g_NR, lora_a_RH.to(x.dtype), alpha=s)
                elif apart or g_NR is None:
                    dx = dy_NF @ dense(weight, x.dtype)
                else:
                    dx = low_rank_into(x.new_empty(dy_NF.shape[0], x.shape[-1]), g_NR, lora_a_RH.to(x.dtype).t(), s)
                    dx.addmm_(dy_NF, dense(weight, x.dtype))
                dx = dx.view(x.shape)
            if want_entering:
                d_entering = (g_NR @ lora_a_RH.to(x.dtype)).mul_(s).view(x.shape)
            if want_weight:
                dw = dy_NF.t() @ x.flatten(0, -2)
            if want_bias:
                db = dy_NF.sum(0)
            if want_a and g_NR is not None:
                da = scaled_product(g_NR.t(), (adapter_x if apart else x).flatten(0, -2), lora_a_RH, s)
            if want_b:
                d_b = scaled_product(dy_NF.t(), h_NR, lora_b_FR, s)
        return dx, dw, db, da, d_b, d_entering, None, None, None


def saved_tensors(ctx: Context) -> tuple[Any, ...]:
    """The tensors that a node or its `Saved` kept. Those of `Saved` are released as the node's own would be."""
    if ctx.saved is None:
        return ctx.saved_tensors
    if ctx.saved is _RELEASED:
        raise RuntimeError("lora_linear: the graph was freed by an earlier backward; call that one with retain_graph.")
    tensors: tuple[Any, ...] = ctx.saved.grad_fn.saved_tensors
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.saved = _RELEASED
    return tensors


_RELEASED = object()


def scaled_product(left: Tensor, right: Tensor, like: Tensor, scaling: float) -> Tensor:
    """scaling · left @ right in the dtype of `like`. An fp32 adapter's gradient is never rounded to 16 bits."""
    if planned_device(left) != left.device.type:
        # A plan for a GPU traces on the CPU, whose product into fp32 casts both factors. A GPU's does not.
        return (left @ right).to(like.dtype).mul_(scaling)
    gradient = torch.empty_like(like, memory_format=torch.contiguous_format)
    product_into(left, right, gradient, accumulate=False)
    return gradient.mul_(scaling)


def lora_linear(
    x: Tensor,
    weight: Weight,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scaling: float = 1.0,
    bias: Tensor | None = None,
    adapter_x: Tensor | None = None,
    fp8: str | None = None,
) -> Tensor:
    """A linear layer and its low-rank adapter: x @ weight.T + bias + scaling · (x @ lora_a.T) @ lora_b.T.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64.
        weight: (F, H), frozen or trained. If its dtype differs from x's, both are promoted. Under autocast x, weight
            and bias are cast to autocast's dtype, as in F.linear. Or a function that returns the weight: it is called
            for each product, so that a 4-bit weight is dequantised in the forward and in the backward. It is frozen.
        lora_a: (R, H), the adapter's first matrix, in any of the four dtypes. It is cast to the products' dtype; its
            gradient has its own dtype.
        lora_b: (F, R), the second matrix, likewise.
        scaling: multiplies the adapter's result; PEFT's `lora_alpha / r`.
        bias: (F,) or None.
        adapter_x: (..., H), what the adapter reads instead of x, such as x after dropout.
        fp8: "tensorwise" or "rowwise": the weight's products with x and with the gradient have FP8 factors, as in
            `fp8_linear`. None: they have not.

    Returns:
        (..., F), in the dtype of the products.

    Raises:
        ShapeError: a tensor has the wrong shape, or the tensors are on several devices.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64.
        OptionError: scaling is not a finite number, or fp8 is another word.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    if fp8 is not None:
        check_scaling(fp8)
    check_lora_linear(x, weight, lora_a, lora_b, bias, adapter_x, scaling)
    dtype = product_dtype(x) if callable(weight) else product_dtype(x, weight)
    x, weight = x.to(dtype), weight if callable(weight) else weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    adapter_x = None if adapter_x is None else adapter_x.to(dtype)
    if torch.compiler.is_compiling():
        entering = x if adapter_x is None else adapter_x
        low = F.linear(F.linear(entering, lora_a.to(dtype)), lora_b.to(dtype))
        weight_FH = dense(weight, dtype)
        wide = F.linear(x, weight_FH, bias) if fp8 is None else fp8_linear(x, weight_FH, bias, scaling=fp8)
        return wide + low * scaling
    one_row = x.ndim == 1
    if one_row:
        x, adapter_x = x.unsqueeze(0), None if adapter_x is None else adapter_x.unsqueeze(0)
    early = None
    if fp8 is None and saves_early(x, lora_a, lora_b):
        stored = None if callable(weight) else weight
        with torch.no_grad():
            h_NR = _low(x, lora_a, adapter_x)
        early = Saved.apply(x, stored, lora_a, lora_b, adapter_x, h_NR, None), h_NR
    y: Tensor = LoraLinear.apply(x, weight, bias, lora_a, lora_b, adapter_x, float(scaling), fp8, early)
    return y.squeeze(0) if one_row else y


def check_lora_linear(
    x: Tensor,
    weight: Weight,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None,
    adapter_x: Tensor | None,
    scaling: float,
) -> None:
    """Raise the errors that `lora_linear` names."""
    if not -math.inf < check_number("scaling", scaling) < math.inf:
        raise OptionError(f"scaling={scaling} must be finite.")
    stored = None if callable(weight) else weight
    check_dtype(x, stored, lora_a, lora_b, bias, adapter_x)
    if stored is not None and (x.ndim == 0 or stored.ndim != 2 or stored.shape[1] != x.shape[-1]):
        raise ShapeError(f"x is {tuple(x.shape)}, weight is {tuple(stored.shape)}; they must be (..., H) and (F, H).")
    if x.ndim == 0 or lora_b.ndim != 2:
        raise ShapeError(f"x is {tuple(x.shape)}, lora_b is {tuple(lora_b.shape)}; they must be (..., H) and (F, R).")
    F_, H = (lora_b.shape[0], x.shape[-1]) if stored is None else stored.shape
    if lora_a.ndim != 2 or lora_b.ndim != 2 or lora_a.shape[1] != H or lora_b.shape != (F_, lora_a.shape[0]):
        raise ShapeError(
            f"lora_a is {tuple(lora_a.shape)}, lora_b is {tuple(lora_b.shape)}; for a weight of {(F_, H)} they must be "
            f"(R, {H}) and ({F_}, R)."
        )
    if bias is not None and bias.shape != (F_,):
        raise ShapeError(f"bias is {tuple(bias.shape)}; it must be {(F_,)}.")
    if adapter_x is not None and adapter_x.shape != x.shape:
        raise ShapeError(f"adapter_x is {tuple(adapter_x.shape)}, x is {tuple(x.shape)}; they must agree.")
    for name, t in {"weight": stored, "lora_a": lora_a, "lora_b": lora_b, "bias": bias, "adapter_x": adapter_x}.items():
        if t is not None and t.device != x.device:
            raise ShapeError(f"{name} is on {t.device}, x is on {x.device}; move one of them.")


# --- the record -------------------------------------------------------------------------------------------------------


def lora_linear_oracle(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scaling: float = 1.0,
    bias: Tensor | None = None,
    adapter_x: Tensor | None = None,
) -> Tensor:
    """PEFT's order: two layers for the adapter, cast as autocast does, then a product and a sum of activations."""
    y = F.linear(x, weight, bias)
    entering = x if adapter_x is None else adapter_x
    return y + F.linear(F.linear(entering, lora_a.to(y.dtype)), lora_b.to(y.dtype)) * scaling


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, F_, R = case.shape
    options = dict(case.options)
    has_bias, apart = options.pop("bias", False), options.pop("adapter_x", False)
    adapter_dtype = options.pop("adapter_dtype", dtype)
    return {
        "x": randn(*rows, H, dtype=dtype, device=device),
        "weight": randn(F_, H, dtype=dtype, device=device, scale=H**-0.5),
        "lora_a": randn(R, H, dtype=adapter_dtype, device=device, scale=H**-0.5),
        "lora_b": randn(F_, R, dtype=adapter_dtype, device=device, scale=R**-0.5),
        "bias": randn(F_, dtype=dtype, device=device) if has_bias else None,
        "adapter_x": randn(*rows, H, dtype=dtype, device=device) if apart else None,
        **options,
    }


def _cost(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, *_: object, **__: object) -> Cost:
    # Forward y; backward dx of a frozen weight. Each is one large product and two of rank R; dA and dB are two more.
    (F_, H), R = weight.shape, lora_a.shape[0]
    N = x.numel() // H
    y_bytes = N * F_ * x.element_size()
    return Cost(
        moved_bytes=3 * x.nbytes + 2 * y_bytes + 2 * weight.nbytes,
        saved_bytes=x.nbytes + N * R * x.element_size(),
        flops=4 * N * F_ * H + 6 * N * R * (F_ + H),
    )


LORA_LINEAR = Op(
    name="lora_linear",
    call=lora_linear,
    oracle=lora_linear_oracle,
    make=_make,
    grads=("x", "weight", "lora_a", "lora_b", "bias", "adapter_x"),
    case=Case(id="rank-4", shape=(3, 7, 24, 40, 4), options={"scaling": 2.0}),
    cost=_cost,
    has_kernel=False,
    errors={"fp32": 5.7e-07, "bf16": 3.3e-03, "fp16": 3.8e-04},
)
