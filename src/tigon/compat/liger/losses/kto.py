"""KTO from hidden states: sequences that are each desirable or undesirable."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon import losses
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.losses.heads import Head, check_batch, reference_of, sequence_logps, summed_logits
from tigon.compat.liger.rows import function, module
from tigon.errors import DtypeError, ShapeError

# B sequences, T tokens per sequence, H hidden, V vocabulary.


def kto(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    preference_labels: Tensor | None,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`tigon.losses.kto`.

    Returns (loss, results). The results have no gradient: the log-probabilities of the desirable sequences, summed,
    those of the others, the logits of both, summed over tokens and ids, and the rewards of both, summed.
    """
    check_batch(_input, target)
    desirable = _checked_labels(preference_labels, len(target))
    reference = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
    head = Head(_input, weight, bias)
    logps = sequence_logps(head, target, ignore_index, average_log_prob)
    ref_logps = torch.zeros_like(logps)
    if reference is not None:
        with torch.no_grad():
            ref_logps = sequence_logps(reference, target, ignore_index, average_log_prob).to(logps.dtype)
    # A KL for each sequence is part of its reference: r - z = log π - (log π_ref + z).
    shift = _shift(kl, logps)
    per_sequence = losses.kto(logps, ref_logps + shift, desirable, beta=beta, loss_type="apo_zero_unpaired")
    rewards = beta * (logps.detach() - ref_logps)
    results = (
        *_sums(logps.detach(), desirable),
        summed_logits(head, desirable),
        summed_logits(head, ~desirable),
        *_sums(rewards, desirable),
    )
    return per_sequence.loss.sum() / max(len(logps), 1), results


def _checked_labels(preference_labels: Tensor | None, sequences: int) -> Tensor:
    if preference_labels is None:
        raise FlagConflict("preference_labels is None; pass (B,) bool, True for a desirable sequence.")
    if preference_labels.dtype != torch.bool:
        raise DtypeError(f"preference_labels is {preference_labels.dtype}; pass bool, True for a desirable sequence.")
    if preference_labels.shape != (sequences,):
        raise ShapeError(f"preference_labels is {tuple(preference_labels.shape)}; it must be ({sequences},).")
    return preference_labels


def _shift(kl: Tensor | None, like: Tensor) -> Tensor:
    """z of each sequence, without a gradient."""
    if kl is None:
        return torch.zeros_like(like)
    if kl.numel() != 1 and kl.shape != like.shape:
        raise ShapeError(f"kl is {tuple(kl.shape)}; it must be one number, or {tuple(like.shape)}.")
    return kl.detach().to(like.dtype).reshape(-1).expand(like.shape)


def _sums(values: Tensor, desirable: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over the desirable sequences and over the others."""
    return values.masked_fill(~desirable, 0.0).sum(), values.masked_fill(desirable, 0.0).sum()


liger_fused_linear_kto = kto
LigerFusedLinearKTOFunction = function("LigerFusedLinearKTOFunction", kto)
LigerFusedLinearKTOLoss = module(
    "LigerFusedLinearKTOLoss",
    kto,
    holds="ignore_index beta compiled use_ref_model=False average_log_prob chunk_size",
    takes="_input lin_weight:weight target bias preference_labels=None ref_input ref_weight ref_bias kl",
)
