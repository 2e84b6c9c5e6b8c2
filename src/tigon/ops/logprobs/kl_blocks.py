"""The loop over blocks of logits of two lm_heads: divergences per token, and the gradients of both heads.

The logits of both heads exist for the same block. The forward's blocks are some tokens by the whole vocabulary, because
a divergence needs both log-sum-exps before its first term. One kernel turns them into the divergences. The backward
computes the logits again, in blocks of columns as in `blocks.py`. One kernel turns the logits of each head that is
trained into their gradient, in place.

If the logits of all tokens fit, they are kept from forward to backward, which saves two products.
"""

from __future__ import annotations

from collections.abc import Callable
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
    _Buffer,
    _sum_dtype,
    empty_gradients,
    plan_blocks,
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

    @property
    def itemsize(self) -> int:
        """Bytes of a token's two logits of one column."""
        return self.p_hidden_NG.element_size() + self.q_hidden_NH.element_size()

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


class _Buffers:
    """Memory for the logits of one block of both heads."""

    def __init__(self, pair: HeadPair, plan: BlockPlan) -> None:
        self._p, self._q = _Buffer(plan, pair.p_hidden_NG), _Buffer(plan, pair.q_hidden_NH)

    def view(self, n: int, c: int, first: int = 0) -> LogitPair:
        return LogitPair(self._p.view(n, c), self._q.view(n, c), first)


def _logits_into(pair: HeadPair, rows: slice, columns: slice, out: LogitPair) -> None:
    pair.p.logits(rows, columns, out.p_NC)
    pair.q.logits(rows, columns, out.q_NC)


def keeps_logits(pair: HeadPair, most_bytes: int) -> bool:
    """Whether the logits of all tokens are kept for backward."""
    return pair.tokens * pair.vocab * pair.itemsize <= most_bytes


class KlResults(NamedTuple):
    """The results of the forward; logits that are not kept are empty."""

    value_N: Tensor
    stats_8N: Tensor
    peaks_2N: Tensor
    p_kept_NV: Tensor
    q_kept_NV: Tensor


def _forward_plan(pair: HeadPair, keep: bool, block_bytes: int) -> BlockPlan:
    N, V = pair.tokens, pair.vocab
    n = max(N, 1) if keep else even_chunk(N, block_bytes // (V * pair.itemsize))
    return BlockPlan(n, V)


def _kept(pair: HeadPair, buffers: _Buffers | None) -> LogitPair:
    """The logits in `buffers`, of all tokens; empty for None."""
    V = pair.vocab
    if buffers is None:
        return LogitPair(pair.p_hidden_NG.new_empty((0, V)), pair.q_hidden_NH.new_empty((0, V)))
    return buffers.view(pair.tokens, V)


def _forward_body(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, keep: bool, block_bytes: int
) -> KlResults:  # fmt: skip
    plan = _forward_plan(pair, keep, block_bytes)
    buffers, results = _Buffers(pair, plan), pair.empty_rows(counts_N)
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
        buffers = _Buffers(pair, _forward_plan(pair, keep, block_bytes))
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


def _backward_plan(pair: HeadPair, options: KlBackwardOptions) -> BlockPlan:
    return plan_blocks(pair.tokens, pair.vocab, pair.itemsize, options.block_bytes)


def _backward_body(
    pair: HeadPair, upstream: KlUpstream, p_kept_NV: Tensor | None, q_kept_NV: Tensor | None, kl: KlOptions,
    options: KlBackwardOptions,
) -> KlGradients:  # fmt: skip
    plan = _backward_plan(pair, options)
    buffers = _Buffers(pair, plan)

    def logits(rows: slice, columns: slice) -> tuple[LogitPair, LogitPair]:
        grads = buffers.view(rows.stop - rows.start, columns.stop - columns.start, columns.start)
        if p_kept_NV is None or q_kept_NV is None:
            _logits_into(pair, rows, columns, grads)
            return grads, grads
        return LogitPair(p_kept_NV[rows, columns], q_kept_NV[rows, columns], columns.start), grads

    return _gradients(pair, upstream, plan, (kl, options), logits)


def backward_in_place(
    pair: HeadPair, upstream: KlUpstream, p_kept_NV: Tensor, q_kept_NV: Tensor, kl: KlOptions,
    options: KlBackwardOptions,
) -> KlGradients:  # fmt: skip
    """As `linear_kl_bwd`, but the kept logits become their gradients, so that no second backward can follow."""
    kept = LogitPair(p_kept_NV, q_kept_NV)
    plan = BlockPlan(max(pair.tokens, 1), pair.vocab)
    return _gradients(pair, upstream, plan, (kl, options), lambda *_: (kept, kept))


def _gradients(
    pair: HeadPair, upstream: KlUpstream, plan: BlockPlan, options: tuple[KlOptions, KlBackwardOptions],
    logits: Callable[[slice, slice], tuple[LogitPair, LogitPair]],
) -> KlGradients:  # fmt: skip
    """The gradients of all blocks. logits: (rows, columns) -> a block of logits and the memory for its gradients."""
    kl, wanted = options
    p_sums = GradientSums(pair.p, wanted.p or _NOTHING, plan)
    q_sums = GradientSums(pair.q, wanted.q or _NOTHING, plan)
    with no_autocast(pair.p_hidden_NG):
        for rows in plan.token_slices(pair.tokens):
            of_rows = upstream.part(rows)
            left_out_n = None if of_rows.counts_N is None else of_rows.counts_N == 0
            p_sums.begin(rows, left_out_n)
            q_sums.begin(rows, left_out_n)
            for columns in plan.column_slices(pair.vocab):
                block, grads = logits(rows, columns)
                divergence_gradient(
                    block, of_rows, kl, grads.p_NC if wanted.p else None, grads.q_NC if wanted.q else None
                )
                if wanted.p:
                    p_sums.add(grads.p_NC, columns)
                if wanted.q:
                    q_sums.add(grads.q_NC, columns)
            p_sums.end()
            q_sums.end()
    return KlGradients(*p_sums.gradients, *q_sums.gradients)


def _backward_fake(
    pair: HeadPair, upstream: KlUpstream, p_kept_NV: Tensor | None, q_kept_NV: Tensor | None, kl: KlOptions,
    options: KlBackwardOptions,
) -> KlGradients:  # fmt: skip
    N = pair.tokens
    plan = _backward_plan(pair, options) if isinstance(N, int) else BlockPlan(N, 1)
    gradients = KlGradients(
        *empty_gradients(pair.p, options.p or _NOTHING, plan), *empty_gradients(pair.q, options.q or _NOTHING, plan)
    )
    if isinstance(N, int):
        # The planner traces this fake: the buffers, copies of X and sums of dX are alive inside the operator.
        alive: list[object] = [_Buffers(pair, plan)]
        for x, wanted in ((pair.p_hidden_NG, options.p), (pair.q_hidden_NH, options.q)):
            if wanted is not None and wanted.want_weight and upstream.counts_N is not None:
                alive.append(torch.empty_like(x[: plan.tokens]))
            if wanted is not None and wanted.want_hidden and plan.columns < pair.vocab:
                alive.append(x.new_empty((min(plan.tokens, N), x.shape[1]), dtype=_sum_dtype(x, True)))
        del alive
    return gradients


linear_kl_bwd = Primitive("linear_kl_bwd", composite=_backward_body, fake=_backward_fake)
