"""Mirrors `liger_kernel.ops.grpo_loss`: GRPO from logits of completions, and log-probabilities of their ids.

The logits are (B, T + 1, V). The last position predicts no token of the completion and gets a gradient of 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.ops.policy import (
    Completions,
    PolicyOptions,
    check_policy_options,
    number_of,
    policy_terms,
)
from tigon.errors import ShapeError

# B sequences, T tokens per completion, V vocabulary.

_IGNORED = -100


def _logps(logits: Tensor, completion_ids: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    """(B, T) log-probabilities, 0 where the mask is. The logits are read in place."""
    B, T = logits.shape[0], logits.shape[1] - 1
    if completion_ids.shape != (B, T):
        raise ShapeError(
            f"logits are {tuple(logits.shape)}, the ids {tuple(completion_ids.shape)}; pass (B, T + 1, V), (B, T)."
        )
    # Without the last position the logits would not be contiguous, and would be copied.
    ids = torch.nn.functional.pad(completion_ids, (0, 1), value=_IGNORED)
    if mask is not None:
        ids = ids.masked_fill(torch.nn.functional.pad(mask == 0, (0, 1)), _IGNORED)
    logps = ops.logprobs(logits, ids, temperature=temperature, ignore_index=_IGNORED)
    assert isinstance(logps, Tensor)  # no further outputs are requested
    return logps[:, :T]


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """(B, T) log-probabilities of the last T of the ids, without a gradient; 0 where the mask is 0."""
    T = logits.shape[1] - 1
    return _logps(logits, input_ids[:, -T:], temperature, None if mask is None else mask[:, -T:])


class GrpoLossFunction:
    """A policy loss of the completions.

    Returns (loss, mean KL, share of clipped tokens), or per token (B, T) with `reduce=False`. The KL is None if beta is
    0. The logits are not written to; `inplace` is ignored.
    """

    @staticmethod
    def apply(
        logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
        completion_mask: Tensor | None, temperature: float, beta: float, eps_low: float, eps_high: float,
        inplace: bool, loss_type: str = "grpo", max_completion_length: int | None = None, reduce: bool = True,
        importance_sampling_level: str = "token", sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
        use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None,
        phi_seq: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        options = PolicyOptions(
            loss_type=loss_type, beta=beta, eps_low=eps_low, eps_high=eps_high, delta=delta,
            importance_sampling_level=importance_sampling_level, max_completion_length=max_completion_length,
            use_bias_correction_kl=use_bias_correction_kl, num_items_in_batch=num_items_in_batch,
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg,
        )  # fmt: skip
        tensors = LogitsBatch(
            logits, completion_ids, advantages, completion_mask, old_logp, ref_logp, vllm_is_ratio, phi_seq
        )
        return grpo_of_logits(tensors, temperature, options, reduce)


class LogitsBatch(NamedTuple):
    """The tensors of one call: logits (B, T + 1, V), and what belongs to the completions (B, T) or (B,)."""

    logits: Tensor
    completion_ids: Tensor
    advantages: Tensor
    mask: Tensor | None
    old_logps: Tensor | None
    ref_logps: Tensor | None
    is_ratio: Tensor | None
    phi_seq: Tensor | None = None


def grpo_of_logits(
    batch: LogitsBatch, temperature: float, options: PolicyOptions, reduce: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(loss, KL or None, clipped): the loss and two means over tokens, or all three per token (B, T)."""
    check_policy_options(options)
    if options.beta and batch.ref_logps is None:
        raise FlagConflict(f"beta={options.beta} requires ref_logp; pass it, or beta=0.")
    mask = torch.ones_like(batch.completion_ids, dtype=torch.bool) if batch.mask is None else batch.mask != 0
    logps = _logps(batch.logits, batch.completion_ids, number_of(temperature), mask)
    terms = policy_terms(
        Completions(
            logps, batch.advantages, mask, batch.old_logps, batch.ref_logps, batch.is_ratio, batch.phi_seq
        ),
        options,
    )  # fmt: skip
    if not reduce:
        return terms.per_token, terms.kl if options.beta else None, terms.is_clipped
    kl, clipped = terms.metrics(mask, with_kl=True)
    return terms.loss, kl if options.beta else None, clipped
