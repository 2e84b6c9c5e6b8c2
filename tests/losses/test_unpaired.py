"""KTO and BCO against formulas that loop over sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_checks import check, check_finite, draw, sigmoid
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses import BCOLoss, KTOLoss, bco, kto, kto_kl

BETA, GOOD, BAD = 0.3, 1.5, 0.5
LABELS = torch.tensor([True, False, False, True, True])
INPUTS = {"logps": draw(5, scale=2, shift=-20, seed=1), "ref_logps": draw(5, scale=2, shift=-20, seed=2)}
WEIGHTS = {"desirable_weight": GOOD, "undesirable_weight": BAD}


def kto_formula(z: float) -> Any:
    def of(logps: Tensor, ref_logps: Tensor) -> Tensor:
        losses = []
        for logp, ref, good in zip(logps, ref_logps, LABELS.tolist(), strict=True):
            r = logp - ref
            losses.append(GOOD * (1 - sigmoid(BETA * (r - z))) if good else BAD * (1 - sigmoid(BETA * (z - r))))
        return torch.stack(losses)

    return of


def bco_formula(delta: float) -> Any:
    def of(logps: Tensor, ref_logps: Tensor) -> Tensor:
        losses = []
        for logp, ref, good in zip(logps, ref_logps, LABELS.tolist(), strict=True):
            logit = BETA * (logp - ref) - delta
            losses.append(-GOOD * torch.log(sigmoid(logit)) if good else -BAD * torch.log(sigmoid(-logit)))
        return torch.stack(losses)

    return of


@pytest.mark.parametrize("labels", [LABELS, LABELS.int(), LABELS.long() * 2 - 1], ids=["bool", "0-1", "signs"])
def test_kto_and_its_gradients_are_the_formula(labels: Tensor) -> None:
    check(lambda **x: kto(**x, labels=labels, kl=0.4, beta=BETA, **WEIGHTS).loss, kto_formula(0.4), INPUTS)


def test_apo_zero_unpaired_is_kto_without_a_kl() -> None:
    check(
        lambda **x: kto(**x, labels=LABELS, beta=BETA, loss_type="apo_zero_unpaired", **WEIGHTS).loss,
        kto_formula(0.0), INPUTS,
    )  # fmt: skip


def test_bco_and_its_gradients_are_the_formula() -> None:
    check(lambda **x: bco(**x, labels=LABELS, delta=0.2, beta=BETA, **WEIGHTS).loss, bco_formula(0.2), INPUTS)


def test_kl_is_the_mean_log_ratio_at_least_0_and_has_no_gradient() -> None:
    logps = torch.tensor([-1.0, -3.0], requires_grad=True)
    z = kto_kl(logps, torch.tensor([-2.0, -3.0]))
    assert z.item() == 0.5 and not z.requires_grad
    assert kto_kl(torch.tensor([-5.0]), torch.tensor([-2.0])).item() == 0.0
    assert kto_kl(torch.zeros(0), torch.zeros(0)).item() == 0.0
    kl = torch.tensor([0.5], requires_grad=True)
    kto(logps, torch.zeros(2), torch.tensor([True, False]), kl).loss.sum().backward()
    assert kl.grad is None


def test_rewards_have_no_gradient() -> None:
    logps = INPUTS["logps"].clone().requires_grad_()
    for result in (kto(logps, INPUTS["ref_logps"], LABELS, 0.0), bco(logps, INPUTS["ref_logps"], LABELS)):
        torch.testing.assert_close(result.rewards, 0.1 * (INPUTS["logps"] - INPUTS["ref_logps"]))
        assert not result.rewards.requires_grad


@pytest.mark.parametrize("ratio", [500.0, -500.0, 1e4, -1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(ratio: float) -> None:
    x = {"logps": torch.tensor([ratio, ratio]), "ref_logps": torch.zeros(2)}
    labels = torch.tensor([True, False])
    check_finite(lambda **x: kto(**x, labels=labels, kl=0.0, beta=1.0).loss, x)
    check_finite(lambda **x: bco(**x, labels=labels, beta=1.0).loss, x)


def test_batches_of_one_label_or_none_are_accepted() -> None:
    assert kto(torch.zeros(1), torch.zeros(1), torch.tensor([False]), 0.0).loss.tolist() == [0.5]
    assert kto(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), 0.0).loss.shape == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "bco", "kl": 0.0}, "loss_type='bco' is not known; choose one of kto, apo_zero_unpaired"),
        ({}, "requires kl"),
        ({"loss_type": "apo_zero_unpaired", "kl": 0.0}, "leave kl out"),
        ({"kl": 0.0, "beta": -1.0}, "beta=-1.0 must be above 0"),
        ({"kl": 0.0, "desirable_weight": -1.0}, "desirable_weight=-1.0 must be at least 0"),
        ({"kl": "0"}, "kl='0' is a str"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        kto(**INPUTS, labels=LABELS, **options)
    assert words in str(caught.value)


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(OptionError, match="labels is torch"):
        kto(**INPUTS, labels=LABELS.float(), kl=0.0)
    with pytest.raises(ShapeError, match="labels"):
        kto(**INPUTS, labels=LABELS[:2], kl=0.0)
    with pytest.raises(ShapeError, match=r"kl is \(5,\)"):
        kto(**INPUTS, labels=LABELS, kl=torch.zeros(5))


def test_modules_give_the_functions_results() -> None:
    x = (*INPUTS.values(), LABELS)
    options = {"beta": 0.2, "undesirable_weight": 2.0}
    assert torch.equal(KTOLoss(**options)(*x, 0.1).loss, kto(*x, 0.1, **options).loss)
    assert torch.equal(BCOLoss(beta=0.2)(*x, 0.1).loss, bco(*x, 0.1, beta=0.2).loss)
    with pytest.raises(OptionError):
        KTOLoss(loss_type="bco")
    with pytest.raises(OptionError):
        BCOLoss(beta=0)
