"""The losses of a model and its heads: fused, or with PyTorch's ops for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon import ops
from tigon.models.seams.head.logits import LogitMap
from tigon.ops.head.multi_head import MultiHeadOutput
from tigon.ops.losses.prepared_targets import PreparedTargets

# B batch, T positions, H hidden, V vocabulary, K heads.

IGNORE_INDEX = -100
RANKS = 5


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """What the losses of K heads are computed from."""

    hiddens: Sequence[Tensor]  # K x (B, T, H)
    weights: Sequence[Tensor]  # K x (V, H)
    blocks: Sequence[Sequence[tuple[Tensor, Tensor]]]
    """The weights (H, H) and biases (H,) of each head's residual blocks."""
    shifts: Sequence[int]
    """How many tokens ahead each head predicts."""
    factors: Sequence[float]
    """The weight of each loss in the sum."""
    positions: Tensor | None  # (B, T)
    num_items: Tensor | float | None
    logit_map: LogitMap
    ranked: bool
    """Whether accuracies are computed too."""


def fused(given: HeadInputs, labels_BT: Tensor | PreparedTargets) -> MultiHeadOutput:
    """Σ_k factors_k · loss_k from `tigon.ops.multi_head_linear_cross_entropy`, and the values for the log."""
    return ops.multi_head_linear_cross_entropy(  # type: ignore[return-value]  # a tuple, as outputs are named
        given.hiddens,
        given.weights,
        labels_BT,
        shifts=given.shifts,
        blocks=given.blocks,
        positions=given.positions,
        head_weights=given.factors,
        num_items=given.num_items,
        logit_scale=given.logit_map.scale,
        softcap=given.logit_map.softcap,
        outputs=("losses", "counts", *(("accuracy",) if given.ranked else ())),
    )


def plain(given: HeadInputs, labels_BT: Tensor) -> MultiHeadOutput:
    """The result of `fused`, computed with PyTorch's ops head by head, with all logits of a head."""
    losses, counts, accuracy = [], [], []
    positions, num_items, ranked = given.positions, given.num_items, given.ranked
    for hidden, weight, of_head, shift in zip(given.hiddens, given.weights, given.blocks, given.shifts, strict=True):
        x = hidden
        for block, bias in of_head:
            x = x + F.silu(F.linear(x, block, bias))
        logits = logit_map_of(F.linear(x[:, :-shift], weight), given.logit_map).float()
        labels = labels_BT[:, shift:]
        if positions is not None:
            labels = torch.where(positions[:, shift:] == positions[:, :-shift] + shift, labels, IGNORE_INDEX)
        valid = labels != IGNORE_INDEX
        counts.append(valid.sum())
        items = counts[-1].clamp(min=1) if num_items is None else num_items
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items)
        if ranked:
            with torch.no_grad():
                best = logits.topk(RANKS, dim=-1).indices == labels.unsqueeze(-1)
                accuracy.append((best.cumsum(-1) * valid.unsqueeze(-1)).sum((0, 1)) / counts[-1].clamp(min=1))
    stacked = torch.stack(losses)
    total = (stacked * stacked.new_tensor(given.factors)).sum()
    return MultiHeadOutput(
        total, stacked.detach(), torch.stack(counts), torch.stack(accuracy).float() if ranked else None
    )


def logit_map_of(logits: Tensor, logit_map: LogitMap) -> Tensor:
    """The logits after the model's scaling and capping."""
    logits = logits * logit_map.scale
    return logits if logit_map.softcap is None else torch.tanh(logits / logit_map.softcap) * logit_map.softcap
