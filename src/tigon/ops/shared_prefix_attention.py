"""Causal attention of sequences that share a prefix, which stands in the row once.

A row holds [prefix 1 | prefix 2 ... | branches of 1 | branches of 2 ...]. A branch sees its prefix and itself. Two
calls of attention with variable lengths compute it: each segment sees itself, and all branches of a prefix see the
prefix. With o_i and lse_i of the two,

    L = logaddexp(lse_1, lse_2)      out = o_1 · exp(lse_1 - L) + o_2 · exp(lse_2 - L)

The backward of attention computes P = exp(S - L) and dS = P · (dP - Σ_D dout · out) from the output and the log-sum-exp
that it gets. With `out` and L it gives each call's exact share of the gradient, and the shares add up.
docs/math-logprobs.md derives it.

A window hides a part of the prefix that is another one for each query. The branches then get copies of the keys that
they may see, and one call computes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tigon.errors import ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.attention_with_sinks import (
    _FLASH_ROWS,
    BLOCK_BYTES,
    NO_WINDOW,
    _aligned,
    _takes_flash,
    _wide,
    _window_sizes,
    check_at_least_one,
    check_heads,
)
from tigon.ops.dispatch import Context, Primitive, check_number, first_order, no_autocast
from tigon.ops.signature import SYMBOLIC

# N tokens of queries, M of keys, h query heads, k key heads, D head width, E width of the values.


class Tokens(NamedTuple):
    """Queries, keys and values of tokens, or their gradients."""

    q: Tensor
    """(N, h, D)"""
    k: Tensor
    """(M, k, D)"""
    v: Tensor
    """(M, k, E)"""


class Segments(NamedTuple):
    """Which queries see which keys: the queries of segment i see the keys of segment i."""

    cu_queries: Tensor
    """(segments + 1,) int32: where each segment's queries begin, and N at the end."""
    cu_keys: Tensor
    """The same for the keys."""
    max_queries: Annotated[int, SYMBOLIC]
    """The most queries of a segment."""
    max_keys: Annotated[int, SYMBOLIC]
    causal: bool
    """Whether the last query is the last key's token, and no query sees the keys after it."""
    window: int
    """With `causal`: the number of keys that a query sees; NO_WINDOW: all before it."""
    pairs: Annotated[int, SYMBOLIC]
    """How many keys all queries see together."""


class Attended(NamedTuple):
    """The result of attention."""

    out: Tensor
    """(N, h, E)"""
    lse: Tensor
    """(h, N), the log-sum-exp of the scores"""


@dataclass(frozen=True)
class Call:
    """One call of attention with variable lengths on a part of the row."""

    queries: slice
    keys: slice | Tensor
    """The keys of the row, or their places, among which a key may occur several times."""
    segments: Segments


class PrefixGroup(NamedTuple):
    """Sequences that begin with the same `prefix` tokens; one sequence alone has a prefix of 0."""

    prefix: int
    branches: tuple[int, ...]
    """The tokens of each sequence after the prefix."""


