"""A linear layer whose three products have FP8 factors and results in x's dtype:

    y  = Q(x) Q(W)ᵀ + b        dx = Q(dy) Q(Wᵀ)ᵀ        dW = Q(dyᵀ) Q(xᵀ)ᵀ        db = Σ dy

Q rounds a factor to FP8 with scales from its own values (`fp8.py`). The backward is the derivative of the products
as if Q were the identity. The weight keeps its dtype: it is cast again in each pass, because a second copy of all
weights would take more memory than the casts take time. A recomputation casts it both ways in one pass, because the
backward pass follows. It takes the largest magnitudes from the first run, which in turn leaves out the transposed x.

For dW the forward keeps x in FP8, transposed: half the bytes of x in bf16. Layers that share their input, such as the
query, key and value projections, share its cast.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from tigon.errors import OptionError, ShapeError
from tigon.ops import known_amax, recomputation
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, check_dtype, first_order, no_autocast, product_dtype
from tigon.ops.linear.fp8 import SCALINGS, Operand, fp8_amax, fp8_product, operand, transposed_rows

# N tokens, H input width, F output width.

FAST_FORWARD = True
"""The forward product sums in the tensor cores' accumulators; gradients, which cancel more, in fp32."""


# --- the cast of an input that several layers share -------------------------------------------------------------------


class _Kept(NamedTuple):
    of: weakref.ref[Tensor]
    version: int
    scaling: str
    capturing: bool
    run: recomputation.Run
    operand: Operand
    amax: Tensor


_NOTHING = Operand(None, None, None, None)


class _LastCast(threading.local):
    """The last input that was cast, until another is cast or the input dies."""

    kept: _Kept | None = None


_last = _LastCast()


def _amax(x_MK: Tensor, scaling: str, found: Tensor | None = None) -> Tensor:
    """found: what the kernel that wrote x has found."""
    return recomputation.keep(lambda: fp8_amax(x_MK, scaling == "rowwise") if found is None else found)


def _found(x: Tensor, scaling: str) -> Tensor | None:
    return known_amax.noted(x) if scaling == "tensorwise" else None


def _input_operand(x: Tensor, scaling: str, columns: bool, rows: bool) -> Operand:
    """The FP8 operand of a layer's input; that of the last call if x is the same tensor with the same values."""
    x_NH = x.reshape(-1, x.shape[-1])
    if type(x) not in (Tensor, FakeTensor) or x.is_inference():
        return operand(x_NH, scaling, rows=rows, columns=columns, amax=_amax(x_NH, scaling))
    # A captured CUDA graph must contain the cast, so it cannot use one that ran before the capture.
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    # A first run and its recomputation must keep and take the same magnitudes, so they share no cast with other runs.
    # Each layer keeps them, because a recomputation may cast where the first run has shared a cast.
    kept, run = _last.kept, recomputation.current()
    if kept is not None and not (kept.of() is x and (x._version, scaling, capturing) == kept[1:4] and kept.run is run):
        kept = None
    amax = _amax(x_NH, scaling, _found(x, scaling) if kept is None else kept.amax)
    if kept is not None and (kept.operand.columns is not None or not columns):
        return kept.operand
    if not rows:
        return operand(x_NH, scaling, rows=False, columns=True, amax=amax) if columns else _NOTHING
    cast = operand(x_NH, scaling, rows=True, columns=columns, amax=amax)
    cast = cast if columns else Operand(cast.rows, None, cast.row_scales, None)

    def forget(reference: weakref.ref[Tensor], last: _LastCast = _last) -> None:
        if last.kept is not None and last.kept.of is reference:
            last.kept = None

    _last.kept = _Kept(weakref.ref(x, forget), x._version, scaling, capturing, run, cast, amax)
    return cast


# --- the three products -----------------------------------------------------------------------------------------------


class Factors(NamedTuple):
    x: Operand
    weight: Operand
    weight_amax: Tensor


