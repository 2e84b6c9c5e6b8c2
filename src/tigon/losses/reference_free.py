"""Preference losses without a reference model: ORPO, SimPO, and CPO with its variants."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses._checks import as_float, check_choice, check_number, vectors
from tigon.losses.common import LossFormula, LossModule, PairLoss, smoothed_logistic
from tigon.losses.numerics import log1mexp

CPOLossType = Literal["sigmoid", "hinge", "ipo", "simpo"]

ORPO_FORMULAS: dict[str, LossFormula] = {
    "orpo": LossFormula(
        "NLL_w - β log σ(log odds(p_w) - log odds(p_l)); odds(p) = p / (1-p), p = π^(1/|y|)", ("2403.07691",)
    ),
}
SIMPO_FORMULAS: dict[str, LossFormula] = {
    "simpo": LossFormula("-log σ(β (log π_w / |y_w| - log π_l / |y_l|) - γ)", ("2405.14734",)),
}
CPO_FORMULAS: dict[str, LossFormula] = {
    "sigmoid": LossFormula("-(1-e) log σ(βD) - e log σ(-βD) + α NLL_w; D = log π_w - log π_l", ("2401.08417",)),
    "hinge": LossFormula("max(0, 1 - βD) + α NLL_w", ("2305.10425",)),
    "ipo": LossFormula("(D - 1/(2β))² + α NLL_w, with log π / |y|", ("2310.12036",)),
    "simpo": LossFormula("-(1-e) log σ(βD - γ) - e log σ(γ - βD) + α NLL_w, with log π / |y|", ("2405.14734",)),
}


class OddsRatioLoss(NamedTuple):
    """The loss of ORPO and what trainers log.

    Attributes:
        loss: (B,) loss of each pair; the mean is the batch's.
        chosen_rewards, rejected_rewards: (B,) β times the mean log-probability, without gradient.
        log_odds_ratio: (B,) log σ of the log-odds, without gradient; TRL logs the mean as `log_odds_ratio`.
        log_odds: (B,) log-odds of chosen minus rejected, without gradient; TRL logs the mean as `log_odds_chosen`.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds_ratio: Tensor
    log_odds: Tensor


def _nll(nll_loss: Tensor | None, like: Tensor) -> Tensor | None:
    """The loss of the chosen sequences, checked: a scalar or (B,)."""
    if nll_loss is None:
        return None
    if nll_loss.ndim and nll_loss.shape != like.shape:
        raise ShapeError(f"nll_loss is {tuple(nll_loss.shape)}; it must be a scalar or {tuple(like.shape)}.")
    return as_float("nll_loss", nll_loss)


