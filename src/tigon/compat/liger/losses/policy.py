"""Policy losses of Liger's GRPO from log-probabilities per token.

`tigon.losses.grpo` computes most loss types. Three are not in `tigon.losses` and are computed in this file:

    luspo    the sum over a sequence's tokens, averaged over sequences (arXiv 2602.05261)
    sapo     a smooth gate instead of a clipped ratio (arXiv 2511.20347)
    vespo    a weight per sequence from the product of its ratios (arXiv 2602.10693)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon import losses
from tigon.errors import OptionError
from tigon.losses.grpo import GRPOLossType, Level
from tigon.losses.numerics import exp_bounded

# B sequences, T tokens per sequence.

_GRPO: dict[str, GRPOLossType] = {
    "grpo": "grpo",
    "bnpo": "bnpo",
    "dr_grpo": "dr_grpo",
    "dapo": "dapo",
    "cispo": "cispo",
    "luspo": "dr_grpo",
}
_SMOOTH = ("sapo", "vespo")
_TOKEN_LEVEL_ONLY = ("cispo", *_SMOOTH)
"""Loss types without sequence-level importance sampling and without `delta`."""
_PER_STEP = ("dapo", "cispo", "vespo")
"""Loss types that divide by the tokens of the step."""

# Bounds of VESPO's log-ratios, as in TRL.
_LARGEST_LOG_RATIO, _SMALLEST_LOG_WEIGHT = 20.0, math.log(1e-8)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options of a policy loss, under Liger's names."""

    loss_type: str
    beta: float
    eps_low: float
    eps_high: float
    importance_sampling_level: str = "token"
    max_completion_length: int | None = None
    delta: float | None = None
    use_bias_correction_kl: bool = False
    num_items_in_batch: Tensor | float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


class Completions(NamedTuple):
    """A batch of completions: (B, T) tensors, and (B,) advantages."""

    logps: Tensor
    advantages: Tensor
    mask: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    is_ratio: Tensor | None
    """The correction for the sampler, per token or per sequence."""
    phi_seq: Tensor | None = None
    """VESPO's weight per sequence, if it is known already."""


class PolicyTerms(NamedTuple):
    """The scalar loss and its terms per token (B, T), 0 at masked tokens; kl is 0 without a reference."""

    loss: Tensor
    per_token: Tensor
    kl: Tensor
    is_clipped: Tensor

    def metrics(self, mask: Tensor, with_kl: bool) -> list[Tensor]:
        """The mean KL per token if `with_kl`, and the fraction of clipped tokens."""
        tokens = mask.sum().clamp(min=1)
        return [self.kl.sum() / tokens] * with_kl + [self.is_clipped.sum() / tokens]


def check_policy_options(options: PolicyOptions) -> None:
    """Raise `OptionError` for a value, or a combination, that has no defined loss."""
    loss_type, level = options.loss_type, options.importance_sampling_level
    if loss_type not in _GRPO and loss_type not in _SMOOTH:
        raise OptionError(f"loss_type={loss_type!r} is not known; choose one of {', '.join((*_GRPO, *_SMOOTH))}.")
    if level not in ("token", "sequence"):
        raise OptionError(f"importance_sampling_level={level!r} is not known; choose token or sequence.")
    if level == "sequence" and loss_type in _TOKEN_LEVEL_ONLY:
        raise OptionError(
            f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}; choose token."
        )
    if options.delta is not None and loss_type in _TOKEN_LEVEL_ONLY:
        raise OptionError(f"delta (two-sided clipping) is not supported for loss_type={loss_type!r}; leave it out.")
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        if loss_type == "sapo" and getattr(options, name) <= 0:
            raise OptionError(f"{name} must be positive; it is {getattr(options, name)}.")


def policy_terms(batch: Completions, options: PolicyOptions) -> PolicyTerms:
    """The loss of a batch, for any `loss_type` of Liger."""
    check_policy_options(options)
    mask = batch.mask != 0
    batch = batch._replace(mask=mask, logps=batch.logps.masked_fill(~mask, 0.0), advantages=batch.advantages.detach())
    if options.loss_type in _SMOOTH:
        return _smooth_terms(batch, options)
    beta = options.beta if batch.ref_logps is not None else 0.0
    level: Level = "sequence" if options.importance_sampling_level == "sequence" else "token"
    lengths = {"dr_grpo": options.max_completion_length or mask.shape[1], "luspo": 1}
    terms = losses.grpo(
        batch.logps,
        batch.advantages,
        mask,
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps if beta else None,
        importance_sampling_ratio=_per_row(batch.is_ratio),
        loss_type=_GRPO[options.loss_type],
        beta=beta,
        epsilon=options.eps_low,
        epsilon_high=options.eps_high,
        delta=options.delta,
        importance_sampling_level=level,
        use_bias_correction_kl=options.use_bias_correction_kl,
        max_completion_length=lengths.get(options.loss_type),
        num_items=tokens_of_step(mask, options.num_items_in_batch) if options.loss_type in _PER_STEP else None,
    )
    kl = torch.zeros_like(terms.ratio) if terms.kl is None else terms.kl
    clipped = (terms.clipped_low | terms.clipped_high).to(terms.ratio.dtype)
    return PolicyTerms(terms.loss, terms.per_token, kl.masked_fill(~mask, 0.0), clipped)


