"""The reduced loss of a divided head with its gradient in the forward, in chunks of tokens.

A reduced loss knows the gradient of each token's loss before the backward. So a chunk's logits become their gradient
at once, and no product runs twice. The fp32 logits of a part of a chunk exist at a time. Each part needs an exchange,
between its statistics and its gradient. The weight's gradient is a sum over chunks, in fp32. `divided_logprobs` needs
neither, but computes logits again that it cannot keep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tigon.ops.dispatch import first_order
from tigon.ops.lm_head import no_autocast, settle_dtypes
from tigon.ops.logprobs.blocks import BackwardOptions, BlockPlan, GradientSums, HeadTensors
from tigon.ops.logprobs.divided_logprobs import (
    check_known,
    check_labels,
    combined,
    local_forward,
    local_ids,
    local_options,
    local_upstream,
)
from tigon.ops.logprobs.results import Results, finished, spread_results
from tigon.ops.logprobs.rows import Block, LogprobOptions, gradient_into
from tigon.ops.vocab_parallel import DividedHead, VocabParallelOptions

# N tokens, H hidden, U rows of the weight in this process.


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A token's loss before the reduction: weight · -log p(target) + z_weight · lse²."""

    ids_N1: Tensor
    weight_N: Tensor
    z_weight_N: Tensor | None

    def at(self, rows: slice | Tensor) -> TokenLoss:
        """The losses of some tokens."""
        z_weight_N = None if self.z_weight_N is None else self.z_weight_N[rows]
        return TokenLoss(ids_N1=self.ids_N1[rows], weight_N=self.weight_N[rows], z_weight_N=z_weight_N)

    def values(self, logprob_N: Tensor, lse_N: Tensor) -> Tensor:
        losses = -self.weight_N * logprob_N
        return losses if self.z_weight_N is None else losses + self.z_weight_N * lse_N.square()

    def gradients(self, lse_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """Those of log p(target), (N, 1), and of lse; None for 0."""
        return -self.weight_N.unsqueeze(1), None if self.z_weight_N is None else 2.0 * self.z_weight_N * lse_N


@dataclass(frozen=True, kw_only=True)
class DividedChunksCall:
    """The arguments of one call that are not differentiated."""

    tokens: TokenLoss
    index: Tensor | None
    """Flat positions of the tokens that count; None for all. The same in each process."""
    inv_denominator: Tensor
    scales: tuple[Tensor, Tensor | None]
    """(factor of the gradient in the forward, factor still to multiply by or None); their product is 1 / D."""
    options: LogprobOptions
    plan: BlockPlan
    """The tokens of a chunk and of a part of it, as many in each process. A block has all columns of the process."""
    part: VocabParallelOptions


class DividedChunks(torch.autograd.Function):
    """(loss, *the results of `divided_logprobs`); only the loss is differentiable."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_UH: Tensor, bias: Tensor | None, call: DividedChunksCall
    ) -> tuple[Tensor, ...]:
        want_hidden, want_weight, want_bias = ctx.want = ctx.needs_input_grad[:3]
        index, tokens = call.index, hidden_NH.shape[0]
        if index is not None:
            hidden_NH, call = hidden_NH.index_select(0, index), replace(call, tokens=call.tokens.at(index))
        heads = HeadTensors(hidden_NH, weight_UH, bias)
        plan = call.plan
        wanted = BackwardOptions(want_hidden, want_weight, want_bias, block_bytes=0, fp32_hidden=True)
        sums = GradientSums(heads, wanted, plan)
        with no_autocast(hidden_NH):
            # Without a token that counts, one empty chunk gives the results their form.
            slices, gradients = plan.token_slices(hidden_NH.shape[0]) or [slice(0, 0)], heads.gradient_buffer(plan)
            parts = []
            for rows in slices:
                grad_nU = gradients.view(rows.stop - rows.start, weight_UH.shape[0])
                for part in plan.logit_slices(rows) or [rows]:
                    of_part = grad_nU[part.start - rows.start : part.stop - rows.start]
                    parts.append(_part(heads, call, part, of_part))
                _add_gradients(sums, call, rows, grad_nU)
        results = Results._make(torch.cat(fields) for fields in zip(*parts, strict=True))
        loss = call.tokens.values(results.logprob_NK.squeeze(1), results.lse_N).sum() * call.inv_denominator
        dx_NH, dw_UH, db_U = sums.gradients
        if want_hidden:
            call.part.sum_hidden_grad(dx_NH)
            dx_NH = dx_NH if hidden_NH.dtype == torch.float16 else dx_NH.to(hidden_NH.dtype)
        ctx.save_for_backward(dx_NH, dw_UH, db_U, call.scales[1], index)
        ctx.tokens, ctx.dtype = tokens, hidden_NH.dtype
        results = spread_results(results, index, tokens, call.options, lse=True)
        ctx.mark_non_differentiable(*results)
        return loss, *results

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        dx_NH, dw_UH, db_U, left, index = ctx.saved_tensors
        scale, U = dloss if left is None else dloss * left, dw_UH.shape[0]
        want_hidden, want_weight, want_bias = ctx.want
        return (
            finished(dx_NH, scale, index, ctx.tokens, ctx.dtype) if want_hidden else None,
            finished(dw_UH, scale, None, U, ctx.dtype) if want_weight else None,
            finished(db_U.unsqueeze(1), scale, None, len(db_U), ctx.dtype).squeeze(1) if want_bias else None,
            None,
        )


def _part(heads: HeadTensors, call: DividedChunksCall, rows: slice, grad_nU: Tensor) -> Results:
    """The results of some tokens; writes the gradient of their logits, times `call.scales[0]`."""
    x_NH, options, tokens = heads.hidden_NH[rows], call.options, call.tokens.at(rows)
    U = heads.weight_VH.shape[0]
    local = local_ids(tokens.ids_N1, tokens.ids_N1 == options.ignore_index, call.part)
    of_local = local_options(options, U)
    computed = local_forward(HeadTensors(x_NH, heads.weight_VH, heads.bias), local.local_NK, of_local, True, 0)
    results, parted = combined(computed, local, options, call.part)
    check_known(tokens.ids_N1, parted.unknown_NK, x_NH)
    if U and len(x_NH):
        dlogprob, dlse = (g if g is None else g * call.scales[0] for g in tokens.gradients(results.lse_N))
        upstream = local_upstream(parted, (dlogprob, dlse, None, None), (1, 0))
        gradient_into(Block(computed.kept_NV, 0, U), upstream, of_local, grad_nU)
    return results


def _add_gradients(sums: GradientSums, call: DividedChunksCall, rows: slice, grad_nU: Tensor) -> None:
    """Add the gradients of a chunk, whose logits have the gradient `grad_nU`, to `sums`."""
    if not grad_nU.numel():
        sums.gradients.dx_NH[rows] = 0.0
        return
    left_out_n = call.tokens.ids_N1[rows, 0] == call.options.ignore_index
    sums.begin(rows, None if call.index is not None else left_out_n)
    sums.add(grad_nU, slice(0, grad_nU.shape[1]))
    sums.end()


def divided_chunks(head: DividedHead, call: DividedChunksCall) -> tuple[Tensor, Results]:
    """(the loss, the results of `divided_logprobs` without gradients)"""
    hidden, weight, bias = settle_dtypes(head.hidden, head.weight, head.bias)
    check_labels(head, call.tokens.ids_N1, call.options.ignore_index)
    loss, *results = DividedChunks.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, call)
    return loss, Results._make(results)
