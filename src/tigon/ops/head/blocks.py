"""Blocks of logits that are computed twice: the operators of `linear_logprobs` and `linear_kl`.

The forward adds each block of columns to the statistics of its rows. A divergence needs both log-sum-exps before its
first term, so the forward of two heads has blocks of some tokens by the whole vocabulary. The backward computes the
logits again and writes their gradient, in blocks of columns.

Forward and backward of `linear_logprobs` have products of the same shapes. In another shape a library may sum in
another order, and a logit may differ by a rounding. If a probability p is near 1, its gradient is of the size of 1 -
p and has the error of p.

If the logits of all tokens fit, they are kept from forward to backward, which saves one product of each head. The
backward then writes the gradient of one block of columns after another.

For frozen heads nothing is computed twice (`frozen.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive, no_autocast
from tigon.ops.head.block_loop import BlockPlan, GradientSums, run_blocks
from tigon.ops.head.chunks import even_chunk
from tigon.ops.head.inputs import NOTHING, Gradients, Head, LogitBuffer, Wanted, sum_dtype
from tigon.ops.head.plan import LogitBytes, plan_blocks, plan_kept, whole_plan
from tigon.ops.losses.divergence_rows import (
    DivergenceRows,
    KlOptions,
    KlUpstream,
    LogitPair,
    divergence,
    divergence_gradient,
)
from tigon.ops.losses.inputs import CountedTokens
from tigon.ops.losses.logprob_inputs import LogprobOptions, check_ids
from tigon.ops.losses.logprob_rows import Block, Rows, Upstream, add_block, gradient_into
from tigon.ops.losses.results import RowResults

# N tokens, H hidden, V vocabulary, K ids of a token, J largest logits; a block has n tokens and c columns.


def logits_buffer(head: Head, plan: BlockPlan) -> LogitBuffer:
    """Memory for the logits that exist at once."""
    return LogitBuffer(plan.logit_tokens, plan.columns, head.hidden_NH, head.logits_dtype)


def gradient_buffer(head: Head, plan: BlockPlan) -> LogitBuffer:
    """Memory for the gradient of a block of logits."""
    return LogitBuffer(plan.tokens, plan.columns, head.hidden_NH, head.dtype)


def _no_logits(head: Head) -> Tensor:
    """Logits that are not kept."""
    return head.hidden_NH.new_empty((0, head.vocab), dtype=head.logits_dtype)


class BackwardOptions(NamedTuple):
    """The size of the backward's blocks."""

    block_bytes: int
    """The most bytes of logits and of their gradient. For kept logits, of these and a block of their gradient."""
    fp32_hidden: bool = False
    """Whether the gradient of hidden is at least fp32, because other processes' parts are added to it."""
    gathered: bool = False
    """Whether only rows that count are there, so that none is left out."""

    def plan(self, size: tuple[int, int], bytes_: LogitBytes, kept: bool) -> BlockPlan:
        """size: (N, V). A symbolic number of tokens has one block."""
        if not isinstance(size[0], int):
            return BlockPlan(size[0], 1, size[0])
        return (plan_kept if kept else plan_blocks)(*size, bytes_, self.block_bytes)


def empty_sums(head: Head, wanted: Wanted, plan: BlockPlan, fp32_hidden: bool) -> GradientSums:
    """The gradients of a head in the dtypes that blocks of this plan need, and memory for those of its logits."""
    block = gradient_buffer(head, plan).view if any(wanted) else None
    return GradientSums(head, wanted, empty_gradients(head, wanted, plan, fp32_hidden), plan, block)


def empty_gradients(head: Head, wanted: Wanted, plan: BlockPlan, fp32_hidden: bool) -> Gradients:
    dw_dtype = sum_dtype(head.weight_VH, plan.tokens < head.tokens)
    return Gradients.empty(head, wanted, sum_dtype(head.hidden_NH, fp32_hidden), dw_dtype)


def _alive_in_backward(head: Head, wanted: Wanted, plan: BlockPlan, left_out: bool) -> list[Tensor]:
    """The copy of X and the sum of dX of a backward: for the planner, which traces the fakes."""
    x, alive = head.hidden_NH, list[Tensor]()
    shape = (min(plan.tokens, head.tokens), x.shape[1])
    if wanted.want_weight and left_out:
        alive.append(x.new_empty(shape))
    if wanted.want_hidden and plan.columns < head.vocab:
        alive.append(x.new_empty(shape, dtype=sum_dtype(x, True)))
    return alive


# --- log-probabilities ------------------------------------------------------------------------------------------------