def _per_row(is_ratio: Tensor | None) -> Tensor | None:
    """(B,) as (B, 1), so that it is one value per sequence for every T."""
    return is_ratio.unsqueeze(-1) if is_ratio is not None and is_ratio.ndim == 1 else is_ratio


def _smooth_terms(batch: Completions, options: PolicyOptions) -> PolicyTerms:
    """SAPO's and VESPO's loss. Neither clips a ratio."""
    mask, logps = batch.mask, batch.logps
    old = logps.detach() if batch.old_logps is None else batch.old_logps.to(logps.dtype).masked_fill(~mask, 0.0)
    advantages_B1 = batch.advantages.to(logps.dtype).unsqueeze(-1)
    ratio, is_ratio = exp_bounded(logps - old), _per_row(batch.is_ratio)
    if options.loss_type == "sapo":
        per_token = -_gate(ratio, advantages_B1, options) * advantages_B1
        if is_ratio is not None:
            per_token = per_token * is_ratio.detach().to(logps.dtype)
    else:
        weight = batch.phi_seq
        if weight is None:
            weight = gamma_weights(
                batch.advantages,
                logps - old,
                mask,
                is_ratio,
                options.vespo_k_pos,
                options.vespo_lambda_pos,
                options.vespo_k_neg,
                options.vespo_lambda_neg,
            )
        per_token = -weight.detach().reshape(-1, 1) * advantages_B1 * logps
    kl = torch.zeros_like(logps)
    if options.beta and batch.ref_logps is not None:
        kl = losses.kl_estimate(logps, batch.ref_logps.detach().to(logps.dtype).masked_fill(~mask, 0.0))
        kl = kl * ratio if options.use_bias_correction_kl else kl
        per_token = per_token + options.beta * kl
    per_token = per_token.masked_fill(~mask, 0.0)
    if options.loss_type == "sapo":
        loss = losses.sequence_mean(per_token, mask).sum() / max(len(mask), 1)
    else:
        loss = per_token.sum() / tokens_of_step(mask, options.num_items_in_batch)
    return PolicyTerms(loss, per_token, kl.detach().masked_fill(~mask, 0.0), torch.zeros_like(logps))


def _gate(ratio: Tensor, advantages_B1: Tensor, options: PolicyOptions) -> Tensor:
    """4 / τ · σ(τ (ρ - 1)), with one τ for positive advantages and one for the others."""
    temperature = _by_sign(advantages_B1 > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, ratio)
    return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))


@torch.no_grad()
def gamma_weights(
    advantages: Tensor,
    log_ratio_per_token: Tensor,
    mask: Tensor,
    importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """VESPO's weights φ(w) = w^k e^(λ (1 - w)), (B, 1), with w the product of a sequence's ratios.

    Args:
        advantages: (B,); their sign chooses between the two pairs of k and λ.
        log_ratio_per_token: (B, T) log π - log π_old.
        mask: (B, T); masked tokens do not count.
        importance_sampling_ratio: (B, 1) or (B, T), a correction for the sampler that multiplies w.
        k_pos, lambda_pos, k_neg, lambda_neg: k and λ for advantages of at least 0, and below 0.
    """
    counts = mask != 0
    bound = _LARGEST_LOG_RATIO
    log_w = log_ratio_per_token.clamp(-bound, bound).masked_fill(~counts, 0.0).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_correction = importance_sampling_ratio.log().clamp(_SMALLEST_LOG_WEIGHT, bound)
        if log_correction.shape == counts.shape and counts.shape[1] > 1:
            log_correction = log_correction.masked_fill(~counts, 0.0)
        log_w = log_w + log_correction.sum(-1, keepdim=True)
    log_w = log_w.clamp(_SMALLEST_LOG_WEIGHT, bound)
    positive = advantages.unsqueeze(-1) >= 0
    k = _by_sign(positive, k_pos, k_neg, log_w)
    lam = _by_sign(positive, lambda_pos, lambda_neg, log_w).clamp(min=1e-4)
    return torch.exp(k * log_w + lam * (1.0 - log_w.exp()))


def _by_sign(is_positive: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    """One of two numbers per sequence, in the dtype of `like`. `torch.where` alone would round them to fp32."""
    return torch.where(is_positive, like.new_tensor(positive), like.new_tensor(negative))


def tokens_of_step(mask: Tensor, num_items_in_batch: Tensor | float | None) -> Tensor:
    """The denominator of dapo, cispo and vespo: the tokens of the step per process, at least 1.

    Averaged over the processes, a loss with this denominator is the mean over the tokens of all of them.

    Args:
        mask: (B, T) of this process's batch.
        num_items_in_batch: the tokens of all micro-batches and processes; None: those of this batch, on all processes.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items_in_batch is None:
        tokens = mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(tokens)
    else:
        tokens = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=mask.device).reshape(())
    return (tokens / (torch.distributed.get_world_size() if distributed else 1)).clamp(min=1)