def factors_of(
    x: Tensor, weight_FH: Tensor, scaling: str, *, columns: bool, weight_columns: bool = False, rows: bool = True
) -> Factors:
    """Q(x) and Q(W). columns: whether x is also cast for the weight's gradient; weight_columns: W for x's.

    rows: whether both are cast for the forward product.
    """
    cast = _input_operand(x, scaling, columns, rows)
    amax = _amax(weight_FH, scaling)
    return Factors(cast, operand(weight_FH, scaling, rows=rows, columns=weight_columns, amax=amax), amax)


def forward_product(factors: Factors, x: Tensor, bias: Tensor | None) -> Tensor:
    """Q(x) Q(W)ᵀ + b, with x's leading dimensions and dtype."""
    cast, w, _ = factors
    return fp8_product(  # type: ignore[no-any-return]
        cast.rows, w.rows, cast.row_scales, w.row_scales, bias, list(x.shape[:-1]), x.dtype, FAST_FORWARD
    )


def input_gradient(
    dy: Operand,
    weight_FH: Tensor,
    amax: Tensor,
    scaling: str,
    leading: list[int],
    columns: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Q(dy) Q(Wᵀ)ᵀ. amax: that of the weight, from the forward; columns, scales: Q(Wᵀ), if it is there already."""
    if columns is None:
        w = operand(weight_FH, scaling, rows=False, columns=True, amax=amax)
        columns, scales = w.columns, w.column_scales
    # W's transposed rows are as long as dy's, unless the output width is not a multiple of 16.
    if columns is not None and dy.rows is not None and columns.shape[1] != dy.rows.shape[1]:
        columns = columns[:, : dy.rows.shape[1]]
    return fp8_product(  # type: ignore[no-any-return]
        dy.rows, columns, dy.row_scales, scales, None, leading, weight_FH.dtype, False
    )


_Columns = tuple[Tensor | None, Tensor | None]


def _columns_of(cast: Operand, of: Tensor, scaling: str) -> _Columns:
    """The transposed operand; if it was left out, because saved tensors are dropped, tensors of its shapes."""
    if not recomputation.current().drops_saved or cast.row_scales is None or cast.rows is None:
        return cast.columns, cast.column_scales
    K = of.shape[-1]
    columns = cast.rows.new_empty(1).expand(K, transposed_rows(of.numel() // max(K, 1)))
    return columns, cast.row_scales.new_empty(1).expand(K if scaling == "rowwise" else 1)


def _factors_and_saved(
    ctx: Context, x: Tensor, weight: Tensor, scaling: str
) -> tuple[Factors, tuple[Tensor | None, ...]]:
    """The factors of the forward product, and what the backward needs."""
    want_x, want_weight, *_ = ctx.needs_input_grad
    run = recomputation.current()
    # Both runs of a recomputed layer save the transposed weight: the first its shape, the second its values.
    now = want_x and (run.drops_saved or run.backward_follows)
    # The weight and its amax, and two tensors for each transposed factor. If they are the last, there is no product.
    is_last = run.unsaved is not None and run.unsaved() == 2 + 2 * (want_weight + now)
    with no_autocast(x):
        factors = factors_of(
            x,
            weight,
            scaling,
            columns=want_weight and not run.drops_saved,
            weight_columns=now and not run.drops_saved,
            rows=not is_last,
        )
    of_x = _columns_of(factors.x, x, scaling) if want_weight else (None, None)
    of_weight = _columns_of(factors.weight, weight, scaling) if now else (None, None)
    return factors, (weight, factors.weight_amax, *of_x, *of_weight)


class _Saved(torch.autograd.Function):
    """A node that saves what a layer's backward needs before the layer computes its product.

    A recomputation ends when all tensors are saved. A function saves its own after its forward, so that the last
    layer's product would be computed for nothing.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, scaling: str, factors: list[Factors]) -> Tensor:
        made, saved = _factors_and_saved(ctx, x, weight, scaling)
        factors.append(made)
        ctx.save_for_backward(*saved)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: str,
        saved: tuple[Tensor, Factors] | None = None,
    ) -> Tensor:
        ctx.scaling, ctx.shape, ctx.saved = scaling, x.shape, None
        if saved is None:
            factors, of_backward = _factors_and_saved(ctx, x, weight, scaling)
            ctx.save_for_backward(*of_backward)
        else:
            ctx.saved, factors = saved
        with no_autocast(x):
            return forward_product(factors, x, bias)

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors if ctx.saved is None else ctx.saved.grad_fn.saved_tensors
        weight, amax, x_columns, x_scales, w_columns, w_scales = saved
        want_x, want_weight, want_bias, *_ = ctx.needs_input_grad
        scaling, dx, dw, db = ctx.scaling, None, None, None
        dy_NF = dy.reshape(-1, dy.shape[-1])
        with no_autocast(dy):
            if want_x or want_weight:
                cast = operand(
                    dy_NF, scaling, rows=want_x, columns=want_weight, amax=_found(dy, scaling), gradient=True
                )
            if want_x:
                dx = input_gradient(cast, weight, amax, scaling, list(ctx.shape[:-1]), w_columns, w_scales)
            if want_weight:
                dw = fp8_product(
                    cast.columns, x_columns, cast.column_scales, x_scales, None, [weight.shape[0]], weight.dtype, False
                )
            if want_bias:
                db = dy_NF.sum(0)
        return (dx, dw, db, None, None)[: len(ctx.needs_input_grad)]


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str) -> Tensor:
    follows = recomputation.current().backward_follows
    if not follows or not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return _wanting(Fp8Linear.apply(x, weight, bias, scaling), scaling)
    factors: list[Factors] = []
    saved = _Saved.apply(x, weight, scaling, factors)
    return _wanting(Fp8Linear.apply(x, weight, bias, scaling, (saved, factors[0])), scaling)


