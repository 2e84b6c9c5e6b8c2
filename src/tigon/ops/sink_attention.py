"""Causal attention whose softmax has one more term, a learned number per head, the sink (GPT-OSS, arXiv 2508.10925):

    s_ij = scale · <q_i, k_j> + mask_ij      p_ij = exp(s_ij) / (exp(sink) + Σ_j exp(s_ij))      o_i = Σ_j p_ij v_j

transformers adds the sink as a column of scores. 16 bytes do not divide such rows, and all scores move through memory
about ten times in the forward. Here PyTorch's fused kernels compute attention without a sink, o° and the log-sum-exp l.
The sink is put in afterwards:

    L_i = log(exp(l_i) + exp(sink))          o_i = exp(l_i − L_i) · o°_i

The backward of the same kernel takes L and o for l and o°, because it computes p_ij = exp(s_ij − L_i), and

    ds_ij = p_ij (dp_ij − D_i)               D_i = <do_i, o_i>               dsink = − Σ_i exp(sink − L_i) · D_i

FlashAttention runs if no mask is given. It skips the keys outside of a causal window. The memory-efficient kernel takes
a mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops.dispatch import Differentiable, Primitive, check_dtype, check_number, check_whole, first_order
from tigon.ops.lm_head import no_autocast, product_dtype

# B batch, h query heads, g key heads, T tokens, D head width.

MASKED = -3e4
"""Masks go down to here. A row of the lowest bf16 numbers would overflow in the kernel; exp(-3e4) is 0 in fp32."""
_ROWS = 32
"""The memory-efficient kernel rounds the rows of the log-sum-exp up to a multiple of this."""
_ALIGNED = 16
"""PyTorch rounds the rows of a mask up to a multiple of this many elements for that kernel."""


def causal_mask(T: int, window: int, device: torch.device) -> Tensor:
    """(T, T) True where a query sees a key: not later, and fewer than `window` before; 0: no window."""
    seen = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    return seen.triu(1 - window) if window else seen


def _runs_kernels(q: Tensor) -> bool:
    return q.is_cuda and torch.version.hip is None and q.dtype is not torch.float64 and q.shape[-1] % 8 == 0


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """(B, g, T, D) -> (B, h, T, D)."""
    B, g, T, D = x.shape
    return x if g == heads else x[:, :, None].expand(B, g, heads // g, T, D).reshape(B, heads, T, D)


def _bias(q: Tensor, mask: Tensor) -> Tensor:
    """The mask as the memory-efficient kernel takes it: (B, h, T, T), whose rows begin at multiples of 16 bytes."""
    B, h, T, _ = q.shape
    if spare := -T % _ALIGNED:
        mask = F.pad(mask, (0, spare))[..., :T]
    return mask.expand(B, h, T, T)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, window: int, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    s = scale * (q.to(wide) @ _per_query_head(k, q.shape[1]).to(wide).transpose(2, 3))
    if mask is not None:
        return s + mask.to(wide)
    return s.masked_fill(~causal_mask(q.shape[2], window, q.device), MASKED)


def _lse_rows(T: int, mask: Tensor | None) -> int:
    return T if mask is None else -(-T // _ROWS) * _ROWS


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    T, h = q.shape[2], q.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    if not _runs_kernels(q):
        s = _scores(q, k, mask, window, scale)
        total = torch.logaddexp(s.logsumexp(-1), sinks.to(wide)[None, :, None])
        out = (s - total[..., None]).exp() @ _per_query_head(v, h).to(wide)
        total = F.pad(total, (0, _lse_rows(T, mask) - T), value=math.inf)
        return out.transpose(1, 2).to(q.dtype).contiguous(), total
    if mask is None:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, T, T, 0.0, True, False, scale=scale,
            window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
        )  # fmt: skip
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, _per_query_head(k, h), _per_query_head(v, h), _bias(q, mask), True, scale=scale
        )
        out = out.transpose(1, 2)
    total = torch.logaddexp(lse, sinks.float()[None, :, None])
    share = (lse - total).exp()[..., :T].transpose(1, 2)
    return (out * share[..., None].to(out.dtype)).contiguous(), total


def _fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    B, h, T, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    beside = [] if mask is None else [x.new_empty((B, h, T, D)) for x in (k, v) if x.shape[1] != h]
    beside.append(q.new_empty((B, T, h, D)))  # the kernel's result without the sinks
    lse = q.new_empty((B, h, _lse_rows(T, mask)), dtype=wide)
    total = torch.empty_like(lse)
    out = q.new_empty((B, T, h, D))
    del beside, lse
    return out, total


def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, out: Tensor, total: Tensor,
    window: int, scale: float, want_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, h, T, D = q.shape
    g = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    dsinks = sinks.new_empty(0)
    if want_sinks or not _runs_kernels(q):
        delta = torch.linalg.vecdot(dout.to(wide), out.to(wide)).transpose(1, 2)  # (B, h, T)
    if want_sinks:
        of_sink = (sinks.to(wide)[None, :, None] - total[..., :T]).exp()
        dsinks = -(of_sink * delta).sum((0, 2)).to(sinks.dtype)
    if not _runs_kernels(q):
        p = (_scores(q, k, mask, window, scale) - total[..., :T, None]).exp()
        do = dout.to(wide).transpose(1, 2)
        ds = scale * p * (do @ _per_query_head(v, h).to(wide).transpose(2, 3) - delta[..., None])
        dq = ds @ _per_query_head(k, h).to(wide)
        dk, dv = ds.transpose(2, 3) @ q.to(wide), p.transpose(2, 3) @ do
    elif mask is None:
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, *(x.transpose(1, 2) for x in (q, k, v)), out, total, None, None, T, T, 0.0, True,
            torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale, window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
        )  # fmt: skip
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks
    else:
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout of 0
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout.transpose(1, 2), q, _per_query_head(k, h), _per_query_head(v, h), _bias(q, mask),
            out.transpose(1, 2), total, seed, seed, 0.0, [True, True, True, False], scale=scale,
        )  # fmt: skip
    if g != h:
        dk, dv = (x.reshape(B, g, h // g, T, D).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.to(q.dtype).transpose(1, 2).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, dsinks


def _bwd_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, out: Tensor, total: Tensor,
    window: int, scale: float, want_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, h, T, D = q.shape
    g = k.shape[1]
    beside = [q.new_empty((B, h, T), dtype=total.dtype), q.new_empty((B, T, h, D), dtype=total.dtype)]
    if g != h:
        beside += [k.new_empty((B, h, T, D)) for _ in range(2 if mask is None else 4)]
    gradients = tuple(x.new_empty((B, T, x.shape[1], D)) for x in (q, k, v))
    del beside
    dq, dk, dv = gradients
    return dq, dk, dv, sinks.new_empty(sinks.shape if want_sinks else (0,))


sink_attention_fwd = Primitive(
    "sink_attention_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, int window, float scale) -> (Tensor, Tensor)",
    composite=_fwd,
    fake=_fwd_fake,
)
sink_attention_bwd = Primitive(
    "sink_attention_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, Tensor out, Tensor total, int window,"
    " float scale, bool want_sinks) -> (Tensor, Tensor, Tensor, Tensor)",
    composite=_bwd,
    fake=_bwd_fake,
)


class SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, window: int, scale: float
    ) -> Tensor:
        with no_autocast(q):
            out, total = sink_attention_fwd(q, k, v, sinks, mask, window, scale)
        ctx.save_for_backward(q, k, v, sinks, mask, out, total)
        ctx.window, ctx.scale = window, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, mask, out, total = ctx.saved_tensors
        want_sinks = ctx.needs_input_grad[3]
        with no_autocast(dout):
            dq, dk, dv, dsinks = sink_attention_bwd(
                dout.contiguous(), q, k, v, sinks, mask, out, total, ctx.window, ctx.scale, want_sinks
            )
        return *(x.transpose(1, 2) for x in (dq, dk, dv)), dsinks if want_sinks else None, None, None, None


_sink_attention = Differentiable(
    "sink_attention",
    SinkAttention.apply,
    "(Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, int window, float scale) -> Tensor",
)


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, scale: float, mask: Tensor | None = None, window: int = 0
) -> Tensor:
    """Attention with a sink per head: causal, or with a mask.

    Args:
        q: (B, h, T, D), fp16, bf16, fp32 or fp64. Under autocast, q, k and v are cast to autocast's dtype.
        k: (B, g, T, D); g divides h, and h / g query heads in a row share a key head.
        v: (B, g, T, D).
        sinks: (h,), any of the four dtypes.
        scale: multiplies the products of queries and keys.
        mask: None for causal attention, or a float that is added to the scores, of a shape that expands to
            (B, h, T, T). Numbers below -3e4 count as -3e4. It has no gradient.
        window: without a mask, a query sees this many keys, itself the last; 0: all.

    Returns:
        (B, T, h, D), contiguous.

    Raises:
        ShapeError: a tensor has another shape.
        DtypeError: a dtype is not supported.
        OptionError: scale is no number, or window is negative or no whole number.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_dtype(q, k, v, sinks, mask)
    check_number("scale", scale)
    check_whole("window", window)
    if window < 0:
        raise OptionError(f"window={window} must be at least 0.")
    shared = q.ndim == 4 and k.ndim == 4 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not shared or k.shape != v.shape or k.shape != (q.shape[0], k.shape[1], *q.shape[2:]):
        raise ShapeError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; they must be (B, h, T, D) and twice "
            "(B, g, T, D), and g must divide h."
        )
    if sinks.shape != q.shape[1:2]:
        raise ShapeError(f"sinks is {tuple(sinks.shape)}; it must be {tuple(q.shape[1:2])}, one per head of q.")
    dtype = product_dtype(q, k, v)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if mask is None and dtype is torch.float32 and _runs_kernels(q):  # FlashAttention takes 16 bits
        seen = causal_mask(q.shape[2], window, q.device)
        mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, MASKED)
    if mask is not None:
        mask = mask.detach().clamp(min=MASKED).to(dtype)
    run = _sink_attention if torch.compiler.is_compiling() else SinkAttention.apply
    return run(q, k, v, sinks, mask, int(window), float(scale))  # type: ignore[no-any-return]
