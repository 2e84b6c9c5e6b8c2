"""Hidden states with a head: log-probabilities of labels, and whether the reference model takes part in a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon import losses, ops
from tigon.compat.liger.errors import FlagConflict, warn
from tigon.errors import ShapeError

# B sequences, T tokens per sequence, H hidden, V vocabulary.


class Head(NamedTuple):
    """Hidden states (..., H) with the `lm_head` that maps them to logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def check_batch(hidden: Tensor, target: Tensor) -> None:
    """Raise `ShapeError` unless hidden is (B, T, H) and the labels are (B, T)."""
    if hidden.ndim != 3 or target.shape != hidden.shape[:2]:
        raise ShapeError(
            f"_input is {tuple(hidden.shape)} and target {tuple(target.shape)}; pass (B, T, H) and (B, T)."
        )


def sequence_logps(head: Head, target: Tensor, ignore_index: int, average: bool) -> Tensor:
    """(B,) log-probability of each sequence's labels: their sum, or their mean. 0 for a sequence without labels."""
    counts = target != ignore_index
    logps = ops.linear_logprobs(
        head.hidden, head.weight, target, bias=head.bias, ignore_index=ignore_index, mask=counts
    )
    assert isinstance(logps, Tensor)  # no further outputs are requested
    return (losses.sequence_mean if average else losses.sequence_sum)(logps, counts)


def reference_of(
    use_ref_model: bool, ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None
) -> Head | None:
    """The reference model's hidden states and head, or None without one.

    Liger ignores a reference that is passed with `use_ref_model=False`, which is the default of its KTO loss. Here it
    counts, with a warning.

    Raises:
        FlagConflict: `use_ref_model` without the reference's tensors, or hidden states without a head.
    """
    if ref_input is None:
        if use_ref_model:
            raise FlagConflict("use_ref_model=True requires ref_input and ref_weight; pass them, or False.")
        return None
    if ref_weight is None:
        raise FlagConflict("ref_input requires ref_weight, the weight of the reference model's head.")
    if not use_ref_model:
        warn("use_ref_model=False, but ref_input is passed: the loss uses the reference. Pass True, or no ref_input.")
    return Head(ref_input, ref_weight, ref_bias)


@torch.no_grad()
def summed_logits(head: Head, sequences: Tensor) -> Tensor:
    """Sum of the logits of all tokens and ids of the sequences (B,) bool, without the logits.

    The sum over the vocabulary goes into the weight: Σ_tv (h_t · W_v + b_v) = (Σ_t h_t) · (Σ_v W_v) + tokens · Σ_v b_v.
    """
    dtype = torch.promote_types(head.hidden.dtype, torch.float32)
    hidden_H = head.hidden.sum(1, dtype=dtype).masked_fill(~sequences.unsqueeze(1), 0.0).sum(0)
    total = hidden_H.dot(head.weight.sum(0, dtype=dtype))
    if head.bias is not None:
        total = total + sequences.sum() * head.hidden.shape[1] * head.bias.sum(dtype=dtype)
    return total