def orpo(
    chosen_logps: Tensor, rejected_logps: Tensor, nll_loss: Tensor | None = None, *, beta: float = 0.1
) -> OddsRatioLoss:
    """Odds ratio preference optimization: fine-tuning on the chosen sequences with a penalty on the rejected ones.

    loss = nll - β log σ(log odds_w - log odds_l), with odds = p / (1 - p) and log p the mean log-probability per token
    (Hong et al. 2024, arXiv 2403.07691).

    Args:
        chosen_logps, rejected_logps: (B,) mean log-probability per token of each sequence, at most 0.
        nll_loss: the negative log-likelihood of the chosen sequences, a scalar or (B,). None leaves it out.
        beta: β, the weight of the odds ratio (λ in the paper), at least 0.

    Returns:
        `OddsRatioLoss`: loss (B,), chosen_rewards, rejected_rewards, log_odds_ratio and log_odds (B,).

    Raises:
        OptionError: beta is out of range.
        ShapeError: the tensors are not vectors of one length.
        DtypeError: a tensor is not floating-point.
    """
    _check_orpo_options(beta)
    chosen, rejected = vectors(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    ratio = F.logsigmoid(log_odds)
    loss = -beta * ratio
    nll = _nll(nll_loss, loss)
    if nll is not None:
        loss = loss + nll
    return OddsRatioLoss(loss, beta * chosen.detach(), beta * rejected.detach(), ratio.detach(), log_odds.detach())


def check_cpo_options(
    *, beta: float, loss_type: str, label_smoothing: float, cpo_alpha: float, simpo_gamma: float
) -> None:
    """Raise `OptionError` for an option of `cpo`, or a combination of them, that is not valid."""
    check_choice("loss_type", loss_type, CPO_FORMULAS)
    check_number("beta", beta, above=0)
    check_number("label_smoothing", label_smoothing, at_least=0, at_most=1)
    check_number("cpo_alpha", cpo_alpha, at_least=0)
    check_number("simpo_gamma", simpo_gamma)
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise OptionError(
            f"label_smoothing={label_smoothing} does not apply to loss_type={loss_type!r}; "
            "it applies to sigmoid, simpo."
        )


def cpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    nll_loss: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: CPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    simpo_gamma: float = 0.5,
) -> PairLoss:
    """Contrastive preference optimization: DPO with a uniform reference, and fine-tuning on the chosen sequences.

    loss = -log σ(β (log π_w - log π_l)) + cpo_alpha · nll (Xu et al. 2024, arXiv 2401.08417).

    Args:
        chosen_logps, rejected_logps: (B,) log-probability of each sequence: summed over its tokens for "sigmoid" and
            "hinge", the mean per token for "ipo" and "simpo".
        nll_loss: the negative log-likelihood of the chosen sequences, a scalar or (B,). None leaves it out.
        beta: β, above 0.
        loss_type: "sigmoid", "hinge", "ipo" or "simpo".
        label_smoothing: e, the assumed share of swapped labels, for "sigmoid" and "simpo".
        cpo_alpha: the weight of nll_loss, at least 0.
        simpo_gamma: γ, the margin of "simpo".

    Returns:
        `PairLoss`: loss (B,), chosen_rewards (B,) and rejected_rewards (B,), β times the log-probability.

    Raises:
        OptionError: an option is unknown or out of range, or does not apply to the loss type.
        ShapeError: the tensors are not vectors of one length.
        DtypeError: a tensor is not floating-point.
    """
    check_cpo_options(
        beta=beta, loss_type=loss_type, label_smoothing=label_smoothing, cpo_alpha=cpo_alpha, simpo_gamma=simpo_gamma
    )
    chosen, rejected = vectors(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    delta = chosen - rejected
    if loss_type == "hinge":
        loss = torch.relu(1.0 - beta * delta)
    elif loss_type == "ipo":
        loss = (delta - 0.5 / beta) ** 2
    else:
        margin = beta * delta - simpo_gamma if loss_type == "simpo" else beta * delta
        loss = smoothed_logistic(margin, label_smoothing)
    nll = _nll(nll_loss, loss)
    if nll is not None:
        loss = loss + cpo_alpha * nll
    return PairLoss(loss, beta * chosen.detach(), beta * rejected.detach())


def simpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Simple preference optimization: the mean log-probability is the reward, with a margin between the pair.

    loss = -log σ(β (log π_w / |y_w| - log π_l / |y_l|) - γ) (Meng et al. 2024, arXiv 2405.14734).

    Args:
        chosen_logps, rejected_logps: (B,) mean log-probability per token of each sequence.
        beta: β, above 0.
        gamma: γ, the margin of the rewards. The authors' code gives it as γ / β = 0.25.
        label_smoothing: e, the assumed share of swapped labels.

    Returns:
        `PairLoss`: loss (B,), chosen_rewards (B,) and rejected_rewards (B,), β times the mean log-probability.

    Raises:
        OptionError: an option is out of range.
        ShapeError: the tensors are not vectors of one length.
        DtypeError: a tensor is not floating-point.
    """
    check_number("gamma", gamma)
    return cpo(
        chosen_logps, rejected_logps, beta=beta, loss_type="simpo", label_smoothing=label_smoothing, simpo_gamma=gamma
    )


def _check_orpo_options(beta: float) -> None:
    check_number("beta", beta, at_least=0)


def _check_simpo_options(beta: float, gamma: float, label_smoothing: float) -> None:
    check_number("gamma", gamma)
    check_cpo_options(beta=beta, loss_type="simpo", label_smoothing=label_smoothing, cpo_alpha=0.0, simpo_gamma=gamma)


class ORPOLoss(LossModule, of=orpo, holds="beta", check=_check_orpo_options):
    """`orpo` as a module that holds its options."""


class CPOLoss(
    LossModule, of=cpo, holds="beta loss_type label_smoothing cpo_alpha simpo_gamma", check=check_cpo_options
):
    """`cpo` as a module that holds its options."""


class SimPOLoss(LossModule, of=simpo, holds="beta gamma label_smoothing", check=_check_simpo_options):
    """`simpo` as a module that holds its options."""