def _wanting(y: Tensor, scaling: str) -> Tensor:
    if scaling == "tensorwise" and y.requires_grad:
        known_amax.want_for_gradient(y)
    return y


_fp8_linear = Differentiable(
    "fp8_linear", Fp8Linear.apply, "(Tensor x, Tensor weight, Tensor? bias, str scaling) -> Tensor"
)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: str = "tensorwise") -> Tensor:
    """A linear layer with FP8 factors: x @ weight.T + bias, each factor rounded to FP8 with scales from its values.

    On NVIDIA GPUs from Ada (8.9) on, bf16 tensors whose widths are multiples of 16 use the FP8 tensor cores. Other
    devices, dtypes and widths compute the same rounded factors' product without them, which is not faster than
    `F.linear`.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64.
        weight: (F, H). If its dtype differs from x's, both are promoted. Under autocast x, weight and bias are cast to
            autocast's dtype, as in F.linear.
        bias: (F,) or None; it is not rounded to FP8.
        scaling: "tensorwise": one scale per tensor. "rowwise": one scale per row along the summed dimension, which is
            more accurate and slower.

    Returns:
        (..., F), in the dtype of the products.

    Raises:
        ShapeError: a tensor has the wrong shape, or the tensors are on several devices.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64.
        OptionError: scaling is another word.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_scaling(scaling)
    check_dtype(x, weight, bias)
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(f"x is {tuple(x.shape)}, weight is {tuple(weight.shape)}; they must be (..., H) and (F, H).")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ShapeError(f"bias is {tuple(bias.shape)}; it must be {(weight.shape[0],)}.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.device != x.device:
            raise ShapeError(f"{name} is on {t.device}, x is on {x.device}; move one of them.")
    dtype = product_dtype(x, weight)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():
        weight = weight.detach()  # a function's `needs_input_grad` does not know of no_grad
    run = _fp8_linear if torch.compiler.is_compiling() else _run
    if x.ndim == 1:
        return run(x.unsqueeze(0), weight, bias, scaling).squeeze(0)
    return run(x, weight, bias, scaling)


def check_scaling(scaling: str) -> None:
    """Raise `OptionError` for a scaling that is not in `SCALINGS`."""
    if scaling not in SCALINGS:
        raise OptionError(f"scaling={scaling!r}; choose one of {', '.join(SCALINGS)}.")


# --- the record -------------------------------------------------------------------------------------------------------


def _rounded(x: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    """x after rounding to FP8 with a scale per slice along `dim`, or one scale."""
    wide = x.float()
    if not x.numel():
        return x
    amax = (wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)).clamp_min(1e-30)
    largest = torch.full_like(amax, torch.finfo(dtype).max)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    return ((wide * (largest / amax)).to(dtype).to(exact) * (amax / largest).to(exact)).to(x.dtype)


class _Unfused(torch.autograd.Function):
    """The formula with factors that were rounded to FP8 and cast back."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        x_NH, e4m3 = x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn
        across = 1 if scaling == "rowwise" else None
        y = F.linear(_rounded(x_NH, across, e4m3), _rounded(weight, across, e4m3), bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_NH, dy_NF, e4m3 = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), torch.float8_e4m3fn
        rowwise = ctx.scaling == "rowwise"
        across, down, of_gradient = (1, 0, e4m3) if rowwise else (None, None, torch.float8_e5m2)
        dx = _rounded(dy_NF, across, of_gradient) @ _rounded(weight, down, e4m3)
        dw = _rounded(dy_NF, down, of_gradient).t() @ _rounded(x_NH, down, e4m3)
        return dx.view(x.shape), dw, dy_NF.sum(0) if ctx.needs_input_grad[2] else None, None


