"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 34) of queries and keys.

    y = x · cos + rotate(x) · sin        over the first R columns; columns R to D are copied

    half-split    rotate(x) = (-x[R/2:], x[:R/2])               Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX
    interleaved   rotate(x) = (-x1, x0, -x3, x2, ...)           Cohere, GLM

The tables have R entries per token. Half-split families repeat the angles in the two halves; Cohere repeats each angle
twice in a row. GLM keeps half-split tables and rearranges them inside its attention. A caller that patches GLM must do
the same: `cos[..., : R // 2].repeat_interleave(2, -1)`.

If an FP8 layer computed q or k, the backward also finds the largest magnitude of that gradient (`known_amax.py`).

The arithmetic is fp32 (fp64 for fp64 inputs). The results are new tensors of q's dtype in the memory order of the
inputs, so an attention after a (B, T, H, D) projection needs no copy. Backward is the transposed map, which is correct
for any table and saves only the tables. It writes the gradients in the memory order of q and k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.kernels.layout import empty_ordered, outer_order
from tigon.ops import known_amax
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, Primitive, check_dtype, first_order
from tigon.ops.signature import WRITTEN

# B batch, H heads, T tokens, D head width, R rotary width. `heads_dim` is 1 for (B, H, T, D), 2 for (B, T, H, D).


class RopeLayout(NamedTuple):
    """The places of q, k and the pairs."""

    q_order: Sequence[int]
    """The order of q's outer dimensions in memory; the result has the same."""
    k_order: Sequence[int]
    heads_dim: int
    interleaved: bool


# The layers of a model share a record. Finding it takes 0.09 us of host time, and making it 0.2 us.
_layout = functools.lru_cache(maxsize=1 << 12)(RopeLayout)


class Rotated(NamedTuple):
    """New tensors of the shapes of q and k."""

    q: Tensor
    k: Tensor


def _pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second members of all pairs, each (..., R/2)."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def _reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: RopeLayout, transpose: bool, amax: Tensor | None = None
) -> Rotated:
    q_order, k_order, heads_dim, interleaved = layout
    acc = torch.promote_types(q.dtype, torch.float32)
    R = cos.shape[-1]
    c_a, c_b = _pair(cos.to(acc).unsqueeze(heads_dim - 4), interleaved)
    s_a, s_b = _pair(sin.to(acc).unsqueeze(heads_dim - 4), interleaved)
    if transpose:
        s_a, s_b = -s_b, -s_a
    outputs: list[Tensor] = []
    for x, order in ((q, q_order), (k, k_order)):
        y = empty_ordered(x, order)
        y[..., R:] = x[..., R:]
        x_a, x_b = _pair(x[..., :R].to(acc), interleaved)
        y_a, y_b = _pair(y[..., :R], interleaved)
        y_a.copy_(x_a * c_a - x_b * s_a)
        y_b.copy_(x_b * c_b + x_a * s_b)
        known_amax.search(amax, len(outputs), y)
        outputs.append(y)
    return Rotated(*outputs)


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: RopeLayout, transpose: bool) -> Rotated:
    return Rotated(empty_ordered(q, layout.q_order), empty_ordered(k, layout.k_order))


def _amax_fake(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: RopeLayout,
    transpose: bool,
    amax: Annotated[Tensor, WRITTEN],
) -> Rotated:
    return _fake(q, k, cos, sin, layout, transpose)


rotate = Primitive(
    "rope_rotate",
    reference=_reference,
    kernel="tigon.kernels.rope:rope",
    fake=_fake,
)


# Its own operator, because torch.compile wraps operators that write to an argument.
rotate_amax = Primitive(
    "rope_rotate_amax",
    reference=_reference,
    kernel="tigon.kernels.rope:rope",
    fake=_amax_fake,
)
"""As `rotate`; the maximum of a row of amax (2, parts), which is 0 before, becomes that of a result's magnitudes."""


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.layout = layout = _layout(outer_order(q), outer_order(k), heads_dim, interleaved)
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.wanted = known_amax.wanted_for_gradient(q), known_amax.wanted_for_gradient(k)
        return rotate(q, k, cos, sin, layout, False)  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        want_dq = dq is not None and ctx.needs_input_grad[0]
        want_dk = dk is not None and ctx.needs_input_grad[1]
        given = dq if want_dq else dk
        if given is None or not (want_dq or want_dk):
            return None, None, None, None, None, None
        # If a gradient is not wanted, the kernel gets a tensor with 0 heads in its place.
        layout = ctx.layout
        nothing = given.narrow(layout.heads_dim, 0, 0)
        amax = known_amax.parts_for(given, 2) if any(ctx.wanted) else None
        given_both = dq if want_dq else nothing, dk if want_dk else nothing
        if amax is None:
            dq, dk = rotate(*given_both, cos, sin, layout, True)
        else:
            dq, dk = rotate_amax(*given_both, cos, sin, layout, True, amax)
            for gradient, wanted, parts in zip((dq, dk), ctx.wanted, amax, strict=True):
                if wanted:
                    known_amax.note(gradient, parts)
        return dq if want_dq else None, dk if want_dk else None, None, None, None, None


