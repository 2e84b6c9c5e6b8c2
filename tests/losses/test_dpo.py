"""DPO and its variants against formulas that loop over pairs."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from loss_checks import check, check_finite, draw, each, sigmoid
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.losses import DPOLoss, dpo
from tigon.losses.dpo import FORMULAS, USE_LABEL_SMOOTHING, DPOLossType

BETA, TAU = 0.3, 0.7
NAMES = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")


def inputs(size: int = 5, scale: float = 2.0) -> dict[str, Tensor]:
    return {name: draw(size, scale=scale, shift=-20.0, seed=seed) for seed, name in enumerate(NAMES)}


def log_loss(margin: Tensor, e: float) -> Tensor:
    return -(1 - e) * torch.log(sigmoid(margin)) - e * torch.log(sigmoid(-margin))


def exo(margin: Tensor, e: float) -> Tensor:
    """KL of (σ(m), 1 - σ(m)) from (1 - e, e)."""
    p = torch.stack([sigmoid(margin), sigmoid(-margin)])
    q = torch.tensor([1 - e, e], dtype=p.dtype)
    return (p * (p / q).log()).sum()


# (r_w, r_l, e) -> loss of one pair
PAIR: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sigmoid": lambda w, l, e: log_loss(BETA * (w - l), e),
    "sigmoid_norm": lambda w, l, e: log_loss(BETA * (w - l), e),
    "hinge": lambda w, l, e: torch.clamp(1 - BETA * (w - l), min=0),
    "ipo": lambda w, l, e: (w - l - 1 / (2 * BETA)).pow(2),
    "robust": lambda w, l, e: (
        (-(1 - e) * torch.log(sigmoid(BETA * (w - l))) + e * torch.log(sigmoid(BETA * (l - w)))) / (1 - 2 * e)
    ),
    "exo_pair": lambda w, l, e: exo(BETA * (w - l), e),
    "nca_pair": lambda w, l, e: (
        -torch.log(sigmoid(BETA * w)) - (torch.log(sigmoid(-BETA * w)) + torch.log(sigmoid(-BETA * l))) / 2
    ),
    "bco_pair": lambda w, l, e: -torch.log(sigmoid(BETA * w)) - torch.log(sigmoid(-BETA * l)),
    "sppo_hard": lambda w, l, e: (w - 1 / (2 * BETA)).pow(2) + (l + 1 / (2 * BETA)).pow(2),
    "aot_unpaired": lambda w, l, e: log_loss(BETA * (w - l), e),
    "apo_zero": lambda w, l, e: 1 - sigmoid(BETA * w) + sigmoid(BETA * l),
    "apo_down": lambda w, l, e: sigmoid(BETA * w) + 1 - sigmoid(BETA * (w - l)),
    "discopop": lambda w, l, e: (
        (1 - sigmoid(BETA * (w - l) / TAU)) * -torch.log(sigmoid(BETA * (w - l)))
        + sigmoid(BETA * (w - l) / TAU) * torch.exp(-BETA * (w - l))
    ),
}


def formula(loss_type: str, e: float, lengths: tuple[Tensor, Tensor] | None) -> Any:
    def of(
        chosen_logps: Tensor, rejected_logps: Tensor, ref_chosen_logps: Tensor, ref_rejected_logps: Tensor
    ) -> Tensor:
        w, l = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
        if loss_type == "aot":
            w = torch.stack(sorted(chosen_logps - rejected_logps, key=Tensor.item))
            l = torch.stack(sorted(ref_chosen_logps - ref_rejected_logps, key=Tensor.item))
            return each(lambda a, b: log_loss(BETA * (a - b), e), w, l)
        if loss_type == "aot_unpaired":
            w, l = torch.stack(sorted(w, key=Tensor.item)), torch.stack(sorted(l, key=Tensor.item))
        if lengths is not None:
            w, l = w / lengths[0].to(w.dtype), l / lengths[1].to(l.dtype)
        return each(lambda a, b: PAIR[loss_type](a, b, e), w, l)

    return of


def smoothing(loss_type: str) -> float:
    return 0.2 if loss_type in USE_LABEL_SMOOTHING else 0.0


LENGTHS = (torch.tensor([3, 7, 1, 12, 5]), torch.tensor([4, 2, 9, 1, 30]))


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_loss_and_gradients_are_the_formulas(loss_type: str) -> None:
    lengths = LENGTHS if loss_type == "sigmoid_norm" else None
    options: dict[str, Any] = {"loss_type": loss_type, "beta": BETA, "label_smoothing": smoothing(loss_type)}
    if lengths:
        options.update(chosen_lengths=lengths[0], rejected_lengths=lengths[1])
    check(
        lambda **x: dpo(**x, **options, discopop_tau=TAU).loss,
        formula(loss_type, smoothing(loss_type), lengths), inputs(),
    )  # fmt: skip


def test_ipo_divides_by_lengths_if_they_are_given() -> None:
    lengths = {"chosen_lengths": LENGTHS[0], "rejected_lengths": LENGTHS[1]}
    check(lambda **x: dpo(**x, beta=BETA, loss_type="ipo", **lengths).loss, formula("ipo", 0.0, LENGTHS), inputs())


@pytest.mark.parametrize("loss_type", [name for name in FORMULAS if name not in ("sigmoid_norm", "ipo")])
def test_other_types_do_not_use_lengths(loss_type: str) -> None:
    options: dict[str, Any] = {"loss_type": loss_type, "label_smoothing": smoothing(loss_type)}
    given = dpo(**inputs(), **options, chosen_lengths=LENGTHS[0], rejected_lengths=LENGTHS[1]).loss
    assert torch.equal(given, dpo(**inputs(), **options).loss)


def test_rewards_are_beta_times_the_log_ratio_without_gradient_whatever_the_lengths() -> None:
    x = {name: value.requires_grad_() for name, value in inputs().items()}
    lengths = {"chosen_lengths": LENGTHS[0], "rejected_lengths": LENGTHS[1]}
    result = dpo(**x, beta=BETA, loss_type="sigmoid_norm", **lengths)
    chosen = BETA * (x["chosen_logps"] - x["ref_chosen_logps"])
    rejected = BETA * (x["rejected_logps"] - x["ref_rejected_logps"])
    torch.testing.assert_close(result.chosen_rewards, chosen.detach())
    torch.testing.assert_close(result.rejected_rewards, rejected.detach())
    assert not result.chosen_rewards.requires_grad and not result.rejected_rewards.requires_grad
    torch.testing.assert_close(result.margins, (chosen - rejected).detach())
    assert result.accuracies.tolist() == [float(a > b) for a, b in zip(chosen, rejected, strict=True)]


@pytest.mark.parametrize("ratio", [500.0, -500.0, 1e4, -1e4])
@pytest.mark.parametrize("loss_type", FORMULAS)
def test_extreme_log_ratios_give_finite_losses_and_gradients(loss_type: str, ratio: float) -> None:
    x = {name: torch.zeros(2) for name in NAMES} | {"chosen_logps": torch.tensor([ratio, 0.0])}
    x["rejected_logps"] = torch.tensor([0.0, ratio])
    lengths = {"chosen_lengths": torch.ones(2), "rejected_lengths": torch.ones(2)}
    check_finite(
        lambda **x: dpo(**x, beta=1.0, loss_type=loss_type, label_smoothing=smoothing(loss_type), **lengths).loss, x
    )


def test_label_smoothing_of_a_half_makes_sigmoid_symmetric_and_0_is_plain() -> None:
    x = inputs()
    swapped = {name: x[other] for name, other in zip(NAMES, [NAMES[1], NAMES[0], NAMES[3], NAMES[2]], strict=True)}
    torch.testing.assert_close(dpo(**x, label_smoothing=0.5).loss, dpo(**swapped, label_smoothing=0.5).loss)
    torch.testing.assert_close(dpo(**x, label_smoothing=1.0).loss, dpo(**swapped).loss)
    torch.testing.assert_close(dpo(**x, loss_type="robust").loss, dpo(**x).loss)


@pytest.mark.parametrize("margin", [-50.0, -300.0])
def test_discopop_multiplies_a_small_and_a_large_factor(margin: float) -> None:
    zero = torch.zeros(1)
    found = dpo(zero + margin, zero, zero, zero, beta=1.0, loss_type="discopop", discopop_tau=1.0).loss
    # σ(m) exp(-m) is 1, and the logistic loss of weight 1 is -m.
    assert found.item() == pytest.approx(1.0 - margin, rel=1e-6)


def test_exo_pair_is_0_where_the_margin_is_the_smoothed_label() -> None:
    margin = math.log(0.8 / 0.2)
    zero = torch.zeros(1, dtype=torch.float64)
    result = dpo(zero + margin, zero, zero, zero, beta=1.0, loss_type="exo_pair", label_smoothing=0.2)
    assert abs(result.loss.item()) < 1e-12


def test_reference_free_counts_the_reference_as_0() -> None:
    x = inputs()
    zero = torch.zeros(5, dtype=torch.float64)
    free = dpo(x["chosen_logps"], x["rejected_logps"], reference_free=True).loss
    assert torch.equal(free, dpo(x["chosen_logps"], x["rejected_logps"], zero, zero).loss)


def test_half_precision_is_computed_in_fp32() -> None:
    x = {name: value.bfloat16() for name, value in inputs().items()}
    assert torch.equal(dpo(**x).loss, dpo(**{name: value.float() for name, value in x.items()}).loss)


def test_an_empty_batch_gives_empty_losses() -> None:
    assert dpo(*[torch.zeros(0)] * 4).loss.shape == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "sigmod"}, "loss_type='sigmod' is not known; choose one of sigmoid, "),
        ({"loss_type": None}, "loss_type=None is not known"),
        ({"beta": 0.0}, "beta=0.0 must be above 0"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"beta": "0.1"}, "beta='0.1' is a str"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1 must be at least 0 and at most 1"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, "label_smoothing=0.1 does not apply to loss_type='hinge'"),
        ({"label_smoothing": 0.5, "loss_type": "robust"}, "must be below 0.5"),
        ({"loss_type": "exo_pair"}, "above 0 and below 1"),
        ({"loss_type": "exo_pair", "label_smoothing": 1.0}, "above 0 and below 1"),
        ({"discopop_tau": 0.0}, "discopop_tau"),
        ({"loss_type": "sigmoid_norm"}, "loss_type='sigmoid_norm' requires chosen_lengths"),
        ({"reference_free": True}, "reference_free=True takes no ref_chosen_logps"),
        ({"reference_free": 1}, "reference_free=1 must be True or False"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        dpo(**inputs(), **options)
    assert words in str(caught.value)


def test_missing_references_and_wrong_tensors_are_refused() -> None:
    x = inputs()
    with pytest.raises(OptionError, match="reference_free=True"):
        dpo(x["chosen_logps"], x["rejected_logps"])
    with pytest.raises(ShapeError, match=r"rejected_logps \(4,\)"):
        dpo(**{**x, "rejected_logps": x["rejected_logps"][:4]})
    with pytest.raises(ShapeError):
        dpo(*[torch.zeros(2, 3)] * 4)
    with pytest.raises(ShapeError, match="chosen_lengths"):
        dpo(**x, loss_type="ipo", chosen_lengths=torch.ones(2), rejected_lengths=torch.ones(5))
    with pytest.raises(DtypeError, match=r"chosen_logps is torch.int64"):
        dpo(**{**x, "chosen_logps": torch.zeros(5, dtype=torch.int64)})


def test_module_checks_its_options_when_it_is_made_and_gives_the_functions_result() -> None:
    x = inputs()
    module = DPOLoss(beta=0.5, loss_type="apo_down")
    assert torch.equal(module(*x.values()).loss, dpo(**x, beta=0.5, loss_type="apo_down").loss)
    assert "beta=0.5, loss_type='apo_down'" in repr(module)
    with pytest.raises(OptionError):
        DPOLoss(loss_type="dpo")


def test_a_subclass_of_a_module_keeps_its_options_and_survives_a_pickle() -> None:
    module = pickle.loads(pickle.dumps(Mine(0.5)))
    assert module.options["beta"] == 0.5
    assert torch.equal(module(*inputs().values()).loss, dpo(**inputs(), beta=0.5).loss)


class Mine(DPOLoss):
    """A user's loss."""


def test_literal_and_table_name_the_same_types() -> None:
    assert get_args(DPOLossType) == tuple(FORMULAS)
