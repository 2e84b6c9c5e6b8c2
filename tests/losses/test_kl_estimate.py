"""The estimators of the KL divergence: their formulas, their means over samples, and their extremes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_checks import check, check_finite, draw, each

from tigon.errors import OptionError, ShapeError
from tigon.losses import kl_estimate

FORMULAS: dict[str, Any] = {
    "k1": lambda p, q: torch.log(torch.exp(p) / torch.exp(q)),
    "k2": lambda p, q: torch.log(torch.exp(p) / torch.exp(q)) ** 2 / 2,
    "k3": lambda p, q: torch.exp(q) / torch.exp(p) - 1 - torch.log(torch.exp(q) / torch.exp(p)),
}
INPUTS = {"logps": draw(6, seed=1) - 2, "ref_logps": draw(6, seed=2) - 2}


@pytest.mark.parametrize("name", FORMULAS)
def test_estimate_and_gradients_are_the_formula(name: Any) -> None:
    check(
        lambda **x: kl_estimate(**x, kl_estimator=name),
        lambda logps, ref_logps: each(FORMULAS[name], logps, ref_logps), INPUTS,
    )  # fmt: skip


def test_k1_and_k3_are_on_average_the_kl_and_k2_has_on_average_its_gradient() -> None:
    logits = draw(5, seed=3).requires_grad_()
    logps, ref = logits.log_softmax(0), draw(5, seed=4).log_softmax(0)
    exact = (logps.exp() * (logps - ref)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((logps.exp() * kl_estimate(logps, ref, name)).sum(), exact)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad((logps.exp().detach() * kl_estimate(logps, ref, "k2")).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("gap", [500.0, -500.0, 1e4, -1e4])
def test_extreme_log_ratios_give_finite_estimates_with_the_right_sign(name: Any, gap: float) -> None:
    x = {"logps": torch.tensor([0.0]), "ref_logps": torch.tensor([gap])}
    found = check_finite(lambda **x: kl_estimate(**x, kl_estimator=name), x)
    assert name == "k1" or (found["loss"] >= 0 and found["logps"].item() * gap < 0)


def test_unknown_estimators_and_shapes_that_differ_are_refused() -> None:
    with pytest.raises(OptionError, match="choose one of k1, k2, k3"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="ref_logps"):
        kl_estimate(torch.zeros(2), torch.zeros(3))
