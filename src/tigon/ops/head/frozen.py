"""Frozen heads: the operators of `linear_logprobs` and `linear_kl` that compute no logits twice.

The gradient of a token's hidden state is a multiple of the token's upstream gradient u:

    dX_i = u_i · (dlogits_i W)        dlogits: the gradient of the logits for u = 1

So the forward turns each block of logits into its gradient and multiplies it with W, and the backward multiplies the
rows of the product. A trained head adds up tokens to dW, which needs u before the product. Its logits are kept or
computed twice (`blocks.py`).

A row of dX is rounded once more than with u in the gradient of the logits. On random inputs the error in bf16 is 1.1 to
1.2 times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive, no_autocast
from tigon.ops.head.block_loop import BlockPlan, run_blocks
from tigon.ops.head.blocks import (
    HeadPair,
    PairBuffers,
    WantedPair,
    empty_gradients,
    empty_sums,
    gradient_buffer,
    logits_buffer,
)
from tigon.ops.head.inputs import Head, LogitBuffer, Wanted
from tigon.ops.head.plan import LogitBytes, plan_whole_rows
from tigon.ops.losses.divergence_rows import DivergenceRows, KlOptions, KlUpstream, divergence, divergence_gradient
from tigon.ops.losses.logprob_inputs import LogprobOptions, check_ids
from tigon.ops.losses.logprob_rows import Block, Rows, Upstream, add_block, gradient_into
from tigon.ops.losses.results import RowResults

# N tokens, H hidden, V vocabulary, K ids of a token (1), J largest logits (0).

OF_HIDDEN = Wanted(want_hidden=True)


def is_frozen(*wanted: Wanted) -> bool:
    """Whether the gradients that are wanted of these heads are those of hidden states alone."""
    return any(each.want_hidden for each in wanted) and all(each in (Wanted(), OF_HIDDEN) for each in wanted)


# --- log-probabilities ------------------------------------------------------------------------------------------------


class FrozenResults(NamedTuple):
    """The fields of `RowResults`, and the gradient of hidden for an upstream gradient of 1 per log-probability."""

    logprob_NK: Tensor
    stats_2N: Tensor
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor
    dx_NH: Tensor

    @property
    def rows(self) -> RowResults:
        return RowResults(*self[:-1])


def _plan(head: Head, block_bytes: int) -> BlockPlan:
    return plan_whole_rows(head.tokens, head.vocab, LogitBytes.of(head.dtype), block_bytes)


class _FrozenBlocks:
    """Computes the results of some tokens, and at once the gradient of their logits."""

    def __init__(self, head: Head, ids_NK: Tensor, logits: LogitBuffer, options: LogprobOptions) -> None:
        self.head, self.ids_NK, self.logits, self.options = head, ids_NK, logits, options
        self.parts: list[RowResults] = []

    def select_tokens(self, rows: slice) -> Tensor:
        return self.ids_NK[rows]

    def no_gradient_mask(self, rows: slice) -> None:
        return None  # only a weight's gradient adds up tokens

    def compute_block(self, ids_NK: Tensor, rows: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        logits = self.logits.view(rows.stop - rows.start, columns.stop - columns.start)
        self.head.part(rows).logits_into(logits)
        at = Rows.empty(ids_NK, self.head.hidden_NH, self.options, one_block=True)
        block = Block(logits, 0, self.head.vocab)
        add_block(block, at, self.options)
        self.parts.append(at.results(self.options))
        one_NK = torch.ones_like(at.logprob_NK)
        upstream = Upstream(ids_NK, at.stats_2N, at.entropy_N, one_NK, None, None, None)
        assert grads[0] is not None
        gradient_into(block, upstream, self.options, grads[0])


def _logprobs_body(head: Head, ids_NK: Tensor, options: LogprobOptions, block_bytes: int) -> FrozenResults:
    N, V = head.tokens, head.vocab
    check_ids(head.hidden_NH, ids_NK, V, options.ignore_index)
    plan = _plan(head, block_bytes)
    sums = empty_sums(head, OF_HIDDEN, plan, False)
    work = _FrozenBlocks(head, ids_NK, logits_buffer(head, plan), options)
    with no_autocast(head.hidden_NH):
        run_blocks(plan, [sums], (N, V), work)
    parts = work.parts or [Rows.empty(ids_NK, head.hidden_NH, options, one_block=True).results(options)]
    return FrozenResults(*(parts[0] if len(parts) == 1 else RowResults.joined(parts)), sums.gradients.dx_NH)


def _logprobs_fake(head: Head, ids_NK: Tensor, options: LogprobOptions, block_bytes: int) -> FrozenResults:
    plan = _plan(head, block_bytes)
    # The planner traces this fake: the buffers are alive inside the operator.
    buffers = [logits_buffer(head, plan), gradient_buffer(head, plan)]
    dx_NH = empty_gradients(head, OF_HIDDEN, plan, False).dx_NH
    rows = Rows.empty(ids_NK, head.hidden_NH, options, one_block=True)
    del buffers
    return FrozenResults(*rows.fake_results(), dx_NH)


linear_logprobs_frozen = Primitive("linear_logprobs_frozen", composite=_logprobs_body, fake=_logprobs_fake)


# --- divergences of two heads -----------------------------------------------------------------------------------------


class FrozenKlResults(NamedTuple):
    """The divergences, and the gradients of the hidden states for an upstream gradient of 1; empty if not wanted."""

    value_N: Tensor
    p_dx_NH: Tensor
    q_dx_NH: Tensor


def _kl_plan(pair: HeadPair, wanted: WantedPair, block_bytes: int) -> BlockPlan:
    return plan_whole_rows(*pair.size, pair.logit_bytes(wanted), block_bytes)


class _FrozenPairBlocks:
    """Computes the divergences of some tokens, and at once the gradients of both heads' logits."""

    def __init__(self, pair: HeadPair, rows: DivergenceRows, buffers: PairBuffers, options: KlOptions) -> None:
        self.pair, self.rows, self.buffers, self.options = pair, rows, buffers, options

    def select_tokens(self, rows: slice) -> DivergenceRows:
        return self.rows.part(rows)

    def no_gradient_mask(self, rows: slice) -> None:
        return None

    def compute_block(self, at: DivergenceRows, rows: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        logits = self.buffers.view(rows.stop - rows.start, self.pair.p.vocab)
        self.pair.logits_into(logits, rows, slice(0, self.pair.p.vocab))
        divergence(logits, at, self.options)
        one_N = torch.ones_like(at.value_N)
        upstream = KlUpstream(at.counts_N, at.stats_8N, at.peaks_2N, one_N, None, None)
        divergence_gradient(logits, upstream, self.options, *grads)


def _kl_body(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, wanted: WantedPair, block_bytes: int
) -> FrozenKlResults:
    plan, rows = _kl_plan(pair, wanted, block_bytes), pair.empty_rows(counts_N)
    p, q = (empty_sums(head, want, plan, False) for head, want in zip(pair, wanted, strict=True))
    with no_autocast(pair.p.hidden_NH):
        run_blocks(plan, [p, q], pair.size, _FrozenPairBlocks(pair, rows, PairBuffers(pair, plan), options))
    return FrozenKlResults(rows.value_N, p.gradients.dx_NH, q.gradients.dx_NH)


def _kl_fake(
    pair: HeadPair, counts_N: Tensor | None, options: KlOptions, wanted: WantedPair, block_bytes: int
) -> FrozenKlResults:
    plan, rows = _kl_plan(pair, wanted, block_bytes), pair.empty_rows(counts_N)
    heads = list(zip(pair, wanted, strict=True))
    p_dx, q_dx = (empty_gradients(head, want, plan, False).dx_NH for head, want in heads)
    # The planner traces this fake: the buffers are alive inside the operator.
    alive = [PairBuffers(pair, plan), *(gradient_buffer(head, plan) for head, want in heads if any(want))]
    del alive
    return FrozenKlResults(rows.value_N, p_dx, q_dx)


linear_kl_frozen = Primitive("linear_kl_frozen", composite=_kl_body, fake=_kl_fake)
