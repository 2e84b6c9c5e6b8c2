"""Causal attention whose softmax has one more score per head, the sink, that belongs to no token (GPT-OSS).

    P_tj = exp(S_tj - L_t)      L_t = log(exp(sink) + Σ_j exp(S_tj))      out_t = Σ_j P_tj v_j

With o and lse, the output and the log-sum-exp of attention without a sink, L = logaddexp(lse, sink) and
out = o · exp(lse - L). So any attention that returns its log-sum-exp serves the forward. Its backward computes
P = exp(S - L) and dS = P · (dP - Σ_D dout · out) from the output and the log-sum-exp that it gets. With `out` and L
these are the softmax with the sink and its gradient. docs/math.md derives both.

Three implementations compute o and lse: PyTorch's FlashAttention 2 on CUDA in 16 bits, PyTorch's flash kernel on the
CPU, and blocks of queries in PyTorch's operators. The blocks serve fp32 on a GPU, and windows and documents on the CPU.
None holds a (T, T) matrix per head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    Differentiable,
    Primitive,
    check_dtype,
    check_number,
    check_whole,
    first_order,
    no_autocast,
    planned_device,
)
from tigon.ops.signature import SYMBOLIC

# B rows, h query heads, k key heads, T tokens, D head width, E width of the values.

BLOCK_BYTES = 64 << 20
"""The most bytes of one block of scores in fp32."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_WIDTH, FLASH_STEP = 256, 8
"""FlashAttention 2 takes heads of at most this width, in steps (flash_api.cpp, mha_fwd)."""
FLASH_ARCH = (8, 0)
NO_WINDOW = 0
# flash_api.cpp, mha_bwd: the rows of the fp32 accumulator of dQ are rounded up to a multiple of this.
_FLASH_ROWS = 128
# FlashAttention 2 loads this many bytes at once and checks neither addresses nor strides. Other addresses end in "CUDA
# error: misaligned address", after which no kernel of the process runs.
_FLASH_LOAD_BYTES = 16


class Heads(NamedTuple):
    """Queries, keys and values, or their gradients."""

    q: Tensor
    """(B, h, T, D)"""
    k: Tensor
    """(B, k, T, D)"""
    v: Tensor
    """(B, k, T, E)"""

    def columns_together(self) -> Heads:
        """Kernels read the columns of a head side by side."""
        return Heads(*(x if x.stride(-1) == 1 else x.contiguous() for x in self))


class Masking(NamedTuple):
    """Which keys a query sees, and the factor of the scores."""

    cu_seqlens: Tensor | None
    max_length: Annotated[int, SYMBOLIC]
    scale: float
    window: int
    """`NO_WINDOW`: all tokens before the query."""


class Attended(NamedTuple):
    """The result of attention."""

    out: Tensor
    """(B, T, h, E)"""
    lse: Tensor
    """(B, h, T), the log-sum-exp of the scores"""


# --- FlashAttention 2 on CUDA: two thin calls ---


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention 2 computes these tensors, or will in a run that is planned."""
    if planned_device(q) != "cuda" or q.dtype not in FLASH_DTYPES or q.shape[-1] != v.shape[-1]:
        return False
    if q.shape[-1] > FLASH_WIDTH or q.shape[-1] % FLASH_STEP or not q.numel():
        return False
    return not q.is_cuda or (torch.version.hip is None and torch.cuda.get_device_capability(q.device) >= FLASH_ARCH)


class _Rows(NamedTuple):
    """Tensors as FlashAttention takes them: (B, T, heads, D), or (B T, heads, D) if there are documents."""

    tensors: list[Tensor]
    arguments: tuple[Any, ...]
    """cum_seq_q, cum_seq_k, max_q, max_k"""


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if a head of a token begins where FlashAttention cannot load."""
    begins = [size * x.element_size() for dim, size in enumerate(x.stride()[:-1]) if x.shape[dim] > 1]
    if any(begin % _FLASH_LOAD_BYTES for begin in (x.data_ptr(), *begins)):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _rows(tensors: Sequence[Tensor], how: Masking) -> _Rows:
    if how.cu_seqlens is None:
        T = tensors[0].shape[1]
        return _Rows([_aligned(x) for x in tensors], (None, None, T, T))
    rows = [_aligned(x.flatten(0, 1)) for x in tensors]
    return _Rows(rows, (how.cu_seqlens, how.cu_seqlens, how.max_length, how.max_length))


