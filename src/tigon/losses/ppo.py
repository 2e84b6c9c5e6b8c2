"""Proximal policy optimization (PPO): the clipped losses of the policy and of the value function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.losses._checks import as_float, check_number, same_shape
from tigon.losses.common import LossFormula, LossModule
from tigon.losses.grpo import PolicyLoss, grpo
from tigon.losses.sequences import Tokens

PPO_FORMULAS: dict[str, LossFormula] = {
    "ppo": LossFormula("mean over tokens of -min(ρA, clip(ρ, 1-ε, 1+ε_high) A)", ("1707.06347",)),
}
VALUE_FORMULAS: dict[str, LossFormula] = {
    "ppo_value": LossFormula("½ mean of max((V - R)², (clip(V, V_old ± c) - R)²)", ("1707.06347", "2006.05990")),
}


class ValueLoss(NamedTuple):
    """The loss of a value function.

    Attributes:
        loss: scalar, to differentiate.
        clipped: of the values' shape, True where the clipped error is the larger one, so that the gradient is 0.
    """

    loss: Tensor
    clipped: Tensor


def ppo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, a mean over the tokens of the batch.

    -min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A), with ρ = exp(log π - log π_old) (Schulman et al. 2017, arXiv 1707.06347).
    It is `grpo` with loss_type="bnpo", which also takes weights for the sampler and a bound for negative advantages.

    Args:
        logps, old_logps: (B, T) log-probability of each token, now and at the time of the sampling.
        advantages: (B, T), or (B,) for one per sequence.
        mask: (B, T), bool or numbers: False or 0 leaves a token out, whatever its values are.
        cliprange: ε, at least 0.
        cliprange_high: ε_high. None: ε.

    Returns:
        `PolicyLoss`, as `grpo` returns it.

    Raises:
        OptionError: an option is out of range.
        ShapeError: the shapes do not match.
        DtypeError: a tensor is not floating-point.
    """
    _check_ppo_options(cliprange, cliprange_high)
    return grpo(
        logps, advantages, mask, old_logps=old_logps, loss_type="bnpo", epsilon=cliprange, epsilon_high=cliprange_high
    )


def _check_ppo_options(cliprange: float, cliprange_high: float | None) -> None:
    check_number("cliprange", cliprange, at_least=0)
    if cliprange_high is not None:
        check_number("cliprange_high", cliprange_high, at_least=0)


def _check_value_options(cliprange_value: float) -> None:
    check_number("cliprange_value", cliprange_value, above=0)


def ppo_value(
    values: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    old_values: Tensor | None = None,
    cliprange_value: float = 0.2,
) -> ValueLoss:
    """PPO's value loss: half of the mean squared error, with the change of the value clipped.

    ½ mean of max((V - R)², (clip(V, V_old - c, V_old + c) - R)²), as in the code of Schulman et al. 2017 (arXiv
    1707.06347; Andrychowicz et al. 2020, arXiv 2006.05990, describe it).

    Args:
        values: (B, T) V of each token.
        returns: (B, T) R of each token.
        mask: (B, T), bool or numbers: False or 0 leaves a token out, whatever its values are.
        old_values: (B, T) V_old, at the time of the sampling. None: no clipping.
        cliprange_value: c, above 0.

    Returns:
        `ValueLoss`: loss (scalar) and clipped (B, T). A batch without tokens gives 0.

    Raises:
        OptionError: cliprange_value is out of range.
        ShapeError: the shapes do not match.
        DtypeError: a tensor is not floating-point.
    """
    _check_value_options(cliprange_value)
    values = as_float("values", values)
    same_shape(values.shape, returns=returns, old_values=old_values)
    tokens = Tokens.of(values, mask)
    values, target = tokens.masked(values), tokens.masked(as_float("returns", returns).detach())
    squared = (values - target).square()
    clipped = torch.zeros_like(tokens.mask)
    if old_values is not None:
        old = tokens.masked(as_float("old_values", old_values).detach())
        near = torch.maximum(torch.minimum(values, old + cliprange_value), old - cliprange_value)
        of_near = (near - target).square()
        clipped = (of_near > squared) & tokens.mask
        squared = torch.maximum(squared, of_near)
    return ValueLoss(0.5 * tokens.mean(squared), clipped)


class PPOLoss(LossModule, of=ppo, holds="cliprange cliprange_high", check=_check_ppo_options):
    """`ppo` as a module that holds its options."""


class PPOValueLoss(LossModule, of=ppo_value, holds="cliprange_value", check=_check_value_options):
    """`ppo_value` as a module that holds its options."""