_rope = Differentiable(
    "rope",
    Rope.apply,
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, int heads_dim, bool interleaved) -> (Tensor, Tensor)",
)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> None:
    check_dtype(q, k, cos, sin)
    if heads_dim not in (1, 2):
        raise OptionError(
            f"unsqueeze_dim={heads_dim} is not known; use 1 for (B, heads, T, D) or 2 for (B, T, heads, D)."
        )
    if q.dtype != k.dtype:
        raise DtypeError(f"q is {q.dtype} and k is {k.dtype}; they must agree. Cast one of them.")
    if q.ndim != 4 or k.ndim != 4:
        raise ShapeError(f"q is {tuple(q.shape)} and k is {tuple(k.shape)}; both must have 4 dimensions.")
    B, T, D = q.shape[0], q.shape[3 - heads_dim], q.shape[3]
    if (k.shape[0], k.shape[3 - heads_dim], k.shape[3]) != (B, T, D):
        raise ShapeError(
            f"q is {tuple(q.shape)} and k is {tuple(k.shape)}; with unsqueeze_dim={heads_dim} they may differ in "
            f"dimension {heads_dim} (heads) only."
        )
    if cos.shape != sin.shape or cos.ndim not in (2, 3):
        raise ShapeError(
            f"cos is {tuple(cos.shape)} and sin is {tuple(sin.shape)}; both must be (T, R) or (1 or B, T, R)."
        )
    R = cos.shape[-1]
    if cos.shape[-2] != T or (cos.ndim == 3 and cos.shape[0] not in (1, B)):
        raise ShapeError(
            f"cos and sin are {tuple(cos.shape)}, q has batch {B} and {T} tokens; they must be ({T}, R), (1, {T}, R) "
            f"or ({B}, {T}, R). Check position_ids and unsqueeze_dim."
        )
    if R % 2 or not 0 < R <= D:
        raise ShapeError(f"cos and sin have {R} columns, q {D}; the rotary width must be even and in 2..{D}.")
    if not q.device == k.device == cos.device == sin.device:
        raise ShapeError(
            f"q is on {q.device}, k on {k.device}, cos on {cos.device}, sin on {sin.device}; move them to one device."
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise OptionError("cos or sin requires grad, but rope does not differentiate its tables; pass them detached.")


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Apply rotary position embedding to queries and keys.

    Args:
        q: (B, Hq, T, D), or (B, T, Hq, D) with unsqueeze_dim=2; fp16, bf16, fp32 or fp64. Any strides; a copy is made
            only if the last dimension does not have stride 1. Never written to.
        k: (B, Hk, T, D), or (B, T, Hk, D) with unsqueeze_dim=2, in q's dtype. Any strides, as for q. Never written to.
        cos, sin: (T, R), (1, T, R) or (B, T, R); fp16, bf16, fp32 or fp64. R is even and at most D. Not differentiated.
        interleaved: rotate the pairs (2i, 2i+1) instead of (i, i + R/2).
        unsqueeze_dim: the dimension of the heads, 1 or 2. The name is the one that transformers uses.

    Returns:
        Rotated q and k: new tensors of the same shapes and dtype, in the memory order of q and k.

    Raises:
        ShapeError: q or k is not 4-D. q and k differ in more than the number of heads. cos and sin differ in shape or
            do not fit q's batch and tokens. R is odd, 0 or larger than D. The tensors are on several devices.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64, or q and k have different dtypes.
        OptionError: unsqueeze_dim is neither 1 nor 2, or a table requires grad.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    apply = _rope if torch.compiler.is_compiling() else Rope.apply
    return apply(q, k, cos, sin, unsqueeze_dim, interleaved)  # type: ignore[no-any-return]


def rope_oracle(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """The unfused formula, in the dtypes the model families use."""
    R = cos.shape[-1]
    # The dimension is counted from the end, so that a table without a batch dimension broadcasts too.
    cos, sin = cos.unsqueeze(unsqueeze_dim - 4), sin.unsqueeze(unsqueeze_dim - 4)

    def rotated(x: Tensor) -> Tensor:
        a, b = _pair(x[..., :R], interleaved)
        turned = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
        return torch.cat(((x[..., :R] * cos + turned * sin).to(x.dtype), x[..., R:]), -1)

    return rotated(q), rotated(k)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    options = dict(case.options)
    B, heads, T, D = case.shape
    kv_heads, R = options.pop("kv_heads", heads), options.pop("rotary", D)
    batch, table_dtype = options.pop("table_batch", 1), options.pop("table_dtype", dtype)
    in_memory, arbitrary = options.pop("in_memory", "BTHD"), options.pop("arbitrary_table", False)

    def projected(count: int) -> Tensor:
        shape = (B, T, count, D) if in_memory == "BTHD" else (B, count, T, D)
        x = randn(*shape, dtype=dtype, device=device)
        return x if (in_memory == "BTHD") == (options.get("unsqueeze_dim", 1) == 2) else x.transpose(1, 2)

    position = torch.arange(T, device=device) + torch.arange(max(batch, 1), device=device)[:, None] * 5
    angle = position[..., None] * 10000.0 ** (-torch.arange(0, R, 2, device=device) / R)
    angle = angle.repeat_interleave(2, -1) if options.get("interleaved") else torch.cat((angle, angle), -1)
    if arbitrary:
        angle = torch.randn(angle.shape, device=device)
    cos, sin = angle.cos().to(table_dtype), angle.sin().to(table_dtype)
    tables = {"cos": cos, "sin": sin} if batch else {"cos": cos[0], "sin": sin[0]}
    return {"q": projected(heads), "k": projected(kv_heads), **tables, **options}


def _cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: object) -> Cost:
    # forward and backward each: q, k, cos, sin -> q, k
    tables = cos.nbytes + sin.nbytes
    return Cost(moved_bytes=4 * (q.nbytes + k.nbytes) + 2 * tables, saved_bytes=tables)


ROPE = Op(
    name="rope",
    call=rope,
    oracle=rope_oracle,
    make=_make,
    grads=("q", "k"),
    case=Case(id="llama", shape=(2, 8, 9, 64), options={"kv_heads": 2}),
    cost=_cost,
    errors={"fp32": 3.4e-08, "bf16": 1.8e-03, "fp16": 2.2e-04},
)
