"""`linear_kl` for two heads divided alike by vocabulary: one exchange per chunk, between its statistics and its terms.

A divergence's terms need the log-sum-exps of both whole rows of logits. So the kernel runs twice on each process's
columns. In between, the processes exchange the statistics of the chunk. The divergence and the means for its gradient
are sums over columns, so one all-reduce at the end adds them up.

The columns of the largest z_p and z_q are those of one process. The others get column -1, which no block has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tigon.ops.dispatch import first_order
from tigon.ops.lm_head import no_autocast, spread
from tigon.ops.logprobs.blocks import BlockPlan, keeps_logits
from tigon.ops.logprobs.kl_backward import kl_gradients, save_for_backward
from tigon.ops.logprobs.kl_blocks import HeadPair, LogitBuffers, _kept, _logits_into
from tigon.ops.logprobs.kl_rows import DivergenceRows, KlOptions, divergence
from tigon.ops.losses.chunk_plan import even_chunk
from tigon.ops.vocab_parallel import VocabParallelOptions, exchange, outside_graphs

# N tokens, U rows of each weight in this process.


@dataclass(frozen=True, kw_only=True)
class DividedKlCall:
    """The arguments of one call that are not differentiated."""

    counts_N: Tensor | None
    index: Tensor | None
    """Flat positions of the tokens that count; None for all. The same in each process."""
    options: KlOptions
    chunk_bytes: tuple[int, int]
    part: VocabParallelOptions
    most_rows: int
    """The most rows that a process holds. They decide the chunks, of which each process must have as many."""


class DividedKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, call, grad_enabled = args
        pair, index, rows = HeadPair(*tensors), call.index, tensors[0].shape[0]
        ctx.want = tuple(grad_enabled and need for need in ctx.needs_input_grad[:6])
        pair = pair if index is None else pair.tokens_at(index)
        N, (block_bytes, most_kept) = pair.tokens, call.chunk_bytes
        size = pair.logit_bytes(ctx.want)
        keep = any(ctx.want) and keeps_logits(N, call.most_rows, size, most_kept)
        n = max(N, 1) if keep else even_chunk(N, block_bytes // max(call.most_rows * size.logits, 1))
        plan = BlockPlan(n, pair.vocab, n)
        buffers, results = LogitBuffers(pair, plan), pair.empty_rows(call.counts_N)
        with no_autocast(pair.p_hidden_NG):
            for at in plan.token_slices(N):
                logits, of_rows = buffers.view(at.stop - at.start, pair.vocab), results.part(at)
                if pair.vocab:
                    _logits_into(pair, at, slice(0, pair.vocab), logits)
                    divergence(logits, of_rows, call.options, terms=False)
                _exchange_statistics(of_rows, call.part, has_columns=pair.vocab > 0)
                if pair.vocab:
                    divergence(logits, of_rows, call.options, statistics=False)
        _add_up(results, call.part, has_columns=pair.vocab > 0)
        if any(ctx.want):
            kept = _kept(pair, buffers) if keep and pair.vocab else None
            save_for_backward(
                ctx, pair, call.counts_N, index, results, None if kept is None else (kept.p_NC, kept.q_NC)
            )
        ctx.options, ctx.rows, ctx.part = call.options, rows, call.part
        ctx.block_bytes = most_kept if keep else block_bytes
        return spread(results.value_N, index, rows, 0.0)

    @staticmethod
    @first_order
    def backward(ctx: Any, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
        return (*kl_gradients(ctx, dvalue_N, ctx.part), None, None)


def _exchange_statistics(rows: DivergenceRows, part: VocabParallelOptions, has_columns: bool) -> None:
    """Replace the statistics of this process's columns by those of all columns."""
    stats_8N, peaks_2N = rows.stats_8N, rows.peaks_2N
    if not has_columns:
        stats_8N[:4] = -torch.inf
    (of_all,) = exchange(part, [stats_8N[:4].t()], stats_8N.dtype)
    mine = part.rank
    for side, m_at in enumerate((0, 2)):
        m, log_s = of_all[..., m_at], of_all[..., m_at + 1]
        top_N = m.amax(0)
        base_N = torch.where(top_N == -torch.inf, 0.0, top_N)
        stats_8N[m_at] = top_N
        stats_8N[m_at + 1] = torch.logsumexp((m - base_N) + log_s, 0)
        has_peak_N = (m == top_N).to(torch.uint8).argmax(0) == mine
        peaks_2N[side] = torch.where(has_peak_N, peaks_2N[side], -1) if has_columns else -1


def _add_up(rows: DivergenceRows, part: VocabParallelOptions, has_columns: bool) -> None:
    """Add up the divergences and the means over the processes, in place."""
    sums = torch.cat([rows.value_N.unsqueeze(0), rows.stats_8N[4:6]])
    if not has_columns:
        sums.zero_()
    part.all_reduce(sums)
    rows.value_N.copy_(sums[0])
    rows.stats_8N[4:6] = sums[1:]


@outside_graphs
def divided_kl(sides: tuple[Tensor | None, ...], call: DividedKlCall) -> Tensor:
    """The divergences (N,) of two divided heads; sides: hidden, weight and bias of p and of q."""
    return cast(Tensor, DividedKl.apply(*sides, call, torch.is_grad_enabled()))
