"""ORPO, SimPO and CPO against formulas that loop over pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_checks import check, check_finite, draw, each, sigmoid
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses import CPOLoss, ORPOLoss, SimPOLoss, cpo, orpo, simpo
from tigon.losses.reference_free import CPO_FORMULAS

BETA, GAMMA = 0.3, 0.4
INPUTS = {"chosen_logps": -draw(6, seed=1).abs() - 0.05, "rejected_logps": -draw(6, seed=2).abs() - 0.05}
NLL = draw(6, seed=3).abs()


def log_loss(margin: Tensor, e: float) -> Tensor:
    return -(1 - e) * torch.log(sigmoid(margin)) - e * torch.log(sigmoid(-margin))


PAIR: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sigmoid": lambda w, l, e: log_loss(BETA * (w - l), e),
    "hinge": lambda w, l, e: torch.clamp(1 - BETA * (w - l), min=0),
    "ipo": lambda w, l, e: (w - l - 1 / (2 * BETA)).pow(2),
    "simpo": lambda w, l, e: log_loss(BETA * (w - l - GAMMA / BETA), e),
}


@pytest.mark.parametrize("loss_type", CPO_FORMULAS)
def test_cpo_and_its_gradients_are_the_formula(loss_type: Any) -> None:
    e = 0.2 if loss_type in ("sigmoid", "simpo") else 0.0

    def formula(chosen_logps: Tensor, rejected_logps: Tensor, nll: Tensor) -> Tensor:
        return each(lambda w, l, n: PAIR[loss_type](w, l, e) + 0.7 * n, chosen_logps, rejected_logps, nll)

    def ours(chosen_logps: Tensor, rejected_logps: Tensor, nll: Tensor) -> Tensor:
        return cpo(
            chosen_logps, rejected_logps, nll, beta=BETA, loss_type=loss_type, label_smoothing=e, cpo_alpha=0.7,
            simpo_gamma=GAMMA,
        ).loss  # fmt: skip

    check(ours, formula, {**INPUTS, "nll": NLL})


def test_simpo_and_its_gradients_are_the_formula() -> None:
    check(
        lambda **x: simpo(**x, beta=2.0, gamma=0.5).loss,
        lambda chosen_logps, rejected_logps: each(
            lambda w, l: -torch.log(sigmoid(2 * w - 2 * l - 0.5)), chosen_logps, rejected_logps
        ),
        INPUTS,
    )


def test_orpo_and_its_gradients_are_the_formula() -> None:
    def formula(chosen_logps: Tensor, rejected_logps: Tensor, nll: Tensor) -> Tensor:
        def pair(w: Tensor, l: Tensor, n: Tensor) -> Tensor:
            odds_w, odds_l = torch.exp(w) / (1 - torch.exp(w)), torch.exp(l) / (1 - torch.exp(l))
            return n - BETA * torch.log(sigmoid(torch.log(odds_w / odds_l)))

        return each(pair, chosen_logps, rejected_logps, nll)

    def ours(chosen_logps: Tensor, rejected_logps: Tensor, nll: Tensor) -> Tensor:
        return orpo(chosen_logps, rejected_logps, nll, beta=BETA).loss

    check(ours, formula, {**INPUTS, "nll": NLL})


def test_orpo_returns_what_trainers_log() -> None:
    result = orpo(**INPUTS, beta=BETA)
    p, q = INPUTS["chosen_logps"].exp(), INPUTS["rejected_logps"].exp()
    odds = (p / (1 - p)) / (q / (1 - q))
    torch.testing.assert_close(result.log_odds, odds.log())
    torch.testing.assert_close(result.log_odds_ratio, (odds / (1 + odds)).log())
    torch.testing.assert_close(result.loss, -BETA * result.log_odds_ratio)
    torch.testing.assert_close(result.chosen_rewards, BETA * INPUTS["chosen_logps"])
    torch.testing.assert_close(result.rejected_rewards, BETA * INPUTS["rejected_logps"])


def test_nll_may_be_a_scalar_and_label_smoothing_1_swaps_the_pair() -> None:
    torch.testing.assert_close(orpo(**INPUTS, nll_loss=torch.tensor(2.0)).loss, orpo(**INPUTS).loss + 2.0)
    swapped = cpo(INPUTS["rejected_logps"], INPUTS["chosen_logps"])
    torch.testing.assert_close(cpo(**INPUTS, label_smoothing=1.0).loss, swapped.loss)


@pytest.mark.parametrize("chosen", [0.0, -1e-9, -500.0, -1e4, 1e-6])
@pytest.mark.parametrize("rejected", [0.0, -1e-9, -500.0, -1e4, 1e-6])
def test_extreme_log_probabilities_give_finite_losses_and_gradients(chosen: float, rejected: float) -> None:
    x = {"chosen_logps": torch.tensor([chosen]), "rejected_logps": torch.tensor([rejected])}
    found = check_finite(lambda **x: orpo(**x, beta=1.0).loss, x)
    assert found["rejected_logps"].item() >= 0.0 >= found["chosen_logps"].item()
    for loss_type in CPO_FORMULAS:
        check_finite(lambda **x: cpo(**x, beta=1.0, loss_type=loss_type).loss, x)  # noqa: B023
    check_finite(lambda **x: simpo(**x).loss, x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: cpo(**INPUTS, loss_type="kto_pair"),
            "loss_type='kto_pair' is not known; choose one of sigmoid, hinge",
        ),
        (lambda: cpo(**INPUTS, loss_type="ipo", label_smoothing=0.1), "does not apply to loss_type='ipo'"),
        (lambda: cpo(**INPUTS, beta=0.0), "beta=0.0 must be above 0"),
        (lambda: cpo(**INPUTS, cpo_alpha=float("inf")), "cpo_alpha=inf must be at least 0"),
        (lambda: simpo(**INPUTS, gamma=float("nan")), "gamma=nan must be finite"),
        (lambda: orpo(**INPUTS, beta=-1.0), "beta=-1.0 must be at least 0"),
        (lambda: CPOLoss(loss_type="orpo"), "loss_type='orpo'"),
        (lambda: SimPOLoss(gamma="1"), "gamma='1'"),
        (lambda: ORPOLoss(beta=-1.0), "beta=-1.0"),
    ],
)
def test_invalid_options_are_refused_by_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        call()
    assert words in str(caught.value)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="nll_loss"):
        orpo(**INPUTS, nll_loss=torch.zeros(2))
    with pytest.raises(ShapeError, match="rejected_logps"):
        simpo(INPUTS["chosen_logps"], INPUTS["rejected_logps"][:1])


def test_modules_give_the_functions_results() -> None:
    assert torch.equal(ORPOLoss(beta=0.2)(**INPUTS).loss, orpo(**INPUTS, beta=0.2).loss)
    assert torch.equal(CPOLoss(loss_type="hinge")(**INPUTS).loss, cpo(**INPUTS, loss_type="hinge").loss)
    assert torch.equal(SimPOLoss(gamma=1.0)(**INPUTS).loss, simpo(**INPUTS, gamma=1.0).loss)