class ForwardResults(NamedTuple):
    """The fields of `RowResults`, and the logits of all tokens; those that are not kept are empty."""

    logprob_NK: Tensor
    stats_2N: Tensor
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor
    kept_NV: Tensor

    @property
    def rows(self) -> RowResults:
        return RowResults(*self[:-1])


def _forward_plan(head: Head, keep: bool, block_bytes: int) -> BlockPlan:
    if keep:
        return whole_plan(head.tokens, head.vocab)
    return plan_blocks(head.tokens, head.vocab, LogitBytes.of(head.dtype), block_bytes)


def _forward_body(head: Head, ids_NK: Tensor, options: LogprobOptions, keep: bool, block_bytes: int) -> ForwardResults:
    N, V = head.tokens, head.vocab
    check_ids(head.hidden_NH, ids_NK, V, options.ignore_index)
    plan = _forward_plan(head, keep, block_bytes)
    buffer = logits_buffer(head, plan)
    kept_NV = buffer.view(N, V) if keep else _no_logits(head)
    parts: list[RowResults] = []
    with no_autocast(head.hidden_NH):
        for rows in (part for chunk in plan.token_slices(N) for part in plan.logit_slices(chunk)):
            of_rows, at = head.part(rows), None
            for columns in plan.column_slices(V):
                logits = buffer.view(rows.stop - rows.start, columns.stop - columns.start)
                of_rows.logits_into(logits, columns)
                if at is None:  # allocated while the first product runs
                    at = Rows.empty(ids_NK[rows], head.hidden_NH, options, one_block=plan.columns >= V)
                add_block(Block(logits, columns.start, V), at, options)
            assert at is not None
            parts.append(at.results(options))
    if not parts:
        parts.append(Rows.empty(ids_NK, head.hidden_NH, options, one_block=True).results(options))
    return ForwardResults(*(parts[0] if len(parts) == 1 else RowResults.joined(parts)), kept_NV)


def _forward_fake(head: Head, ids_NK: Tensor, options: LogprobOptions, keep: bool, block_bytes: int) -> ForwardResults:
    N, V, one_block, buffer = head.tokens, head.vocab, True, None
    if keep:
        buffer = LogitBuffer(N, V, head.hidden_NH, head.logits_dtype)
    elif isinstance(N, int):
        # The planner traces this fake: the buffer is alive inside the operator.
        plan = _forward_plan(head, keep, block_bytes)
        one_block, buffer = plan.columns >= V, logits_buffer(head, plan)
    rows = Rows.empty(ids_NK, head.hidden_NH, options, one_block)
    kept_NV = buffer.view(N, V) if keep and buffer is not None else _no_logits(head)
    del buffer
    return ForwardResults(*rows.fake_results(), kept_NV)


linear_logprobs_fwd = Primitive("linear_logprobs_fwd", composite=_forward_body, fake=_forward_fake)


