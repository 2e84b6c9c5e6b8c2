"""Group relative policy optimization (GRPO) and its family, on log-probabilities per token.

The loss of a token is -min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A) + β KL. A is its advantage. The ratio ρ is π / π_old of
the token, and for GSPO exp(mean log-ratio) of its sequence. The types differ in the ratio and in the denominator.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.errors import OptionError
from tigon.losses._checks import as_float, check_choice, check_number, same_shape
from tigon.losses.common import LossFormula, LossModule
from tigon.losses.kl import kl_estimate
from tigon.losses.numerics import exp_bounded
from tigon.losses.sequences import Tokens

GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo"]
Level = Literal["token", "sequence"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

_TOKEN = "l = -min(ρA, clip(ρ, 1-ε, 1+ε_high) A) + β KL"
FORMULAS: dict[str, LossFormula] = {
    "grpo": LossFormula(f"mean over sequences of the mean of l; {_TOKEN}", ("2402.03300",)),
    "bnpo": LossFormula("mean of l over the tokens of the batch", ("2503.14476",)),
    "dr_grpo": LossFormula("sum of l / (sequences · max_completion_length)", ("2503.20783",)),
    "dapo": LossFormula("sum of l / num_items, the tokens of the step", ("2503.14476",)),
    "gspo": LossFormula("as grpo, with ρ = exp(mean of log π - log π_old over the sequence)", ("2507.18071",)),
    "cispo": LossFormula(
        "sum of (-min(ρ, ε_high) A log π + β KL) / num_items, no gradient through ρ", ("2506.13585", "2510.13786")
    ),
}


class PolicyLoss(NamedTuple):
    """The loss of a policy, and per token what trainers log. Use the mask for means over tokens.

    Attributes:
        loss: scalar, to differentiate.
        ratio: ρ of each token; with sequence level the value of its sequence.
        kl: KL of each token, or None without a reference.
        clipped_low: True where the ratio is below 1 - ε and the advantage negative.
        clipped_high: True where the ratio is above its upper bound and the advantage positive. The policy term of a
            clipped token has no gradient, except in "cispo".
        per_token: l of each token, differentiable, for a mean of your own; 0 for masked tokens.
    """

    loss: Tensor
    ratio: Tensor
    kl: Tensor | None
    clipped_low: Tensor
    clipped_high: Tensor
    per_token: Tensor


def check_grpo_options(
    *,
    loss_type: str,
    beta: float,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
    importance_sampling_level: str | None,
    use_bias_correction_kl: bool,
    max_completion_length: int | None,
) -> None:
    """Raise `OptionError` for an option of `grpo`, or a combination of them, that is not valid."""
    check_choice("loss_type", loss_type, FORMULAS)
    check_number("beta", beta, at_least=0)
    check_number("epsilon", epsilon, at_least=0)
    if importance_sampling_level is not None:
        check_choice("importance_sampling_level", importance_sampling_level, get_args(Level))
        if loss_type == "gspo" and importance_sampling_level != "sequence":
            raise OptionError(
                "importance_sampling_level='token' contradicts loss_type='gspo'; "
                "leave it out, or choose loss_type='grpo'."
            )
    if not isinstance(use_bias_correction_kl, bool):
        raise OptionError(f"use_bias_correction_kl={use_bias_correction_kl!r} must be True or False.")
    if epsilon_high is not None:
        check_number("epsilon_high", epsilon_high, at_least=0)
    elif loss_type == "cispo":
        raise OptionError("loss_type='cispo' requires epsilon_high, the upper bound of the ratio itself, such as 5.0.")
    if delta is not None:
        if loss_type == "cispo":
            raise OptionError(f"delta={delta} does not apply to loss_type='cispo'; leave it out.")
        check_number("delta", delta, above=1.0 + (epsilon if epsilon_high is None else epsilon_high))
    if max_completion_length is not None:
        check_number("max_completion_length", max_completion_length, at_least=1)
        if loss_type != "dr_grpo":
            raise OptionError(f"max_completion_length does not apply to loss_type={loss_type!r}; leave it out.")
    elif loss_type == "dr_grpo":
        raise OptionError("loss_type='dr_grpo' requires max_completion_length.")


def grpo(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    loss_type: GRPOLossType = "dapo",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: Level | None = None,
    use_bias_correction_kl: bool = False,
    max_completion_length: int | None = None,
    num_items: Tensor | float | None = None,
) -> PolicyLoss:
    """Policy gradient with a clipped ratio: GRPO, DAPO, Dr. GRPO, BNPO, GSPO and CISPO.

    l = -min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A) · w + β KL per token, with ρ = exp(log π - log π_old) (Shao et al. 2024,
    arXiv 2402.03300). The weight w corrects for the sampler. docs/losses.md has the types and their papers.
    Log-ratios of ±500 and beyond give finite losses and gradients: from 30 on the exponential goes on as its tangent.

    Args:
        logps: (B, T) log-probability of each completion token.
        advantages: (B,), one per sequence, or (B, T), one per token.
        mask: of logps' shape, bool or numbers: False or 0 leaves a token out, whatever its values are.
        old_logps: of logps' shape, at the time of the sampling. None: logps without gradient, so that ρ is 1.
        ref_logps: of logps' shape, under the reference model, for the k3 estimate of the KL.
        importance_sampling_ratio: w, per token or sequence, as `importance_sampling_ratio` gives. No gradient flows
            into it. It weights the policy term and not the KL.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "gspo" or "cispo".
        beta: β, the weight of the KL, at least 0.
        epsilon: ε; the ratio is clipped at 1 - ε.
        epsilon_high: ε_high; the ratio is clipped at 1 + ε_high. None: ε. For "cispo" the bound of the ratio itself.
        delta: the largest ratio for negative advantages, above 1 + ε_high (two-sided clipping, arXiv 2505.07291).
        importance_sampling_level: "token", or "sequence" for one ratio per sequence. None: "sequence" for "gspo", else
            "token".
        use_bias_correction_kl: multiply the KL by the ratio, which makes its gradient unbiased (arXiv 2512.02556).
        max_completion_length: for "dr_grpo", which divides by it.
        num_items: for "dapo" and "cispo", the denominator: the tokens of all micro-batches of the step. None: this
            batch's tokens. Values below 1 count as 1.

    Returns:
        `PolicyLoss`: loss (scalar), per_token, and without gradient per token ratio, kl, clipped_low and clipped_high.
        A batch without tokens gives 0.

    Raises:
        OptionError: an option is unknown or out of range, does not apply to the loss type, or lacks its tensor.
        ShapeError: the shapes do not match.
        DtypeError: a tensor is not floating-point.
    """
    check_grpo_options(
        loss_type=loss_type,
        beta=beta,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        importance_sampling_level=importance_sampling_level,
        use_bias_correction_kl=use_bias_correction_kl,
        max_completion_length=max_completion_length,
    )
    logps = as_float("logps", logps)
    same_shape(logps.shape, old_logps=old_logps, ref_logps=ref_logps)
    if beta and ref_logps is None:
        raise OptionError(f"beta={beta} requires ref_logps.")
    if num_items is not None and loss_type not in ("dapo", "cispo"):
        raise OptionError(f"num_items does not apply to loss_type={loss_type!r}; it applies to dapo, cispo.")
    tokens = Tokens.of(logps, mask)
    logps = tokens.masked(logps)
    old = logps.detach() if old_logps is None else tokens.masked(as_float("old_logps", old_logps))
    advantage = tokens.masked(tokens.per_token("advantages", as_float("advantages", advantages)))

    log_ratio = logps - old
    is_sequence_level = loss_type == "gspo" or importance_sampling_level == "sequence"
    ratio = exp_bounded(tokens.spread(tokens.means(log_ratio)) if is_sequence_level else log_ratio)
    upper = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        per_token = -ratio.detach().clamp(max=upper) * advantage * logps
        clipped_low = torch.zeros_like(tokens.mask)
        clipped_high = (ratio > upper) & (advantage > 0)
    else:
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        per_token = -torch.minimum(bounded * advantage, ratio.clamp(1.0 - epsilon, 1.0 + upper) * advantage)
        clipped_low = (ratio < 1.0 - epsilon) & (advantage < 0)
        clipped_high = (ratio > 1.0 + upper) & (advantage > 0)
    if importance_sampling_ratio is not None:
        weight = tokens.per_token(
            "importance_sampling_ratio", as_float("importance_sampling_ratio", importance_sampling_ratio)
        )
        per_token = per_token * tokens.masked(weight.detach())

    per_token_kl = None
    if ref_logps is not None:
        per_token_kl = kl_estimate(logps, tokens.masked(as_float("ref_logps", ref_logps)))
        if use_bias_correction_kl:
            per_token_kl = per_token_kl * ratio
        if beta:
            per_token = per_token + beta * per_token_kl

    loss = _reduced(per_token, tokens, loss_type, max_completion_length, num_items)
    return PolicyLoss(
        loss,
        ratio.detach(),
        None if per_token_kl is None else per_token_kl.detach(),
        clipped_low & tokens.mask,
        clipped_high & tokens.mask,
        tokens.masked(per_token),
    )


def _reduced(
    per_token: Tensor,
    tokens: Tokens,
    loss_type: str,
    max_completion_length: int | None,
    num_items: Tensor | float | None,
) -> Tensor:
    """The scalar loss, with the denominator of the loss type."""
    if loss_type in ("grpo", "gspo"):
        return tokens.means(per_token).sum() / max(tokens.sequences(), 1)
    if loss_type == "bnpo":
        return tokens.mean(per_token)
    total = tokens.masked(per_token).sum()
    if loss_type == "dr_grpo":
        return total / max(tokens.sequences() * (max_completion_length or 1), 1)
    return total / tokens.items_of_step(num_items, total.dtype)


def importance_sampling_ratio(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor | None = None,
    *,
    mode: CorrectionMode = "sequence_mask",
    clip_max: float = 3.0,
) -> Tensor:
    """Weights that correct for a sampler whose log-probabilities differ from the trainer's.

    w = π_old / π_sampling of a token, or the product over the sequence. "truncate" clips w at clip_max; "mask" sets a
    larger w to 0. Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"; masked: the same with whole sequences (TRL's names and defaults).

    Args:
        old_logps: (B, T) log-probabilities by the trainer's model at the time of the sampling.
        sampling_logps: the same by the sampler, such as vLLM. A NaN counts as equal to old_logps.
        mask: of the same shape: False or 0 leaves a token out.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_max: the largest w, above 0.

    Returns:
        w per token, of the same shape, without gradient; 1 for masked tokens, except in a masked sequence.

    Raises:
        OptionError: the mode is unknown, or clip_max is out of range.
        ShapeError: the shapes do not match.
        DtypeError: a tensor is not floating-point.
    """
    check_choice("mode", mode, get_args(CorrectionMode))
    check_number("clip_max", clip_max, above=0)
    old = as_float("old_logps", old_logps).detach()
    same_shape(old.shape, sampling_logps=sampling_logps)
    tokens = Tokens.of(old, mask)
    log_ratio = tokens.masked((old - as_float("sampling_logps", sampling_logps).detach()).nan_to_num(nan=0.0))
    if mode.startswith("sequence"):
        log_ratio = tokens.spread(log_ratio.sum(-1))
    ratio = exp_bounded(log_ratio)
    if mode.endswith("truncate"):
        return ratio.clamp(max=clip_max)
    return ratio.masked_fill(ratio > clip_max, 0.0)


class GRPOLoss(
    LossModule,
    of=grpo,
    holds="beta loss_type epsilon epsilon_high delta importance_sampling_level use_bias_correction_kl "
    "max_completion_length",
    check=check_grpo_options,
):
    """`grpo` as a module that holds its options."""
