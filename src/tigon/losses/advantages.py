"""Advantages from the rewards of several completions per prompt."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses._checks import as_float, check_choice

ScaleRewards = Literal["group", "batch", "none"]
_EPS = 1e-4
"""Added to standard deviations, so that equal rewards give advantages of 0. TRL has the same."""


def _groups(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rewards (G, n) with NaN as 0, where they are not NaN, and how many of each group are not (G, 1)."""
    if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
        raise OptionError(f"num_generations={num_generations!r} must be a whole number of at least 1.")
    rewards = as_float("rewards", rewards)
    if rewards.ndim != 1 or len(rewards) % num_generations:
        raise ShapeError(
            f"rewards is {tuple(rewards.shape)}; it must be a vector, "
            f"and num_generations={num_generations} must divide its length."
        )
    groups = rewards.reshape(-1, num_generations)
    scored = ~groups.isnan()
    return groups.nan_to_num(nan=0.0), scored, scored.sum(1, keepdim=True)


def _std(deviations: Tensor, count: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Standard deviation with n - 1 in the denominator; 0 for a single value."""
    return (deviations.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def group_advantages(rewards: Tensor, num_generations: int, *, scale_rewards: ScaleRewards = "group") -> Tensor:
    """Advantages of GRPO: each reward minus its group's mean, divided by a standard deviation.

    A = (R - mean) / (std + 1e-4) (Shao et al. 2024, arXiv 2402.03300). Dr. GRPO divides by nothing (arXiv 2503.20783),
    and "batch" by the deviation of all rewards (arXiv 2508.08221).

    Args:
        rewards: (B,) with the completions of a prompt one after another. NaN marks a completion that nothing scored:
            it enters no mean, and its advantage is 0.
        num_generations: completions per prompt, a divisor of B.
        scale_rewards: "group" divides by the group's standard deviation, "batch" by the batch's, "none" by nothing.

    Returns:
        (B,) advantages without gradient.

    Raises:
        OptionError: an option is unknown or out of range.
        ShapeError: rewards is not a vector, or its length no multiple of num_generations.
        DtypeError: rewards is not a floating-point tensor.
    """
    check_choice("scale_rewards", scale_rewards, get_args(ScaleRewards))
    values, scored, count = _groups(rewards.detach(), num_generations)
    centred = (values - values.sum(1, keepdim=True) / count.clamp(min=1)).masked_fill(~scored, 0.0)
    if scale_rewards == "group":
        centred = centred / (_std(centred, count, (1,)) + _EPS)
    elif scale_rewards == "batch":
        total = scored.sum()
        around_mean = (values - values.sum() / total.clamp(min=1)).masked_fill(~scored, 0.0)
        centred = centred / (_std(around_mean, total, (0, 1)) + _EPS)
    return centred.reshape(-1)


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """Advantages of RLOO: each reward minus the mean of the other rewards of its group.

    A = R_i - mean over j != i of R_j (Ahmadian et al. 2024, arXiv 2402.14740).

    Args:
        rewards: (B,) with the completions of a prompt one after another. NaN marks a completion that nothing scored:
            it enters no mean, and its advantage is 0.
        num_generations: completions per prompt, a divisor of B.

    Returns:
        (B,) advantages without gradient; 0 for the only scored completion of a group.

    Raises:
        OptionError: num_generations is not a whole number of at least 1.
        ShapeError: rewards is not a vector, or its length no multiple of num_generations.
        DtypeError: rewards is not a floating-point tensor.
    """
    values, scored, count = _groups(rewards.detach(), num_generations)
    others = (values.sum(1, keepdim=True) - values) / (count - 1).clamp(min=1)
    return (values - others).masked_fill(~scored | (count < 2), 0.0).reshape(-1)
