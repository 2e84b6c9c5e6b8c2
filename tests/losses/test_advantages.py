"""Advantages of groups against loops over groups with Python's statistics."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from loss_checks import draw

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.losses import group_advantages, leave_one_out_advantages

REWARDS = draw(12, seed=1)
UNSCORED = REWARDS.clone().index_fill(0, torch.tensor([1, 8, 9, 10, 11]), math.nan)


def scored(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@pytest.mark.parametrize("rewards", [REWARDS, UNSCORED], ids=["all-scored", "some-unscored"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_the_formula(scale: Any, rewards: torch.Tensor) -> None:
    found = group_advantages(rewards, 4, scale_rewards=scale)
    everything = rewards.tolist()
    for i, reward in enumerate(everything):
        group = scored(everything[i // 4 * 4 : i // 4 * 4 + 4])
        if math.isnan(reward):
            assert found[i] == 0
            continue
        divisor = {"group": std(group) + 1e-4, "batch": std(scored(everything)) + 1e-4, "none": 1.0}[scale]
        assert found[i].item() == pytest.approx((reward - statistics.mean(group)) / divisor, abs=1e-12)


@pytest.mark.parametrize("rewards", [REWARDS, UNSCORED], ids=["all-scored", "some-unscored"])
def test_leave_one_out_advantages_are_the_formula(rewards: torch.Tensor) -> None:
    found = leave_one_out_advantages(rewards, 4)
    everything = rewards.tolist()
    for i, reward in enumerate(everything):
        others = scored([everything[j] for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i])
        expected = 0.0 if math.isnan(reward) or not others else reward - statistics.mean(others)
        assert found[i].item() == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_and_single_completions_have_no_advantage() -> None:
    assert not group_advantages(torch.ones(4), 4).any()
    assert not group_advantages(REWARDS, 1).any() and not leave_one_out_advantages(REWARDS, 1).any()
    assert group_advantages(torch.zeros(0), 4).shape == (0,)


def test_advantages_have_no_gradient_and_wrong_arguments_are_refused() -> None:
    assert not group_advantages(REWARDS.clone().requires_grad_(), 4).requires_grad
    with pytest.raises(ShapeError, match="num_generations=5 must divide"):
        group_advantages(REWARDS, 5)
    with pytest.raises(OptionError, match="choose one of group, batch, none"):
        group_advantages(REWARDS, 4, scale_rewards=True)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="num_generations=0"):
        leave_one_out_advantages(REWARDS, 0)
    with pytest.raises(DtypeError):
        group_advantages(torch.ones(4, dtype=torch.int64), 4)
