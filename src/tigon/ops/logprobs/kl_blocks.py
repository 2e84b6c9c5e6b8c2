"""The loop over blocks of logits of two lm_heads: divergences per token, and the gradients of both heads.

The logits of both heads exist for the same block, in fp32 as in `blocks.py`. The forward's blocks are some tokens by
the whole vocabulary, because a divergence needs both log-sum-exps before its first term. One kernel turns them into the
divergences. The backward computes the logits again, in blocks of columns as in `blocks.py`. One kernel writes the
gradient of the logits of each head that is trained.

If the logits of all tokens fit, they are kept from forward to backward, which saves two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive
from tigon.ops.lm_head import no_autocast
from tigon.ops.logprobs.blocks import (
    BackwardOptions,
    BlockPlan,
    GradientSums,
    HeadTensors,
    LogitBytes,
    _sum_dtype,
    empty_gradients,
    plan_blocks,
    plan_kept,
)
from tigon.ops.logprobs.kl_rows import (
    DivergenceRows,
    KlOptions,
    KlUpstream,
    LogitPair,
    divergence,
    divergence_gradient,
)
from tigon.ops.losses.chunk_plan import even_chunk

# N tokens, G hidden size of p, H hidden size of q, V vocabulary; a block has n tokens and c columns.


@dataclass(frozen=True)
class HeadPair:
    """Hidden states and lm_heads of p and q."""

    p_hidden_NG: Tensor
    p_weight_VG: Tensor
    p_bias: Tensor | None
    q_hidden_NH: Tensor
    q_weight_VH: Tensor
    q_bias: Tensor | None

    def tokens_at(self, index: Tensor) -> HeadPair:
        """The same heads with some of the tokens."""
        p_hidden_NG, q_hidden_NH = (x.index_select(0, index) for x in (self.p_hidden_NG, self.q_hidden_NH))
        return HeadPair(p_hidden_NG, self.p_weight_VG, self.p_bias, q_hidden_NH, self.q_weight_VH, self.q_bias)

    @property
    def p(self) -> HeadTensors:
        return HeadTensors(self.p_hidden_NG, self.p_weight_VG, self.p_bias)

    @property
    def q(self) -> HeadTensors:
        return HeadTensors(self.q_hidden_NH, self.q_weight_VH, self.q_bias)

    @property
    def tokens(self) -> int:
        return self.p_hidden_NG.shape[0]

    @property
    def vocab(self) -> int:
        return self.p_weight_VG.shape[0]

    def logit_bytes(self, wants: Sequence[bool]) -> LogitBytes:
        """wants: whether a gradient is wanted: of p's hidden states, weight and bias, then of q's."""
        p, q = self.p.logit_bytes, self.q.logit_bytes
        gradients = (p.gradients if any(wants[:3]) else 0) + (q.gradients if any(wants[3:6]) else 0)
        return LogitBytes(p.logits + q.logits, gradients)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of divergences and statistics."""
        return torch.promote_types(
            torch.promote_types(self.p_hidden_NG.dtype, self.q_hidden_NH.dtype), torch.float32
        )  # fmt: skip

    def empty_rows(self, counts_N: Tensor | None) -> DivergenceRows:
        """Uninitialised results."""
        x, N, dtype = self.p_hidden_NG, self.tokens, self.sum_dtype
        return DivergenceRows(
            counts_N, x.new_empty(N, dtype=dtype), x.new_empty((8, N), dtype=dtype),
            x.new_empty((2, N), dtype=torch.int32),
        )  # fmt: skip


class LogitBuffers:
    """Memory for the logits of both heads that exist at once."""

    def __init__(self, pair: HeadPair, plan: BlockPlan) -> None:
        self._p, self._q = pair.p.logits_buffer(plan), pair.q.logits_buffer(plan)

    def view(self, n: int, c: int, first: int = 0) -> LogitPair:
        return LogitPair(self._p.view(n, c), self._q.view(n, c), first)