@dataclass(frozen=True)
class PrefixRow:
    """What a row holds: sequences alone, then the prefixes, then the branches of each prefix.

    groups: those without a prefix come first.
    """

    groups: tuple[PrefixGroup, ...]
    _calls: dict[tuple[int, torch.device], tuple[Call, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """The tokens of the row."""
        return sum(group.prefix + sum(group.branches) for group in self.groups)

    @property
    def given(self) -> int:
        """The tokens of all sequences."""
        return sum(group.prefix * len(group.branches) + sum(group.branches) for group in self.groups)

    def calls(self, window: int, q: Tensor) -> tuple[Call, ...]:
        """The calls of attention for queries with this window. They are kept, because many layers need them."""
        longest = max(group.prefix + max(group.branches) for group in self.groups)
        window = NO_WINDOW if window >= longest else window
        make = self._two_parts if window == NO_WINDOW else self._windowed
        if isinstance(q, FakeTensor):  # tensors of a trace are of no use to another
            return make(window, q.device)
        if (window, q.device) not in self._calls:
            self._calls[window, q.device] = make(window, q.device)
        return self._calls[window, q.device]

    def _sizes(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens of sequences alone, of prefixes and of branches."""
        alone = [group.branches[0] for group in self.groups if not group.prefix]
        shared = [group for group in self.groups if group.prefix]
        return alone, [group.prefix for group in shared], [size for group in shared for size in group.branches]

    def _two_parts(self, window: int, device: torch.device) -> tuple[Call, ...]:
        """Every segment sees itself, and the branches of each prefix see the prefix."""
        alone, prefixes, branches = self._sizes()
        first, begin, every = sum(alone), sum(alone) + sum(prefixes), slice(0, self.tokens)
        itself = Call(every, every, segments([*alone, *prefixes, *branches], device=device))
        if not prefixes:
            return (itself,)
        of_each = [sum(group.branches) for group in self.groups if group.prefix]
        seen = segments(of_each, prefixes, causal=False, device=device)
        return itself, Call(slice(begin, self.tokens), slice(first, begin), seen)

    def _windowed(self, window: int, device: torch.device) -> tuple[Call, ...]:
        """Segments before the branches see themselves. Each branch sees copies of the keys in its first window."""
        alone, prefixes, branches = self._sizes()
        begin, end = sum(alone), sum(alone) + sum(prefixes)
        before = Call(slice(0, end), slice(0, end), segments([*alone, *prefixes], window=window, device=device))
        if not prefixes:
            return (before,)
        keys, sizes, place = [], [], end
        for group in self.groups:
            begin += group.prefix
            seen = min(group.prefix, window - 1)
            for size in group.branches if group.prefix else ():
                keys += [torch.arange(begin - seen, begin), torch.arange(place, place + size)]
                sizes.append(seen + size)
                place += size
        after = segments(branches, sizes, window=window, device=device)
        return before, Call(slice(end, self.tokens), torch.cat(keys).to(device), after)


def segments(
    queries: Sequence[int],
    keys: Sequence[int] | None = None,
    *,
    device: torch.device,
    causal: bool = True,
    window: int = NO_WINDOW,
) -> Segments:
    """Segments of these sizes; keys: those of the queries if omitted."""
    keys = queries if keys is None else keys
    cu_queries, cu_keys = (
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device) for sizes in (queries, keys)
    )
    sizes = zip(queries, keys, strict=True)
    pairs = sum(_pairs_seen(n, m, window or m) if causal else n * m for n, m in sizes)
    return Segments(cu_queries, cu_keys, max(queries), max(keys), causal, window, pairs)


def _pairs_seen(n: int, m: int, window: int) -> int:
    """How many of the m keys of a segment its n queries see, which are the last n tokens."""
    before = m - n
    growing = min(max(window - before, 0), n)  # the queries that see every key before them
    return growing * before + growing * (growing + 1) // 2 + (n - growing) * window


# --- FlashAttention 2 on CUDA: two thin calls ---


def _arguments(segments: Segments) -> tuple[Any, ...]:
    return segments.cu_queries, segments.cu_keys, segments.max_queries, segments.max_keys


def _flash_forward(x: Tokens, segments: Segments, scale: float) -> Attended:
    tensors = [_aligned(t) for t in x]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, *_arguments(segments), 0.0, segments.causal, False, scale=scale, **_window_sizes(segments.window)
    )
    return Attended(out, lse)


def _flash_backward(dout: Tensor, x: Tokens, made: Attended, segments: Segments, scale: float) -> Tokens:
    tensors = [_aligned(t) for t in (dout, *x, made.out)]
    random = [torch.empty(shape, dtype=torch.uint64, device=dout.device) for shape in ((2,), ())]
    grads = torch.ops.aten._flash_attention_backward(
        *tensors, made.lse.contiguous(), *_arguments(segments), 0.0, segments.causal, *random,
        scale=scale, **_window_sizes(segments.window),
    )  # fmt: skip
    return Tokens(*grads)


# --- one segment after the other ---


def _pairs(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """The queries and keys of each segment."""
    ends = [bounds.tolist() for bounds in (segments.cu_queries, segments.cu_keys)]
    for i in range(len(ends[0]) - 1):
        yield slice(ends[0][i], ends[0][i + 1]), slice(ends[1][i], ends[1][i + 1])


def _heads(x: Tensor, h: int) -> Tensor:
    """(tokens, k, D) -> (h, tokens, D), wide."""
    return _wide(x).transpose(0, 1).repeat_interleave(h // x.shape[1], dim=0)


def _scores(q: Tensor, k: Tensor, segments: Segments, scale: float) -> Tensor:
    """(h, N, D) and (h, M, D) -> (h, N, M), -inf where a query does not see a key."""
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if not segments.causal:
        return scores
    (n, m), device = scores.shape[1:], scores.device
    behind = torch.arange(m - n, m, device=device)[:, None] - torch.arange(m, device=device)
    hidden = behind < 0
    if segments.window != NO_WINDOW:
        hidden |= behind >= segments.window
    return scores.masked_fill_(hidden, -torch.inf)


def _plain_forward(x: Tokens, segments: Segments, scale: float) -> Attended:
    (q, k, v), (out, lse) = x, _empty(x)
    for rows, keys in _pairs(segments):
        scores = _scores(_heads(q[rows], q.shape[1]), _heads(k[keys], q.shape[1]), segments, scale)
        lse[:, rows] = scores.logsumexp(-1)
        p = scores.sub_(lse[:, rows, None]).exp_()
        out[rows] = (p @ _heads(v[keys], q.shape[1])).transpose(0, 1).to(out.dtype)
    return Attended(out, lse)


def _plain_backward(dout: Tensor, x: Tokens, made: Attended, segments: Segments, scale: float) -> Tokens:
    grads, h = Tokens(*(torch.empty_like(t, memory_format=torch.contiguous_format) for t in x)), x.q.shape[1]
    for rows, keys in _pairs(segments):
        q, k, v = _heads(x.q[rows], h), _heads(x.k[keys], h), _heads(x.v[keys], h)
        upstream, out = _heads(dout[rows], h), _heads(made.out[rows], h)
        p = _scores(q, k, segments, scale).sub_(made.lse[:, rows, None]).exp_()
        ds = (upstream @ v.transpose(-1, -2)).sub_((upstream * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        grads.q[rows] = (ds @ k).transpose(0, 1).to(grads.q.dtype)
        for grad, by_head in ((grads.k, ds.transpose(-1, -2) @ q), (grads.v, p.transpose(-1, -2) @ upstream)):
            by_key_head = by_head.unflatten(0, (grad.shape[1], -1)).sum(1)
            grad[keys] = by_key_head.transpose(0, 1).to(grad.dtype)
    return grads


# --- the operators ---


def _empty(x: Tokens) -> Attended:
    (N, h, _), dtype = x.q.shape, torch.promote_types(x.q.dtype, torch.float32)
    return Attended(x.q.new_empty((N, h, x.v.shape[-1])), x.q.new_empty((h, N), dtype=dtype))


def _fwd(x: Tokens, segments: Segments, scale: float) -> Attended:
    if _takes_flash(x.q, x.v):
        return _flash_forward(x, segments, scale)
    with no_autocast(x.q):
        return _plain_forward(x, segments, scale)


def _bwd(dout: Tensor, x: Tokens, made: Attended, segments: Segments, scale: float) -> Tokens:
    if _takes_flash(x.q, x.v):
        return _flash_backward(dout, x, made, segments, scale)
    with no_autocast(x.q):
        return _plain_backward(dout, x, made, segments, scale)


def _fwd_fake(x: Tokens, segments: Segments, scale: float) -> Attended:
    return _empty(x)


def _bwd_fake(dout: Tensor, x: Tokens, made: Attended, segments: Segments, scale: float) -> Tokens:
    """The results, and the scratch memory (flash_api.cpp, mha_varlen_bwd)."""
    (q, k, v), (N, h, D), batch = x, x.q.shape, segments.cu_queries.shape[0] - 1
    grads = Tokens(*(t.new_empty(t.shape) for t in x))
    if _takes_flash(q, v):
        rows = N + _FLASH_ROWS * batch  # each segment's rows are rounded up
        scratch = [q.new_empty((h, rows), dtype=torch.float32)]  # rowsum(dout · out)
        scratch.append(q.new_empty((rows, h, -(-D // 32) * 32), dtype=torch.float32))  # dQ
        if k.shape[1] != h:  # dK and dV are computed per query head, then summed over the group
            scratch += [k.new_empty((k.shape[0], h, D)), k.new_empty((k.shape[0], h, D))]
        del scratch
    return grads


def _join(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """The kernel's algorithm, for some tokens at a time."""
    total = torch.logaddexp(lse, part_lse)
    before, added = ((each - total).exp_().transpose(0, 1)[..., None] for each in (lse, part_lse))
    lse.copy_(total)
    N, h, E = out.shape
    step = max(1, BLOCK_BYTES // max(1, 4 * h * E))
    for start in range(0, N, step):
        some = slice(start, start + step)
        # `out=` rounds in the same kernel; an assignment would write fp32 and read it again.
        torch.addcmul(out[some] * before[some], part_out[some], added[some], out=out[some])


def _join_fake(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    return None


varlen_attention_fwd = Primitive("varlen_attention_fwd", composite=_fwd, fake=_fwd_fake)
varlen_attention_bwd = Primitive("varlen_attention_bwd", composite=_bwd, fake=_bwd_fake)
join_attention = Primitive(
    "join_attention",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse) -> ()",
    kernel="tigon.kernels.join_attention:join_attention",
    reference=_join,
    fake=_join_fake,
)


class SharedPrefixAttention(torch.autograd.Function):
    """It saves q, k, v, the output and the log-sum-exp over all calls, as FlashAttention does."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call], scale: float) -> Tensor:
        x = Tokens(q, k, v)
        made: Attended = varlen_attention_fwd(_taken(x, calls[0]), calls[0].segments, scale)
        out, lse = made
        if len(out) < len(q):  # other queries follow
            out, lse = _empty(x)
            _put(Attended(out, lse), calls[0], made)
        filled = calls[0].queries.stop
        for call in calls[1:]:
            part = varlen_attention_fwd(_taken(x, call), call.segments, scale)
            if call.queries.start < filled:
                join_attention(out[call.queries], lse[:, call.queries], *part)
            else:
                _put(Attended(out, lse), call, part)
            filled = call.queries.stop
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    @first_order
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        x, dout = Tokens(q, k, v), dout.contiguous()
        total: Tokens | None = None
        for call in ctx.calls:
            made = Attended(out[call.queries], lse[:, call.queries])
            part = varlen_attention_bwd(dout[call.queries], _taken(x, call), made, call.segments, ctx.scale)
            if total is None and part.q.shape == q.shape and part.k.shape == k.shape:
                total = part
                continue
            total = total or Tokens(*(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in x))
            total.q[call.queries] += part.q
            for sums, share in ((total.k, part.k), (total.v, part.v)):
                if isinstance(call.keys, slice):
                    sums[call.keys] += share
                else:
                    sums.index_add_(0, call.keys, share)
        assert total is not None, "a row has at least one call"
        return *total, None, None


def _taken(x: Tokens, call: Call) -> Tokens:
    return Tokens(x.q[call.queries], x.k[call.keys], x.v[call.keys])


def _put(total: Attended, call: Call, part: Attended) -> None:
    total.out[call.queries] = part.out
    total.lse[:, call.queries] = part.lse


def shared_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, row: PrefixRow, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal attention in a row of sequences that share prefixes.

    Args:
        q: (1, h, N, D) in fp16, bf16, fp32 or fp64. A GPU runs FlashAttention 2 in 16 bits if D is a multiple of 8 up
            to 256.
        k: (1, k, N, D) of the same dtype; k divides h.
        v: (1, k, N, E) of the same dtype.
        row: what the N tokens are.
        scale: factor of the scores; None: 1 / sqrt(D).
        window: a token sees itself and the `window` - 1 tokens before it in its sequence; None: all of them.

    Returns:
        (1, N, h, E), contiguous, in q's dtype.

    Raises:
        ShapeError: a shape differs from the above, or a tensor is on another device.
        OptionError: window is not a whole number from 1 on, or scale is not a number.
        DtypeError: a dtype is not supported, or q, k and v differ in dtype.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_heads(q, k, v)
    if not q.numel():
        empty: Tensor = q.sum() + k.sum() + v.sum()
        return empty.expand(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
    if q.shape[0] != 1 or q.shape[2] != row.tokens:
        raise ShapeError(f"q is {tuple(q.shape)}; it must be (1, h, {row.tokens}, D), the tokens of the row.")
    check_at_least_one("window", window)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)
    calls = row.calls(NO_WINDOW if window is None else window, q)
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    return SharedPrefixAttention.apply(*tokens, calls, float(scale))[None]  # type: ignore[no-any-return]


# --- the record ---


def shared_prefix_attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, row: PrefixRow, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """The unfused formula with a mask of all tokens, with the softmax in fp32."""
    sees = _visible(row, window).to(q.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = scores.masked_fill(~sees, -torch.inf).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (p.to(v.dtype) @ v).transpose(1, 2)


def _visible(row: PrefixRow, window: int | None) -> Tensor:
    """(N, N), True where a query sees a key: its sequence's tokens up to itself."""
    sees = torch.zeros(row.tokens, row.tokens, dtype=torch.bool)
    begin = sum(group.branches[0] for group in row.groups if not group.prefix)
    place, alone = begin + sum(group.prefix for group in row.groups), 0
    for group in row.groups:
        for size in group.branches:
            first = place if group.prefix else alone
            places = torch.cat([torch.arange(begin, begin + group.prefix), torch.arange(first, first + size)])
            behind = torch.arange(len(places))[:, None] - torch.arange(len(places))
            seen = (behind >= 0) & (behind < (window or row.tokens))
            sees[places[:, None], places] |= seen
            place, alone = (place + size, alone) if group.prefix else (place, alone + size)
        begin += group.prefix
    return sees


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (1, h, N, D). N: tokens of a prefix, of `branches` branches, and of one sequence alone."""
    B, h, N, D = case.shape
    options = dict(case.options)
    heads, branches = h // options.pop("groups", 1), options.pop("branches", 3)
    size = max(1, N // (branches + 3))
    alone = size if (branches + 2) * size < N else 0
    sizes = (size,) * min(branches, N - alone - 1)
    groups = [PrefixGroup(0, (alone or N,))] if alone or not sizes else []
    groups += [PrefixGroup(N - alone - sum(sizes), sizes)] if sizes else []
    return {
        "q": randn(B, h, N, D, dtype=dtype, device=device),
        "k": randn(B, heads, N, D, dtype=dtype, device=device),
        "v": randn(B, heads, N, D, dtype=dtype, device=device),
        "row": PrefixRow(tuple(groups)),
        **options,
    }


def _cost(q: Tensor, k: Tensor, v: Tensor, row: PrefixRow, *, window: int | None = None, **options: object) -> Cost:
    """Two products in the forward and five in the backward."""
    saved = 2 * q.nbytes + k.nbytes + v.nbytes + 4 * q.numel() // q.shape[-1]
    calls = row.calls(NO_WINDOW if window is None else window, q)
    flops = 7 * q.shape[1] * (q.shape[-1] + v.shape[-1]) * sum(call.segments.pairs for call in calls)
    return Cost(moved_bytes=3 * saved, saved_bytes=saved, flops=flops)


SHARED_PREFIX_ATTENTION = Op(
    name="shared_prefix_attention",
    call=shared_prefix_attention,
    oracle=shared_prefix_attention_oracle,
    make=_make,
    grads=("q", "k", "v"),
    case=Case(id="plain", shape=(1, 4, 37, 16), options={"groups": 2}, product_orders=4),
    cost=_cost,
    # Of the small cases on a CPU.
    errors={"fp32": 2.2e-07, "bf16": 2.6e-03, "fp16": 3.1e-04},
)