def _window_sizes(window: int) -> dict[str, int]:
    """The window of FlashAttention, which counts tokens before the query's own."""
    return {} if window == NO_WINDOW else {"window_size_left": window - 1, "window_size_right": 0}


def _flash_forward(x: Heads, how: Masking) -> Attended:
    B, _, T, _ = x.q.shape
    (q, k, v), lengths = _rows([t.transpose(1, 2) for t in x], how)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, True, False, scale=how.scale, **_window_sizes(how.window)
    )
    if how.cu_seqlens is None:
        return Attended(out, lse)
    return Attended(out.unflatten(0, (B, T)), lse.unflatten(1, (B, T)).transpose(0, 1))


def _flash_backward(dout: Tensor, x: Heads, made: Attended, how: Masking) -> Heads:
    B, _, T, _ = x.q.shape
    (dout, q, k, v, out), lengths = _rows([dout, *(t.transpose(1, 2) for t in x), made.out], how)
    lse = made.lse if how.cu_seqlens is None else made.lse.transpose(0, 1).flatten(1)
    # The random state, which only dropout reads. The forward returns two tensors of these shapes.
    random = [torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, True, *random, scale=how.scale, **_window_sizes(how.window)
    )
    if how.cu_seqlens is not None:
        grads = [grad.unflatten(0, (B, T)) for grad in grads]
    return Heads(*(grad.transpose(1, 2) for grad in grads))


# --- PyTorch's flash kernel on the CPU ---


def _takes_cpu_kernel(x: Heads, how: Masking) -> bool:
    q, _, v = x
    plain = how.cu_seqlens is None and how.window == NO_WINDOW and q.shape[-1] == v.shape[-1]
    return plain and q.device.type == "cpu" and bool(q.numel())


def _cpu_forward(x: Heads, how: Masking) -> Attended:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*x, 0.0, True, scale=how.scale)
    return Attended(out.transpose(1, 2).contiguous(), lse)


def _cpu_backward(dout: Tensor, x: Heads, made: Attended, how: Masking) -> Heads:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out = made.out.transpose(1, 2)
    return Heads(*backward(dout.transpose(1, 2), *x, out, made.lse, 0.0, True, scale=how.scale))


# --- blocks of queries ---


class _Block(NamedTuple):
    """Some queries and the keys that they may see."""

    rows: slice
    keys: slice
    hidden: Tensor
    """(B or 1, 1, rows, keys), True where the query does not see the key."""


