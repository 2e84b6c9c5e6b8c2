"""`linear_cross_entropy` for a head divided by vocabulary.

With the label's log-probability and lse of the whole head, a token's loss a · (-w_y · log p(y) + z_loss · lse²) needs
no other logit. Label smoothing needs the sum of all logits, so a divided head does not have it.

If the logits of all tokens can be kept, or the loss is per token, `divided_logprobs` computes it. Otherwise the
gradient is computed in the forward, in chunks of tokens, as for a whole head. A reduced loss knows the gradient of each
token's loss before the backward, so a chunk's logits become their gradient at once, and no product runs twice. Each
part of a chunk needs an exchange, between its statistics and its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops.dispatch import Context, first_order, no_autocast, outside_graphs
from tigon.ops.head.autograd import head_gradients
from tigon.ops.head.block_loop import BlockPlan, run_blocks
from tigon.ops.head.blocks import empty_sums, linear_logprobs_fwd
from tigon.ops.head.divided import DividedHead
from tigon.ops.head.inputs import Head, LossArguments, Wanted
from tigon.ops.head.logprobs import check_divided_labels, divided_logprobs, of_no_column
from tigon.ops.head.plan import LogitBytes, keeps_logits, plan_whole_rows
from tigon.ops.losses.inputs import CountedTokens, check_vector, gradient_scales
from tigon.ops.losses.logprob_inputs import LogprobOptions
from tigon.ops.losses.logprob_rows import Block, gradient_into
from tigon.ops.losses.prepared_targets import PreparedTargets
from tigon.ops.losses.results import LossOutput, Results, RowResults, accuracy
from tigon.ops.losses.vocabulary import DividedVocabulary
from tigon.ops.vocab_parallel import VocabParallelOptions, refuse_options, replicated

# N tokens, H hidden, U rows of the weight in this process; a block has n tokens.


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
    vocabulary: DividedVocabulary


class DividedChunks(torch.autograd.Function):
    """(loss, *the results of `divided_logprobs`); only the loss is differentiable."""

    @staticmethod
    def forward(
        ctx: Context, hidden_NH: Tensor, weight_UH: Tensor, bias: Tensor | None, call: DividedChunksCall
    ) -> tuple[Tensor, ...]:
        ctx.wanted = wanted = Wanted.of(ctx.needs_input_grad[:3], True)
        counted = CountedTokens(call.index, hidden_NH.shape[0])
        head = Head(hidden_NH, weight_UH, bias).at(counted)
        if call.index is not None:
            call = replace(call, tokens=call.tokens.at(call.index))
        sums, chunks = empty_sums(head, wanted, call.plan, fp32_hidden=True), _Chunks(head, call)
        with no_autocast(hidden_NH):
            run_blocks(call.plan, [sums], (head.tokens, head.vocab), chunks)
            results = chunks.results()
        loss = call.tokens.values(results.logprob_NK.squeeze(1), results.lse_N).sum() * call.inv_denominator
        dx_NH, dw_UH, db_U, *_ = sums.gradients
        if wanted.want_hidden:
            call.vocabulary.sum_hidden(dx_NH, None)
            dx_NH = dx_NH if head.dtype == torch.float16 else dx_NH.to(head.dtype)
        ctx.save_for_backward(dx_NH, dw_UH, db_U, call.scales[1], call.index)
        ctx.tokens, ctx.dtype = counted.tokens, head.dtype
        results = results.spread(counted, call.options, lse=True)
        ctx.mark_non_differentiable(*results)
        return loss, *results

    @staticmethod
    @first_order
    def backward(ctx: Context, dloss: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        *made, left, index = ctx.saved_tensors
        scale = dloss if left is None else dloss * left
        return *head_gradients(made, ctx.wanted, (scale, scale), CountedTokens(index, ctx.tokens), ctx.dtype), None


class _Chunks:
    """The results of each part of a chunk, and the gradient of its logits, times `scales[0]`."""

    def __init__(self, head: Head, call: DividedChunksCall) -> None:
        self.head, self.call, self.parts = head, call, list[Results]()

    def select_tokens(self, rows: slice) -> TokenLoss:
        return self.call.tokens.at(rows)

    def no_gradient_mask(self, rows: slice) -> Tensor | None:
        call = self.call
        return None if call.index is not None else call.tokens.ids_N1[rows, 0] == call.options.ignore_index

    def compute_block(self, part: TokenLoss, rows: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        call, head, kept_NV = self.call, self.head.part(rows), None

        def compute(ids_NK: Tensor, options: LogprobOptions) -> RowResults:
            nonlocal kept_NV
            if not head.vocab:
                return of_no_column(head, ids_NK, options)
            computed = linear_logprobs_fwd(head, ids_NK, options, True, 0)
            kept_NV = computed.kept_NV
            return computed.rows  # type: ignore[no-any-return]

        results, saved = call.vocabulary.results(compute, part.ids_N1, call.options, lse=True)
        self.parts.append(results)
        if kept_NV is None or not head.tokens or grads[0] is None:
            return
        dlogprob, dlse = (g if g is None else g * call.scales[0] for g in part.gradients(results.lse_N))
        upstream, options = call.vocabulary.upstream(saved, (dlogprob, dlse, None, None), call.options, (1, 0))
        gradient_into(Block(kept_NV, 0, head.vocab), upstream, options, grads[0])

    def results(self) -> Results:
        if not self.parts:  # without a token that counts, one empty part gives the results their form
            nothing = slice(0, 0)
            self.compute_block(self.select_tokens(nothing), nothing, nothing, [None])
        return Results._make(torch.cat(fields) for fields in zip(*self.parts, strict=True))


def _bytes_of_blocks(call: LossArguments, weight: Tensor) -> tuple[int, int]:
    """(bytes of a block's logits, most bytes of logits that are kept)"""
    if not call.limits.memory_bytes:
        least, most = call.limits.chunk_bytes
        return least, most
    left = max(call.limits.memory_bytes - weight.nbytes, weight.element_size())
    return left, left


def _plan(call: LossArguments, divided: DividedHead) -> BlockPlan | None:
    """The chunks if the gradient is computed in the forward, else None. Each process decides alike."""
    head = divided.head
    trained = any(t is not None and t.requires_grad for t in head)
    if not (trained and torch.is_grad_enabled()) or call.per_row or call.limits.memory_bytes:
        return None
    (block_bytes, most_kept), most_rows = call.limits.chunk_bytes, divided.most_rows()
    size = LogitBytes.of(head.dtype)
    if keeps_logits(head.tokens, most_rows, size, most_kept):
        return None
    return replace(plan_whole_rows(head.tokens, most_rows, size, block_bytes), columns=head.vocab)


@outside_graphs
def divided_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor | PreparedTargets, *, bias: Tensor | None = None,
    class_weight: Tensor | None = None, token_weight: Tensor | None = None, outputs: tuple[str, ...] = (),
    label_smoothing: float = 0.0, lora_a: Tensor | None = None, lora_b: Tensor | None = None, scaling: float = 1.0,
    adapter_hidden: Tensor | None = None, vocab_parallel: VocabParallelOptions | None = None, **options: Any,
) -> Tensor | LossOutput:  # fmt: skip
    """`linear_cross_entropy` of this process's rows. Labels and weights are the same in every process."""
    divided = DividedHead.of(hidden, weight, bias, vocab_parallel)
    refuse_options(label_smoothing=bool(label_smoothing), lora_a=lora_a is not None, lora_b=lora_b is not None)
    if isinstance(target, PreparedTargets):
        target = replace(target, target=replicated(target.target, "target"))
    target, class_weight = replicated(target, "target"), replicated(class_weight, "class_weight")
    _check_class_weight(class_weight, divided)
    call = LossArguments.of(
        divided.head,
        divided.hidden.shape[:-1],
        target,
        whole=False,
        class_weight=class_weight,
        outputs=outputs,
        token_weight=replicated(token_weight, "token_weight"),
        **options,
    )
    value, found = _divided_loss(divided, call)
    labels = target.target if isinstance(target, PreparedTargets) else target
    value = value.view(labels.shape) if call.per_row else value
    return _public(value, found, labels, outputs, call.options.ignore_index)