class _LogprobGradients:
    """Writes the gradients of blocks of logits. kept_NV: the logits of all tokens; None to compute them again."""

    def __init__(self, head: Head, upstream: Upstream, logits: LogitBuffer | Tensor, options: LogprobOptions) -> None:
        self.head, self.upstream, self.logits, self.options = head, upstream, logits, options
        self.gathered = False

    def select_tokens(self, rows: slice) -> Upstream:
        return self.upstream.part(rows)

    def no_gradient_mask(self, rows: slice) -> Tensor | None:
        return None if self.gathered else (self.upstream.ids_NK[rows] == self.options.ignore_index).all(1)

    def compute_block(self, part: Upstream, rows: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        if columns.start == columns.stop:
            return
        if isinstance(self.logits, Tensor):
            logits = self.logits[rows, columns]
        else:
            logits = self.logits.view(rows.stop - rows.start, columns.stop - columns.start)
            self.head.part(rows).logits_into(logits, columns)
        assert grads[0] is not None
        gradient_into(Block(logits, columns.start, self.head.vocab), part, self.options, grads[0])


def _backward_body(
    head: Head,
    upstream: Upstream,
    kept_NV: Tensor | None,
    logprob: LogprobOptions,
    wanted: Wanted,
    options: BackwardOptions,
) -> Gradients:
    """The gradients of all blocks. kept_NV: the logits of all tokens; None to compute them again."""
    size = (head.tokens, head.vocab)
    plan = options.plan(size, LogitBytes.of(head.dtype), kept_NV is not None)
    sums = empty_sums(head, wanted, plan, options.fp32_hidden)
    work = _LogprobGradients(head, upstream, logits_buffer(head, plan) if kept_NV is None else kept_NV, logprob)
    work.gathered = options.gathered
    with no_autocast(head.hidden_NH):
        run_blocks(plan, [sums], size, work)
    return sums.gradients


def _backward_fake(
    head: Head,
    upstream: Upstream,
    kept_NV: Tensor | None,
    logprob: LogprobOptions,
    wanted: Wanted,
    options: BackwardOptions,
) -> Gradients:
    plan = options.plan((head.tokens, head.vocab), LogitBytes.of(head.dtype), kept_NV is not None)
    gradients = empty_gradients(head, wanted, plan, options.fp32_hidden)
    if isinstance(head.tokens, int):
        alive = [gradient_buffer(head, plan)] + ([logits_buffer(head, plan)] if kept_NV is None else [])
        sums = _alive_in_backward(head, wanted, plan, left_out=not options.gathered)
        del alive, sums
    return gradients


linear_logprobs_bwd = Primitive("linear_logprobs_bwd", composite=_backward_body, fake=_backward_fake)


# --- divergences of two heads -----------------------------------------------------------------------------------------


class HeadPair(NamedTuple):
    """The heads of the distributions p and q."""

    p: Head
    q: Head

    def at(self, counted: CountedTokens) -> HeadPair:
        return HeadPair(self.p.at(counted), self.q.at(counted))

    @property
    def size(self) -> tuple[int, int]:
        """(N, V)"""
        return self.p.tokens, self.p.vocab

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of divergences and statistics."""
        return torch.promote_types(self.p.sum_dtype, self.q.sum_dtype)

    def logit_bytes(self, wanted: WantedPair) -> LogitBytes:
        p, q = LogitBytes.of(self.p.dtype), LogitBytes.of(self.q.dtype)
        gradients = (p.gradients if any(wanted.p) else 0) + (q.gradients if any(wanted.q) else 0)
        return LogitBytes(p.logits + q.logits, gradients)

    def empty_rows(self, counts_N: Tensor | None) -> DivergenceRows:
        """Uninitialised results."""
        x, N, dtype = self.p.hidden_NH, self.p.tokens, self.sum_dtype
        return DivergenceRows(
            counts_N,
            x.new_empty(N, dtype=dtype),
            x.new_empty((8, N), dtype=dtype),
            x.new_empty((2, N), dtype=torch.int32),
        )

    def logits_into(self, out: LogitPair, rows: slice, columns: slice) -> None:
        self.p.part(rows).logits_into(out.p_NC, columns)
        self.q.part(rows).logits_into(out.q_NC, columns)


class WantedPair(NamedTuple):
    """The gradients that are wanted of each head."""

    p: Wanted
    q: Wanted


class PairBuffers:
    """Memory for the logits of both heads that exist at once."""

    def __init__(self, pair: HeadPair, plan: BlockPlan) -> None:
        self._p, self._q = logits_buffer(pair.p, plan), logits_buffer(pair.q, plan)

    def view(self, n: int, c: int, first: int = 0) -> LogitPair:
        return LogitPair(self._p.view(n, c), self._q.view(n, c), first)


class KlResults(NamedTuple):
    """The results of the forward; logits that are not kept are empty."""

    value_N: Tensor
    stats_8N: Tensor
    peaks_2N: Tensor
    p_kept_NV: Tensor
    q_kept_NV: Tensor

    @classmethod
    def of(cls, pair: HeadPair, rows: DivergenceRows, kept: PairBuffers | None) -> KlResults:
        """kept: the logits of all tokens, or None."""
        logits = LogitPair(_no_logits(pair.p), _no_logits(pair.q)) if kept is None else kept.view(*pair.size)
        return cls(rows.value_N, rows.stats_8N, rows.peaks_2N, logits.p_NC, logits.q_NC)


def rows_at_once(pair: HeadPair, most_vocab: int, keep: bool, block_bytes: int) -> BlockPlan:
    """The forward's blocks. most_vocab: the most rows of a weight that a process holds."""
    N, V = pair.size
    if keep:
        return whole_plan(N, V)
    logits = pair.logit_bytes(WantedPair(NOTHING, NOTHING)).logits
    n = even_chunk(N, block_bytes // max(most_vocab * logits, 1))
    return BlockPlan(n, V, n)


def _kl_forward_body(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, keep: bool, block_bytes: int
) -> KlResults:
    (N, V), plan = pair.size, rows_at_once(pair, pair.p.vocab, keep, block_bytes)
    buffers, results = PairBuffers(pair, plan), pair.empty_rows(counts_N)
    with no_autocast(pair.p.hidden_NH):
        for rows in plan.token_slices(N):
            logits = buffers.view(rows.stop - rows.start, V)
            pair.logits_into(logits, rows, slice(0, V))
            divergence(logits, results.part(rows), options)
    return KlResults.of(pair, results, buffers if keep else None)


def _kl_forward_fake(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, keep: bool, block_bytes: int
) -> KlResults:
    buffers = None
    if isinstance(pair.p.tokens, int):
        # The planner traces this fake: the buffers are alive inside the operator.
        buffers = PairBuffers(pair, rows_at_once(pair, pair.p.vocab, keep, block_bytes))
    return KlResults.of(pair, pair.empty_rows(counts_N), buffers if keep else None)


linear_kl_fwd = Primitive("linear_kl_fwd", composite=_kl_forward_body, fake=_kl_forward_fake)


class KlGradients(NamedTuple):
    """Gradients times their side's scale in `KlUpstream`; what is not wanted is empty. In fp16 they are fp32."""

    p_dx_NH: Tensor
    p_dw_VH: Tensor
    p_db_V: Tensor
    q_dx_NH: Tensor
    q_dw_VH: Tensor
    q_db_V: Tensor

    @classmethod
    def of(cls, p: Gradients, q: Gradients) -> KlGradients:
        return cls(*p[:3], *q[:3])


class _KlBlocks:
    """Writes the gradients of blocks of both heads' logits, which are kept or computed again."""

    def __init__(self, pair: HeadPair, upstream: KlUpstream, logits: LogitPair | PairBuffers, kl: KlOptions) -> None:
        self.pair, self.upstream, self.logits, self.kl = pair, upstream, logits, kl

    def select_tokens(self, rows: slice) -> KlUpstream:
        return self.upstream.part(rows)

    def no_gradient_mask(self, rows: slice) -> Tensor | None:
        counts_N = self.upstream.counts_N
        return None if counts_N is None else counts_N[rows] == 0

    def compute_block(self, part: KlUpstream, rows: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        if columns.start == columns.stop:
            return
        if isinstance(self.logits, LogitPair):
            block = LogitPair(self.logits.p_NC[rows, columns], self.logits.q_NC[rows, columns], columns.start)
        else:
            block = self.logits.view(rows.stop - rows.start, columns.stop - columns.start, columns.start)
            self.pair.logits_into(block, rows, columns)
        divergence_gradient(block, part, self.kl, *grads)


def _kl_backward_body(
    pair: HeadPair,
    upstream: KlUpstream,
    p_kept_NV: Tensor | None,
    q_kept_NV: Tensor | None,
    kl: KlOptions,
    wanted: WantedPair,
    options: BackwardOptions,
) -> KlGradients:
    """The gradients of all blocks. p_kept_NV, q_kept_NV: the logits of all tokens; None to compute them again."""
    kept = None if p_kept_NV is None or q_kept_NV is None else LogitPair(p_kept_NV, q_kept_NV)
    plan = options.plan(pair.size, pair.logit_bytes(wanted), kept is not None)
    logits = PairBuffers(pair, plan) if kept is None else kept
    p, q = (empty_sums(head, want, plan, options.fp32_hidden) for head, want in zip(pair, wanted, strict=True))
    with no_autocast(pair.p.hidden_NH):
        run_blocks(plan, [p, q], pair.size, _KlBlocks(pair, upstream, logits, kl))
    return KlGradients.of(p.gradients, q.gradients)


def _kl_backward_fake(
    pair: HeadPair,
    upstream: KlUpstream,
    p_kept_NV: Tensor | None,
    q_kept_NV: Tensor | None,
    kl: KlOptions,
    wanted: WantedPair,
    options: BackwardOptions,
) -> KlGradients:
    kept = p_kept_NV is not None
    plan = options.plan(pair.size, pair.logit_bytes(wanted), kept)
    heads = list(zip(pair, wanted, strict=True))
    gradients = KlGradients.of(*(empty_gradients(head, want, plan, options.fp32_hidden) for head, want in heads))
    if isinstance(pair.p.tokens, int):
        alive: list[object] = [] if kept else [PairBuffers(pair, plan)]
        for head, want in heads:
            if any(want):
                alive.append(gradient_buffer(head, plan))
                alive.append(_alive_in_backward(head, want, plan, upstream.counts_N is not None))
        del alive
    return gradients


linear_kl_bwd = Primitive("linear_kl_bwd", composite=_kl_backward_body, fake=_kl_backward_fake)
