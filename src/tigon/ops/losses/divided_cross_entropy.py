"""`linear_cross_entropy` for a head divided by vocabulary: the loss of each token from `divided_logprobs`.

With the label's log-probability and lse of the whole head, a token's loss a · (-w_y · log p(y) + z_loss · lse²) needs
no other logit. Label smoothing needs the sum of all logits, so a divided head does not have it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops.logprobs.divided_logprobs import divided_logprobs
from tigon.ops.logprobs.rows import LogprobOptions
from tigon.ops.losses import common
from tigon.ops.losses.chunk_plan import default_chunk_bytes
from tigon.ops.losses.common import LossOutput
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
    predicted = common.wants_predicted(loss.outputs)
    found = divided_logprobs(
        head,
        target_N.unsqueeze(1),
        LogprobOptions(
            ignored, options.softcap, options.logit_scale, entropy=common.wants_entropy(loss.outputs),
            predicted=predicted,
        ),
        loss.bytes_of_blocks(head),
    )  # fmt: skip
    logprob_N = found.logprob_NK.squeeze(1)
    loss_N = -logprob_N
    if class_weight is not None:
        loss_N = loss_N * class_weight.to(loss_N.dtype)[target_N.long().clamp(0, class_weight.shape[0] - 1)]
    if options.z_loss:
        loss_N = loss_N + options.z_loss * found.lse_N.square()
    if token_weight is not None:
        loss_N = loss_N * token_weight.reshape(-1).to(loss_N.dtype)
    loss_N = torch.where(target_N == ignored, 0.0, loss_N)
    value = loss_N.view(target.shape) if loss.reduction == "none" else loss_N.sum() * inverse
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


def _check_class_weight(class_weight: Tensor | None, head: DividedHead) -> None:
    """Raise unless the weights are those of the whole vocabulary: a process needs the weights of all labels."""
    if class_weight is None:
        return
    check_vector("class_weight", class_weight, class_weight.shape if head.vocab is None else (head.vocab,))
    if class_weight.ndim != 1 or class_weight.shape[0] < head.part.stop:
        raise ShapeError(
            f"class_weight is {tuple(class_weight.shape)}; it must be (V,) of the whole vocabulary in each process."
        )