def fp8_linear_oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: str = "tensorwise") -> Tensor:
    """The products of the rounded factors. The rounding to FP8 is no error here: `quantisation_errors` records it."""
    return _Unfused.apply(x, weight, bias, scaling)  # type: ignore[no-any-return]


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, F_ = case.shape
    options = dict(case.options)
    has_bias = options.pop("bias", False)
    return {
        "x": randn(*rows, H, dtype=dtype, device=device),
        "weight": randn(F_, H, dtype=dtype, device=device, scale=H**-0.5),
        "bias": randn(F_, dtype=dtype, device=device) if has_bias else None,
        **options,
    }


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Cost:
    # Each of x, W and dy is read for amax and for the cast, W in both passes. FP8 copies are written and read once.
    (F_, H), N = weight.shape, x.numel() // weight.shape[1]
    y_bytes = N * F_ * x.element_size()
    fp8_bytes = 2 * (2 * N * H + 2 * F_ * H + 2 * N * F_)
    return Cost(
        moved_bytes=3 * x.nbytes + 3 * y_bytes + 4 * weight.nbytes + fp8_bytes,
        saved_bytes=N * H,
        flops=6 * N * F_ * H,
    )


FP8_LINEAR = Op(
    name="fp8_linear",
    call=fp8_linear,
    oracle=fp8_linear_oracle,
    make=_make,
    grads=("x", "weight", "bias"),
    case=Case(id="tensorwise", shape=(3, 7, 32, 48)),
    cost=_cost,
    straight_through=True,
    # On an H100. The bf16 error is that of the large case's sums in the tensor cores' accumulators (FAST_FORWARD).
    errors={"fp32": 8.6e-08, "bf16": 3.3e-03, "fp16": 2.5e-04},
    quantisation_errors={
        "tensorwise": {"output 0": 3.8e-02, "gradient of x": 5.9e-02, "gradient of weight": 5.9e-02},
        "rowwise": {"output 0": 3.7e-02, "gradient of x": 3.7e-02, "gradient of weight": 3.7e-02},
    },
)