def _logits_into(pair: HeadPair, rows: slice, columns: slice, out: LogitPair) -> None:
    pair.p.logits(rows, columns, out.p_NC)
    pair.q.logits(rows, columns, out.q_NC)


class KlResults(NamedTuple):
    """The results of the forward; logits that are not kept are empty."""

    value_N: Tensor
    stats_8N: Tensor
    peaks_2N: Tensor
    p_kept_NV: Tensor
    q_kept_NV: Tensor


def _forward_plan(pair: HeadPair, keep: bool, block_bytes: int) -> BlockPlan:
    N, V = pair.tokens, pair.vocab
    n = max(N, 1) if keep else even_chunk(N, block_bytes // (V * pair.logit_bytes((False,) * 6).logits))
    return BlockPlan(n, V, n)


def _kept(pair: HeadPair, buffers: LogitBuffers | None) -> LogitPair:
    """The logits in `buffers`, of all tokens; empty for None."""
    if buffers is None:
        return LogitPair(pair.p.no_logits(), pair.q.no_logits())
    return buffers.view(pair.tokens, pair.vocab)


def _forward_body(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, keep: bool, block_bytes: int
) -> KlResults:  # fmt: skip
    plan = _forward_plan(pair, keep, block_bytes)
    buffers, results = LogitBuffers(pair, plan), pair.empty_rows(counts_N)
    with no_autocast(pair.p_hidden_NG):
        for rows in plan.token_slices(pair.tokens):
            logits = buffers.view(rows.stop - rows.start, pair.vocab)
            _logits_into(pair, rows, slice(0, pair.vocab), logits)
            divergence(logits, results.part(rows), options)
    return _results(results, _kept(pair, buffers if keep else None))


def _results(rows: DivergenceRows, kept: LogitPair) -> KlResults:
    return KlResults(rows.value_N, rows.stats_8N, rows.peaks_2N, kept.p_NC, kept.q_NC)


def _forward_fake(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, keep: bool, block_bytes: int
) -> KlResults:  # fmt: skip
    buffers = None
    if isinstance(pair.tokens, int):
        # The planner traces this fake: the buffers are alive inside the operator.
        buffers = LogitBuffers(pair, _forward_plan(pair, keep, block_bytes))
    results = pair.empty_rows(counts_N)
    return _results(results, _kept(pair, buffers if keep else None))


linear_kl_fwd = Primitive("linear_kl_fwd", composite=_forward_body, fake=_forward_fake)


class KlBackwardOptions(NamedTuple):
    """The gradients that are wanted."""

    want_p_hidden: bool
    want_p_weight: bool
    want_p_bias: bool
    want_q_hidden: bool
    want_q_weight: bool
    want_q_bias: bool
    block_bytes: int
    fp32_hidden: bool = False
    """As in `BackwardOptions`."""

    @property
    def p(self) -> BackwardOptions | None:
        """The gradients of p's head; None if it is frozen."""
        wanted = self[:3]
        return BackwardOptions(*wanted, self.block_bytes, self.fp32_hidden) if any(wanted) else None

    @property
    def q(self) -> BackwardOptions | None:
        wanted = self[3:6]
        return BackwardOptions(*wanted, self.block_bytes, self.fp32_hidden) if any(wanted) else None


class KlGradients(NamedTuple):
    """Gradients times their side's scale in `KlUpstream`; what is not wanted is empty. In fp16 they are fp32."""

    p_dx_NG: Tensor
    p_dw_VG: Tensor
    p_db_V: Tensor
    q_dx_NH: Tensor
    q_dw_VH: Tensor
    q_db_V: Tensor


_NOTHING = BackwardOptions(want_hidden=False, want_weight=False, want_bias=False, block_bytes=0)


def _backward_plan(pair: HeadPair, options: KlBackwardOptions, kept: bool) -> BlockPlan:
    plan = plan_kept if kept else plan_blocks
    return plan(pair.tokens, pair.vocab, pair.logit_bytes(options[:6]), options.block_bytes)


class _Side:
    """The gradients of one head, and memory for the gradient of a block of its logits; neither if it is frozen."""

    def __init__(self, head: HeadTensors, wanted: BackwardOptions | None, plan: BlockPlan) -> None:
        self.sums = GradientSums(head, wanted or _NOTHING, plan)
        self._buffer = None if wanted is None else head.gradient_buffer(plan)

    def block(self, n: int, c: int) -> Tensor | None:
        return None if self._buffer is None else self._buffer.view(n, c)


def _backward_body(
    pair: HeadPair, upstream: KlUpstream, p_kept_NV: Tensor | None, q_kept_NV: Tensor | None, kl: KlOptions,
    options: KlBackwardOptions,
) -> KlGradients:  # fmt: skip
    """The gradients of all blocks. p_kept_NV, q_kept_NV: the logits of all tokens; None to compute them again."""
    kept = None if p_kept_NV is None or q_kept_NV is None else LogitPair(p_kept_NV, q_kept_NV)
    plan = _backward_plan(pair, options, kept is not None)
    buffers = LogitBuffers(pair, plan) if kept is None else None
    sides = _Side(pair.p, options.p, plan), _Side(pair.q, options.q, plan)
    with no_autocast(pair.p_hidden_NG):
        for rows in plan.token_slices(pair.tokens):
            parts = [(part, upstream.part(part)) for part in plan.logit_slices(rows)]
            counts_N = upstream.part(rows).counts_N
            for side in sides:
                side.sums.begin(rows, None if counts_N is None else counts_N == 0)
            for columns in plan.column_slices(pair.vocab):
                grads = [side.block(rows.stop - rows.start, columns.stop - columns.start) for side in sides]
                for part, of_part in parts:
                    if buffers is None:
                        assert kept is not None
                        block = LogitPair(kept.p_NC[part, columns], kept.q_NC[part, columns], columns.start)
                    else:
                        block = buffers.view(part.stop - part.start, columns.stop - columns.start, columns.start)
                        _logits_into(pair, part, columns, block)
                    at = slice(part.start - rows.start, part.stop - rows.start)
                    divergence_gradient(block, of_part, kl, *(g if g is None else g[at] for g in grads))
                for side, grad_nc in zip(sides, grads, strict=True):
                    if grad_nc is not None:
                        side.sums.add(grad_nc, columns)
            for side in sides:
                side.sums.end()
    return KlGradients(*sides[0].sums.gradients, *sides[1].sums.gradients)


def _backward_fake(
    pair: HeadPair, upstream: KlUpstream, p_kept_NV: Tensor | None, q_kept_NV: Tensor | None, kl: KlOptions,
    options: KlBackwardOptions,
) -> KlGradients:  # fmt: skip
    N, kept = pair.tokens, p_kept_NV is not None
    plan = _backward_plan(pair, options, kept) if isinstance(N, int) else BlockPlan(N, 1, N)
    gradients = KlGradients(
        *empty_gradients(pair.p, options.p or _NOTHING, plan), *empty_gradients(pair.q, options.q or _NOTHING, plan)
    )
    if isinstance(N, int):
        # The planner traces this fake: the buffers, copies of X and sums of dX are alive inside the operator.
        alive: list[object] = [] if kept else [LogitBuffers(pair, plan)]
        for head, wanted in ((pair.p, options.p), (pair.q, options.q)):
            x = head.hidden_NH
            if wanted is not None:
                alive.append(head.gradient_buffer(plan))
            if wanted is not None and wanted.want_weight and upstream.counts_N is not None:
                alive.append(torch.empty_like(x[: plan.tokens]))
            if wanted is not None and wanted.want_hidden and plan.columns < pair.vocab:
                alive.append(x.new_empty((min(plan.tokens, N), x.shape[1]), dtype=_sum_dtype(x, True)))
        del alive
    return gradients


linear_kl_bwd = Primitive("linear_kl_bwd", composite=_backward_body, fake=_backward_fake)
