"""PPO's losses of policy and value against formulas that loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from loss_checks import check, check_finite, draw
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses import PPOLoss, PPOValueLoss, ppo, ppo_value

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
PLACES = [tuple(place) for place in MASK.nonzero().tolist()]
OLD, ADVANTAGES, RETURNS = draw(3, 4, seed=1) - 2, draw(3, 4, seed=2), draw(3, 4, seed=3)


def test_policy_loss_and_gradient_are_the_formula() -> None:
    def formula(logps: Tensor) -> Tensor:
        losses = []
        for b, t in PLACES:
            a, ratio = ADVANTAGES[b, t].to(logps), torch.exp(logps[b, t] - OLD[b, t].to(logps))
            losses.append(-torch.min(ratio * a, torch.clamp(ratio, 1 - 0.1, 1 + 0.3) * a))
        return torch.stack(losses).mean()

    def ours(logps: Tensor) -> Tensor:
        return ppo(logps, OLD.to(logps), ADVANTAGES.to(logps), MASK, cliprange=0.1, cliprange_high=0.3).loss

    check(ours, formula, {"logps": OLD + draw(3, 4, scale=0.8, seed=4)})


@pytest.mark.parametrize("clip", [0.3, None])
def test_value_loss_and_gradient_are_the_formula(clip: float | None) -> None:
    def formula(values: Tensor) -> Tensor:
        losses = []
        for b, t in PLACES:
            v, old, r = values[b, t], float(OLD[b, t]), float(RETURNS[b, t])
            error = (v - r) ** 2
            if clip is not None:
                error = max(error, (min(max(v, v.new_tensor(old - clip)), v.new_tensor(old + clip)) - r) ** 2)
            losses.append(error)
        return sum(losses) / len(losses) / 2

    def ours(values: Tensor) -> Tensor:
        clipping = {} if clip is None else {"old_values": OLD.to(values), "cliprange_value": clip}
        return ppo_value(values, RETURNS.to(values), MASK, **clipping).loss

    check(ours, formula, {"values": OLD + draw(3, 4, scale=0.6, seed=5)})


def test_clipped_values_are_named_and_have_no_gradient() -> None:
    values = torch.tensor([0.0, 1.0, 1.0], requires_grad=True)
    result = ppo_value(values, torch.tensor([0.0, 2.0, -2.0]), old_values=torch.zeros(3), cliprange_value=0.5)
    result.loss.backward()
    assert result.clipped.tolist() == [False, True, False]
    assert values.grad[1] == 0 and values.grad[2] > 0


def test_masked_values_never_enter_even_if_they_are_nan() -> None:
    values = RETURNS.masked_fill(~MASK, math.nan).requires_grad_()
    result = ppo_value(values, OLD.masked_fill(~MASK, math.inf), MASK, old_values=OLD.masked_fill(~MASK, math.nan))
    result.loss.backward()
    torch.testing.assert_close(result.loss, ppo_value(RETURNS, OLD, MASK, old_values=OLD).loss)
    assert values.grad.isfinite().all() and not values.grad[~MASK].any()
    assert ppo_value(RETURNS, OLD, torch.zeros_like(MASK)).loss.item() == 0.0


@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_extreme_log_ratios_give_finite_losses_and_gradients(gap: float) -> None:
    for advantage in (1.0, -1.0):
        check_finite(
            lambda logps: ppo(logps, torch.zeros(1, 2), torch.tensor([advantage])).loss,  # noqa: B023
            {"logps": torch.tensor([[gap, 0.0]])},
        )


def test_invalid_options_and_tensors_are_refused() -> None:
    with pytest.raises(OptionError, match=r"cliprange=-0.1 must be at least 0"):
        ppo(OLD, OLD, ADVANTAGES, cliprange=-0.1)
    with pytest.raises(OptionError, match=r"cliprange_high=-1"):
        PPOLoss(cliprange_high=-1)
    with pytest.raises(OptionError, match=r"cliprange_value=0 must be above 0"):
        PPOValueLoss(cliprange_value=0)
    with pytest.raises(OptionError, match=r"cliprange_value=0 must be above 0"):
        ppo_value(OLD, RETURNS, cliprange_value=0)
    with pytest.raises(ShapeError, match="returns"):
        ppo_value(OLD, RETURNS[0])


def test_modules_give_the_functions_results() -> None:
    logps = OLD + 0.3
    expected = ppo(logps, OLD, ADVANTAGES, MASK, cliprange=0.1)
    assert torch.equal(PPOLoss(cliprange=0.1)(logps, OLD, ADVANTAGES, MASK).loss, expected.loss)
    value = ppo_value(logps, RETURNS, MASK, old_values=OLD)
    assert torch.equal(PPOValueLoss()(logps, RETURNS, MASK, old_values=OLD).loss, value.loss)