def _block_rows(B: int, h: int, T: int) -> int:
    return max(1, min(T, BLOCK_BYTES // max(1, 4 * B * h * T)))


def _blocks(q: Tensor, how: Masking) -> Iterator[_Block]:
    (B, h, T, _), cu_seqlens, window = q.shape, how.cu_seqlens, how.window
    document_BT = None
    if cu_seqlens is not None:
        place = torch.arange(B * T, device=q.device, dtype=cu_seqlens.dtype)
        document_BT = torch.bucketize(place, cu_seqlens[1:], right=True).view(B, T)
    step = _block_rows(B, h, T)
    for start in range(0, T, step):
        end = min(T, start + step)
        first = max(0, start - window + 1) if window != NO_WINDOW else 0
        behind = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        hidden = (behind < 0) if window == NO_WINDOW else (behind < 0) | (behind >= window)
        hidden = hidden[None, None]
        if document_BT is not None:
            hidden = hidden | (document_BT[:, None, start:end, None] != document_BT[:, None, None, first:end])
        yield _Block(slice(start, end), slice(first, end), hidden)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q: Tensor, k: Tensor, block: _Block, scale: float) -> Tensor:
    """(B, h, rows, keys), -inf where a query does not see a key."""
    q, k = _wide(q[:, :, block.rows]), _wide(k[:, :, block.keys])
    scores = _by_key_head(q, k) @ k.transpose(-1, -2)
    return scores.view(*q.shape[:3], k.shape[2]).mul_(scale).masked_fill_(block.hidden, -torch.inf)


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """(B, h, rows, ...) -> (B, k, h / k * rows, ...), the rows of the query heads that share a key head."""
    B, h, rows, width = x.shape
    return x.reshape(B, k.shape[1], h // k.shape[1] * rows, width)


def _add_by_head(total: Tensor, rows: Tensor, upstream: Tensor) -> None:
    """total (B, k, keys, D) += rows.T @ upstream, one query head of each group after the other.

    One product over all heads of a group would sum h / k times as many terms in a row as the unfused op does, and is
    three times less exact with 64 heads on 8 (H100, fp32).
    """
    (B, k, _, _), (_, h, _, _) = total.shape, rows.shape
    rows, upstream = (t.reshape(B, k, h // k, *t.shape[2:]) for t in (rows, upstream))
    for head in range(h // k):
        total += rows[:, :, head].transpose(-1, -2) @ upstream[:, :, head]


def _block_forward(x: Heads, how: Masking) -> Attended:
    (q, k, v), (out, lse) = x, _fwd_results(x)
    for block in _blocks(q, how):
        scores = _scores(q, k, block, how.scale)
        one = scores.logsumexp(-1)
        values = _wide(v[:, :, block.keys])
        part = _by_key_head(scores.sub_(one[..., None]).exp_(), values) @ values
        out[:, block.rows] = part.view(*one.shape, v.shape[-1]).transpose(1, 2).to(out.dtype)
        lse[:, :, block.rows] = one
    return Attended(out, lse)


def _block_backward(dout: Tensor, x: Heads, made: Attended, how: Masking) -> Heads:
    (q, k, v), (out, lse) = x, made
    dq, dk, dv = (torch.zeros_like(_wide(t), memory_format=torch.contiguous_format) for t in x)
    for block in _blocks(q, how):
        p = _scores(q, k, block, how.scale).sub_(lse[:, :, block.rows, None]).exp_()
        upstream = _wide(dout[:, block.rows]).transpose(1, 2)
        delta = (upstream * _wide(out[:, block.rows]).transpose(1, 2)).sum(-1, keepdim=True)
        keys, values = _wide(k[:, :, block.keys]), _wide(v[:, :, block.keys])
        flat = _by_key_head(upstream, values)
        _add_by_head(dv[:, :, block.keys], p, upstream)
        ds = (flat @ values.transpose(-1, -2)).view(p.shape).sub_(delta).mul_(p).mul_(how.scale)
        dq[:, :, block.rows] = (_by_key_head(ds, keys) @ keys).view(*p.shape[:3], q.shape[-1])
        _add_by_head(dk[:, :, block.keys], ds, _wide(q[:, :, block.rows]))
    return Heads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


# --- the operators ---


def _fwd_results(x: Heads) -> Attended:
    (B, h, T, _), dtype = x.q.shape, torch.promote_types(x.q.dtype, torch.float32)
    return Attended(x.q.new_empty((B, T, h, x.v.shape[-1])), x.q.new_empty((B, h, T), dtype=dtype))


def _fwd(x: Heads, sinks: Tensor, how: Masking) -> Attended:
    x = x.columns_together()
    if _takes_flash(x.q, x.v):
        out, lse = _flash_forward(x, how)
    elif _takes_cpu_kernel(x, how):
        out, lse = _cpu_forward(x, how)
    else:
        with no_autocast(x.q):
            out, lse = _block_forward(x, how)
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]).contiguous()
    out.mul_((lse - total).exp_().transpose(1, 2)[..., None])
    return Attended(out, total)


def _bwd(dout: Tensor, x: Heads, made: Attended, how: Masking) -> Heads:
    x = x.columns_together()
    if _takes_flash(x.q, x.v):
        grads = _flash_backward(dout, x, made, how)
    elif _takes_cpu_kernel(x, how):
        grads = _cpu_backward(dout, x, made, how)
    else:
        with no_autocast(x.q):
            grads = _block_backward(dout, x, made, how)
    # One layout, whatever computed them: (B, T, heads, D) in memory, so that the projections read them without a copy.
    return Heads(*(_of_rows(grad) for grad in grads))


def _of_rows(x: Tensor) -> Tensor:
    """(B, heads, T, D) with the strides of a transposed (B, T, heads, D), also where a size of 1 allows others."""
    rows = x.transpose(1, 2)
    return rows.reshape(-1).view(rows.shape).transpose(1, 2)


def _fwd_fake(x: Heads, sinks: Tensor, how: Masking) -> Attended:
    """The results, and the scratch memory: a block of scores, and the log-sum-exp without the sink with the factor."""
    made = _fwd_results(x)
    scratch = [torch.empty_like(made.lse), torch.empty_like(made.lse)]
    if not _takes_flash(x.q, x.v):
        scratch.append(_fake_block(x.q))
    del scratch
    return made


def _bwd_fake(dout: Tensor, x: Heads, made: Attended, how: Masking) -> Heads:
    """The results, and the scratch memory (flash_api.cpp, mha_bwd)."""
    (q, k, v), (B, h, T, D) = x, x.q.shape
    grads = Heads(*(t.new_empty((B, T, t.shape[1], t.shape[3])).transpose(1, 2) for t in x))
    if _takes_flash(q, v):
        rows = -(-T // _FLASH_ROWS) * _FLASH_ROWS
        scratch = [q.new_empty((B, h, rows), dtype=torch.float32)]  # rowsum(dout · out)
        scratch.append(q.new_empty((B, rows, h, -(-D // 32) * 32), dtype=torch.float32))  # dQ
        if k.shape[1] != h:  # dK and dV are computed per query head, then summed over the group
            scratch += [k.new_empty((B, T, h, D)), k.new_empty((B, T, h, D))]
    else:
        scratch = [t.new_empty(t.shape, dtype=made.lse.dtype) for t in x]
        scratch += [_fake_block(q), _fake_block(q)]
    del scratch
    return grads


def _fake_block(q: Tensor) -> Tensor:
    B, h, T, _ = q.shape
    # Sizes of a compiled graph may be symbols, whose memory nobody plans.
    rows = _block_rows(B, h, T) if all(isinstance(size, int) for size in (B, h, T)) else 1
    return q.new_empty((B, h, rows, T), dtype=torch.float32)


attention_with_sinks_fwd = Primitive("attention_with_sinks_fwd", composite=_fwd, fake=_fwd_fake)
attention_with_sinks_bwd = Primitive("attention_with_sinks_bwd", composite=_bwd, fake=_bwd_fake)


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """Σ_D dout · out in fp32, (B, h, T), for some tokens at a time."""
    B, T, h, E = out.shape
    sums = out.new_empty((B, T, h), dtype=torch.promote_types(out.dtype, torch.float32))
    step = max(1, BLOCK_BYTES // max(1, 4 * B * h * E))
    for start in range(0, T, step):
        part = slice(start, start + step)
        torch.sum(_wide(dout[:, part]) * _wide(out[:, part]), -1, out=sums[:, part])
    return sums.transpose(1, 2)


def _sink_gradient_fake(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.empty_like(sinks, memory_format=torch.contiguous_format)


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """-Σ_t exp(sink - L_t) Σ_D dout_t · out_t, (h,)."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return (share * _row_sums(dout, out)).sum((0, 2)).neg_().to(sinks.dtype)


attention_sink_gradient = Primitive(
    "attention_sink_gradient",
    "(Tensor dout, Tensor out, Tensor lse, Tensor sinks) -> Tensor",
    composite=_sink_gradient,
    fake=_sink_gradient_fake,
)


class AttentionWithSinks(torch.autograd.Function):
    """It saves q, k, v, the output and the log-sum-exp with the sink, as attention without sinks does."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, how: Masking) -> Tensor:
        out, lse = attention_with_sinks_fwd(Heads(q, k, v), sinks, how)
        ctx.save_for_backward(q, k, v, sinks, out, lse, how.cu_seqlens)
        ctx.how = how._replace(cu_seqlens=None)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, cu_seqlens = ctx.saved_tensors
        dsinks = attention_sink_gradient(dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
        how = ctx.how._replace(cu_seqlens=cu_seqlens)
        grads = attention_with_sinks_bwd(dout.contiguous(), Heads(q, k, v), Attended(out, lse), how)
        return *grads, dsinks, None


def _apply(x: Heads, sinks: Tensor, how: Masking) -> Tensor:
    return AttentionWithSinks.apply(*x, sinks, how)  # type: ignore[no-any-return]


_attention_with_sinks = Differentiable("attention_with_sinks", _apply)


def attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Causal attention whose softmax has a sink per head.

    Args:
        q: (B, h, T, D) in fp16, bf16, fp32 or fp64. A GPU runs FlashAttention 2 in 16 bits if D is a multiple of 8 up
            to 256.
        k: (B, k, T, D) of the same dtype; k divides h.
        v: (B, k, T, E) of the same dtype.
        sinks: (h,), the score of each head's sink, in any of these dtypes.
        scale: factor of the scores; None: 1 / sqrt(D).
        window: a token sees itself and the `window` - 1 tokens before it; None: all tokens before it.
        cu_seqlens: (documents + 1,) int32, the places where documents begin in the B · T tokens, and B · T at the end.
            A token sees its own document only. A row's first token begins a document. None: a row is one document.
        max_length: the length of the longest document; None: T. Only for cu_seqlens.

    Returns:
        (B, T, h, E), contiguous, in q's dtype.

    Raises:
        ShapeError: a shape differs from the above, or a tensor is on another device.
        OptionError: window or max_length is not a whole number from 1 on, or scale is not a number.
        DtypeError: a dtype is not supported, q, k and v differ in dtype, or cu_seqlens is not int32.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    T = _checked(q, k, v, sinks, cu_seqlens)
    check_at_least_one("window", window)
    check_at_least_one("max_length", max_length)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)
    # A window that reaches every token is none. A compiled graph serves all lengths, so it keeps the window.
    wide = window is None or (not torch.compiler.is_compiling() and window >= T)
    how = Masking(
        cu_seqlens,
        T if max_length is None else max_length,
        float(scale),
        NO_WINDOW if wide or window is None else int(window),
    )
    apply = _attention_with_sinks if torch.compiler.is_compiling() else _apply
    return apply(Heads(q, k, v), sinks, how)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ShapeError or DtypeError unless the three are (B, h, T, D), (B, k, T, D) and (B, k, T, E) of one dtype."""
    check_dtype(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; they must have one dtype.")
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ShapeError(f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions; they must have 4.")
    B, h, T, D = q.shape
    heads = k.shape[1]
    if k.shape != (B, heads, T, D) or v.shape[:3] != k.shape[:3] or heads == 0 or h % heads:
        raise ShapeError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; they must be (B, h, T, D), "
            "(B, k, T, D) and (B, k, T, E), and k must divide h."
        )
    for name, other in (("k", k), ("v", v)):
        if other.device != q.device:
            raise ShapeError(f"{name} is on {other.device} and q on {q.device}; they must be on one device.")


def check_at_least_one(name: str, value: int | None) -> None:
    """Raise OptionError unless the value is None or a whole number from 1 on."""
    if value is not None:
        check_whole(name, value)
        if value < 1:
            raise OptionError(f"{name}={value} must be at least 1; leave it out for no limit.")


def _checked(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: Tensor | None) -> int:
    """T. Raises the errors of `attention_with_sinks`."""
    check_dtype(sinks)
    check_heads(q, k, v)
    h, T = q.shape[1:3]
    if sinks.shape != (h,):
        raise ShapeError(f"sinks is {tuple(sinks.shape)}; it must be ({h},), one for each query head.")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or len(cu_seqlens) < 2):
        raise ShapeError(f"cu_seqlens is {tuple(cu_seqlens.shape)}; it must be (documents + 1,).")
    if cu_seqlens is not None and cu_seqlens.dtype != torch.int32:
        raise DtypeError(f"cu_seqlens is {cu_seqlens.dtype}; it must be int32.")
    for name, other in (("sinks", sinks), ("cu_seqlens", cu_seqlens)):
        if other is not None and other.device != q.device:
            raise ShapeError(f"{name} is on {other.device} and q on {q.device}; they must be on one device.")
    return T


# --- the record ---


def attention_with_sinks_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """The unfused formula, with the softmax in fp32."""
    B, h, T, D = q.shape
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    place = torch.arange(T, device=q.device)
    behind = place[:, None] - place
    sees = ((behind >= 0) & (behind < (window or T + 1)))[None].expand(B, T, T)
    if cu_seqlens is not None:
        every = torch.arange(B * T, device=q.device)
        document = (every[:, None] >= cu_seqlens[None, 1:]).sum(1).view(B, T)
        sees = sees & (document[:, :, None] == document[:, None, :])
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    columns = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(B, h, T, 1)], dim=-1)
    p = columns.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., :-1].to(v.dtype)
    return (p @ v).transpose(1, 2)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (B, h, T, D). documents: the number of documents per row."""
    B, h, T, D = case.shape
    options = dict(case.options)
    heads = h // options.pop("groups", 1)
    if documents := options.pop("documents", 0):
        starts = torch.cat([torch.linspace(0, T, documents + 1)[:-1].int() + row * T for row in range(B)] or [])
        ends = torch.tensor([B * T], dtype=torch.int32)
        options["cu_seqlens"] = torch.cat([starts, ends]).to(device=device, dtype=torch.int32)
    return {
        "q": randn(B, h, T, D, dtype=dtype, device=device),
        "k": randn(B, heads, T, D, dtype=dtype, device=device),
        "v": randn(B, heads, T, D, dtype=dtype, device=device),
        "sinks": randn(h, dtype=dtype, device=device),
        **options,
    }


def _cost(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, window: int | None = None, **options: object) -> Cost:
    """Two products in the forward and five in the backward, half of each because of the causal mask."""
    saved = 2 * q.nbytes + k.nbytes + v.nbytes + 4 * q.numel() // q.shape[-1]
    flops = 7 * product_flops(q.shape, v.shape[-1], window or NO_WINDOW)
    return Cost(moved_bytes=3 * saved, saved_bytes=saved, flops=int(flops))


def product_flops(shape: Any, width: int, window: int) -> float:
    """FLOPs of one product of (B, h, T, D) queries with the keys that they see."""
    B, h, T, D = shape
    seen: float = T * (T + 1) / 2
    if window != NO_WINDOW and window < T:
        seen = window * (window + 1) / 2 + (T - window) * window
    return float(2.0 * B * h * seen * (D + width) / 2)


ATTENTION_WITH_SINKS = Op(
    name="attention_with_sinks",
    call=attention_with_sinks,
    oracle=attention_with_sinks_oracle,
    make=_make,
    grads=("q", "k", "v", "sinks"),
    case=Case(id="plain", shape=(2, 4, 37, 16), options={"groups": 2}, product_orders=4),
    cost=_cost,
    has_kernel=False,
    # On an H100.
    errors={"fp32": 6.8e-07, "bf16": 6.9e-03, "fp16": 4.7e-04},
)