def _divided_loss(divided: DividedHead, call: LossArguments) -> tuple[Tensor, Results]:
    options, tokens = call.options, _token_loss(call, divided.hidden.dtype)
    of_logits = LogprobOptions(
        options.ignore_index, options.softcap, options.logit_scale, entropy=call.entropy, predicted=call.predicted
    )
    plan = _plan(call, divided)
    if plan is None:
        blocks = _bytes_of_blocks(call, divided.weight)
        found = divided_logprobs(divided, tokens.ids_N1, of_logits, blocks, call.index)
        loss_N = tokens.values(found.logprob_NK.squeeze(1), found.lse_N)
        return loss_N if call.per_row else loss_N.sum() * call.inv_denominator, found
    head = divided.head
    check_divided_labels(divided, tokens.ids_N1, options.ignore_index)
    of_chunks = DividedChunksCall(
        tokens=tokens,
        index=call.index,
        inv_denominator=call.inv_denominator,
        scales=gradient_scales(head.dtype, call.inv_denominator, call.token_weight, call.class_weight, options),
        options=of_logits,
        plan=plan,
        vocabulary=DividedVocabulary(divided.part),
    )
    value, *fields = DividedChunks.apply(*head[:3], of_chunks)
    return value, Results._make(fields)


def _public(
    value: Tensor, found: Results, target: Tensor, outputs: tuple[str, ...], ignore_index: int
) -> Tensor | LossOutput:
    if not outputs:
        return value
    shape, ids = target.shape, found.predicted_N
    return LossOutput(
        value,
        logprob=found.logprob_NK.detach().view(shape) if "logprob" in outputs else None,
        entropy=found.entropy_N.detach().view(shape) if "entropy" in outputs else None,
        accuracy=accuracy(ids.view(shape), target, ignore_index) if "accuracy" in outputs else None,
        predicted=ids.view(shape) if "predicted" in outputs else None,
    )


def _token_loss(call: LossArguments, dtype: torch.dtype) -> TokenLoss:
    """The weights of the tokens' losses; 0 where ignored, whatever the weights are."""
    ids_N, options = call.target.long(), call.options
    acc = torch.promote_types(dtype, torch.float32)
    counts_N = call.target != options.ignore_index
    weight_N = counts_N.to(acc)
    if call.token_weight is not None:
        weight_N = torch.where(counts_N, call.token_weight.to(acc), 0.0)
    z_weight_N = options.z_loss * weight_N if options.z_loss else None
    if call.class_weight is not None:
        weight_N = weight_N * call.class_weight.to(acc)[ids_N.clamp(0, call.class_weight.shape[0] - 1)]
    return TokenLoss(ids_N1=ids_N.unsqueeze(1), weight_N=weight_N, z_weight_N=z_weight_N)


def _check_class_weight(class_weight: Tensor | None, divided: DividedHead) -> None:
    """Raise unless the weights are those of the whole vocabulary: a process needs the weights of all labels."""
    if class_weight is None:
        return
    check_vector("class_weight", class_weight, class_weight.shape if divided.vocab is None else (divided.vocab,))
    if class_weight.ndim != 1 or class_weight.shape[0] < divided.part.stop:
        raise ShapeError(
            f"class_weight is {tuple(class_weight.shape)}; it must be (V,) of the whole vocabulary in each process."
        )
