"""`linear_cross_entropy` for a head divided by vocabulary.

With the label's log-probability and lse of the whole head, a token's loss a · (-w_y · log p(y) + z_loss · lse²) needs
no other logit. Label smoothing needs the sum of all logits, so a divided head does not have it.

If the logits of all tokens can be kept, or the loss is per token, `divided_logprobs` computes it. Otherwise
`divided_chunks` computes the gradient in the forward, as a whole head does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops.lm_head import product_dtype
from tigon.ops.logprobs.blocks import BlockPlan, keeps_logits, logit_bytes, plan_whole_rows
from tigon.ops.logprobs.divided_logprobs import divided_logprobs, tokens_that_count
from tigon.ops.logprobs.rows import LogprobOptions
from tigon.ops.losses import common
from tigon.ops.losses.chunk_plan import default_chunk_bytes
from tigon.ops.losses.common import LossOutput
from tigon.ops.losses.divided_chunks import DividedChunksCall, TokenLoss, divided_chunks
from tigon.ops.losses.options import LossOptions, check_vector
from tigon.ops.vocab_parallel import DividedHead, outside_graphs, replicated

# N tokens, U rows of the weight in this process.


@dataclass(frozen=True, kw_only=True)
class DividedLoss:
    """The labels and weights of one call, each the same in every process, and what the call wants."""

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    num_items: Tensor | float | None
    reduction: str
    outputs: Collection[str]
    chunk_bytes: int | None
    memory_bytes: int | None

    def bytes_of_blocks(self, head: DividedHead) -> tuple[int, int]:
        """(bytes of a block's logits, most bytes of logits that are kept)"""
        most = self.chunk_bytes
        if self.memory_bytes is not None:
            most = max(self.memory_bytes - head.weight.nbytes, head.weight.element_size())
        return default_chunk_bytes(head.hidden) if most is None else (most, most)

    def plan(self, head: DividedHead, tokens: int) -> BlockPlan | None:
        """The chunks if the gradient is computed in the forward, else None. Each process decides alike."""
        trained = any(t is not None and t.requires_grad for t in head.tensors)
        if not (trained and torch.is_grad_enabled()) or self.reduction == "none" or self.memory_bytes is not None:
            return None
        block_bytes, most_kept = self.bytes_of_blocks(head)
        size = logit_bytes(product_dtype(head.hidden, head.weight))
        if keeps_logits(tokens, head.most_rows(), size, most_kept):
            return None
        return plan_whole_rows(tokens, head.most_rows(), size, block_bytes)


@outside_graphs
def divided_cross_entropy(head: DividedHead, options: LossOptions, loss: DividedLoss) -> Tensor | LossOutput:
    """The public function's result for a divided head and checked options."""
    target, token_weight = replicated(loss.target, "target"), replicated(loss.token_weight, "token_weight")
    class_weight = replicated(loss.class_weight, "class_weight")
    hidden = head.hidden
    common.check_target(target, hidden.shape[:-1], "hidden")
    common.check_devices(
        hidden=hidden, weight=head.weight, bias=head.bias, target=target, class_weight=class_weight,
        token_weight=token_weight,
    )  # fmt: skip
    check_vector("token_weight", token_weight, target.shape)
    _check_class_weight(class_weight, head)
    target_N, ignored = target.reshape(-1).contiguous(), options.ignore_index
    inverse = common.inverse_denominator(
        hidden, target_N, class_weight, num_items=loss.num_items, ignore_index=ignored, reduction=loss.reduction
    )
    of_logits = LogprobOptions(
        ignored, options.softcap, options.logit_scale, entropy=common.wants_entropy(loss.outputs),
        predicted=common.wants_predicted(loss.outputs),
    )  # fmt: skip
    tokens = _token_loss(target_N, class_weight, token_weight, options, hidden.dtype)
    plan = loss.plan(head, len(target_N))
    if plan is not None:
        scales = common.gradient_scales(
            product_dtype(hidden, head.weight), inverse, token_weight, class_weight, options
        )  # fmt: skip
        call = DividedChunksCall(
            tokens=tokens, index=tokens_that_count(tokens.ids_N1, ignored), inv_denominator=inverse, scales=scales,
            options=of_logits, plan=plan, part=head.part,
        )  # fmt: skip
        value, found = divided_chunks(head, call)
    else:
        found = divided_logprobs(head, tokens.ids_N1, of_logits, loss.bytes_of_blocks(head))
        loss_N = tokens.values(found.logprob_NK.squeeze(1), found.lse_N)
        value = loss_N.view(target.shape) if loss.reduction == "none" else loss_N.sum() * inverse
    logprob_N = found.logprob_NK.squeeze(1)
    if not loss.outputs:
        return value
    shape, wanted, ids = target.shape, loss.outputs, found.predicted_N
    return LossOutput(
        value,
        logprob=logprob_N.detach().view(shape) if "logprob" in wanted else None,
        entropy=found.entropy_N.detach().view(shape) if "entropy" in wanted else None,
        accuracy=common.accuracy(ids.view(shape), target, ignored) if "accuracy" in wanted else None,
        predicted=ids.view(shape) if "predicted" in wanted else None,
    )


def _token_loss(
    target_N: Tensor, class_weight: Tensor | None, token_weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> TokenLoss:
    """The weights of the tokens' losses; 0 where ignored, whatever the weights are."""
    ids_N = target_N.long()
    acc = torch.promote_types(dtype, torch.float32)
    counts_N = target_N != options.ignore_index
    weight_N = counts_N.to(acc)
    if token_weight is not None:
        weight_N = torch.where(counts_N, token_weight.reshape(-1).to(acc), 0.0)
    z_weight_N = options.z_loss * weight_N if options.z_loss else None
    if class_weight is not None:
        weight_N = weight_N * class_weight.to(acc)[ids_N.clamp(0, class_weight.shape[0] - 1)]
    return TokenLoss(ids_N1=ids_N.unsqueeze(1), weight_N=weight_N, z_weight_N=z_weight_N)


def _check_class_weight(class_weight: Tensor | None, head: DividedHead) -> None:
    """Raise unless the weights are those of the whole vocabulary: a process needs the weights of all labels."""
    if class_weight is None:
        return
    check_vector("class_weight", class_weight, class_weight.shape if head.vocab is None else (head.vocab,))
    if class_weight.ndim != 1 or class_weight.shape[0] < head.part.stop:
        raise ShapeError(
            f"class_weight is {tuple(class_weight.shape)}; it must be (V,) of the whole vocabulary in each process."
        )
