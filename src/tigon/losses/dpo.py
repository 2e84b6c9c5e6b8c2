"""Direct preference optimization (DPO) and its variants, on log-probabilities of whole sequences.

The log-ratio of a sequence is r = log π(y|x) - log π_ref(y|x). Index w stands for the chosen and l for the rejected
sequence of a pair, and Δ = r_w - r_l. Each variant is a row of `FORMULAS` and of `_FUNCTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses._checks import as_float, check_choice, check_number, vectors
from tigon.losses.common import LossFormula, LossModule, PairLoss, smoothed_logistic
from tigon.losses.numerics import exp_bounded

DPOLossType = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
]

FORMULAS: dict[str, LossFormula] = {
    "sigmoid": LossFormula("-(1-e) log σ(βΔ) - e log σ(-βΔ)", ("2305.18290",)),
    "sigmoid_norm": LossFormula("as sigmoid, with r_w / |y_w| and r_l / |y_l|", ("2411.15124",)),
    "hinge": LossFormula("max(0, 1 - βΔ)", ("2305.10425", "2309.06657")),
    "ipo": LossFormula("(Δ - 1/(2β))², with r / |y| if lengths are given", ("2310.12036",)),
    "robust": LossFormula("(-(1-e) log σ(βΔ) + e log σ(-βΔ)) / (1 - 2e)", ("2403.00409",)),
    "exo_pair": LossFormula("σ(βΔ) (log σ(βΔ) - log(1-e)) + σ(-βΔ) (log σ(-βΔ) - log e)", ("2402.00856",)),
    "nca_pair": LossFormula("-log σ(βr_w) - ½ log σ(-βr_w) - ½ log σ(-βr_l)", ("2402.05369",)),
    "bco_pair": LossFormula("-log σ(βr_w) - log σ(-βr_l)", ("2404.04656",)),
    "sppo_hard": LossFormula("(r_w - 1/(2β))² + (r_l + 1/(2β))²", ("2405.00675",)),
    "aot": LossFormula("as sigmoid, with Δ = sort(log π_w - log π_l) - sort(the same of π_ref)", ("2406.05882",)),
    "aot_unpaired": LossFormula("as sigmoid, with Δ = sort(r_w) - sort(r_l)", ("2406.05882",)),
    "apo_zero": LossFormula("σ(-βr_w) + σ(βr_l)", ("2408.06266",)),
    "apo_down": LossFormula("σ(βr_w) + σ(-βΔ)", ("2408.06266",)),
    "discopop": LossFormula("-σ(-βΔ/τ) log σ(βΔ) + σ(βΔ/τ) exp(-βΔ)", ("2406.08414",)),
}
USE_LABEL_SMOOTHING = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")


@dataclass(frozen=True)
class _Pairs:
    """(B,) values of each pair, and the options of the variants."""

    chosen: Tensor
    """r_w"""
    rejected: Tensor
    """r_l"""
    policy_margin: Tensor
    ref_margin: Tensor
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def margin(self) -> Tensor:
        """βΔ"""
        return self.beta * (self.chosen - self.rejected)


def _exo_pair(p: _Pairs) -> Tensor:
    e, margin = p.label_smoothing, p.margin
    won = torch.sigmoid(margin) * (F.logsigmoid(margin) - math.log1p(-e))
    return won + torch.sigmoid(-margin) * (F.logsigmoid(-margin) - math.log(e))


def _robust(p: _Pairs) -> Tensor:
    e = p.label_smoothing
    return (e * F.logsigmoid(-p.margin) - (1.0 - e) * F.logsigmoid(p.margin)) / (1.0 - 2.0 * e)


def _nca_pair(p: _Pairs) -> Tensor:
    chosen, rejected = p.beta * p.chosen, p.beta * p.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _discopop(p: _Pairs) -> Tensor:
    logistic = torch.sigmoid(-p.margin / p.discopop_tau) * -F.logsigmoid(p.margin)
    # σ(m/τ) exp(-m) as one exponential, because the second factor overflows where the product is at most 1.
    return logistic + exp_bounded(F.logsigmoid(p.margin / p.discopop_tau) - p.margin)


def _sorted_logistic(first: Tensor, second: Tensor, p: _Pairs) -> Tensor:
    return smoothed_logistic(p.beta * (first.sort().values - second.sort().values), p.label_smoothing)


_FUNCTIONS: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: smoothed_logistic(p.margin, p.label_smoothing),
    "sigmoid_norm": lambda p: smoothed_logistic(p.margin, p.label_smoothing),
    "hinge": lambda p: torch.relu(1.0 - p.margin),
    "ipo": lambda p: (p.chosen - p.rejected - 0.5 / p.beta) ** 2,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda p: -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected),
    "sppo_hard": lambda p: (p.chosen - 0.5 / p.beta) ** 2 + (p.rejected + 0.5 / p.beta) ** 2,
    "aot": lambda p: _sorted_logistic(p.policy_margin, p.ref_margin, p),
    "aot_unpaired": lambda p: _sorted_logistic(p.chosen, p.rejected, p),
    "apo_zero": lambda p: torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.margin),
    "discopop": _discopop,
}


def check_dpo_options(
    *,
    beta: float,
    loss_type: str,
    label_smoothing: float,
    reference_free: bool,
    discopop_tau: float,
) -> None:
    """Raise `OptionError` for an option of `dpo`, or a combination of them, that is not valid."""
    check_choice("loss_type", loss_type, FORMULAS)
    check_number("beta", beta, above=0)
    check_number("discopop_tau", discopop_tau, above=0)
    check_number("label_smoothing", label_smoothing, at_least=0, at_most=1)
    if not isinstance(reference_free, bool):
        raise OptionError(f"reference_free={reference_free!r} must be True or False.")
    if label_smoothing and loss_type not in USE_LABEL_SMOOTHING:
        raise OptionError(
            f"label_smoothing={label_smoothing} does not apply to loss_type={loss_type!r}; "
            f"it applies to {', '.join(USE_LABEL_SMOOTHING)}."
        )
    if loss_type == "robust" and label_smoothing >= 0.5:
        raise OptionError(f"label_smoothing={label_smoothing} must be below 0.5 for loss_type='robust'.")
    if loss_type == "exo_pair" and not 0.0 < label_smoothing < 1.0:
        raise OptionError(
            f"label_smoothing={label_smoothing} must be above 0 and below 1 for loss_type='exo_pair', "
            "whose paper recommends 1e-3."
        )


def dpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    reference_free: bool = False,
    discopop_tau: float = 0.05,
) -> PairLoss:
    """Direct preference optimization: the chosen sequence shall gain more log-probability than the rejected one.

    loss = -log σ(β ((log π_w - log π_ref,w) - (log π_l - log π_ref,l))) for "sigmoid" (Rafailov et al. 2023, arXiv
    2305.18290). docs/losses.md has the formula and the paper of every loss type. Log-ratios of ±500 and beyond give
    finite losses and gradients.

    Args:
        chosen_logps, rejected_logps: (B,) log-probability of each sequence, summed over its tokens.
        ref_chosen_logps, ref_rejected_logps: (B,) the same under the reference model.
        beta: β, above 0. For "ipo" the paper's τ, for "sppo_hard" 1 / η.
        loss_type: a row of the table in docs/losses.md.
        label_smoothing: e, the assumed share of swapped labels. "sigmoid" with e is conservative DPO.
        chosen_lengths, rejected_lengths: (B,) tokens of each sequence; lengths below 1 count as 1. "sigmoid_norm"
            divides the log-ratios by them, and so does "ipo" if they are given. The rewards are not divided.
        reference_free: the reference log-probabilities are 0.
        discopop_tau: τ of "discopop".

    Returns:
        `PairLoss`: loss (B,) of each pair, chosen_rewards (B,) = β r_w and rejected_rewards (B,) = β r_l. With "aot"
        and "aot_unpaired" an entry of the loss belongs to a rank of the sorted batch instead of a pair.

    Raises:
        OptionError: an option is unknown or out of range, does not apply to the loss type, or lacks its tensors.
        ShapeError: the tensors are not vectors of one length.
        DtypeError: a log-probability is not a floating-point tensor.
    """
    check_dpo_options(
        beta=beta,
        loss_type=loss_type,
        label_smoothing=label_smoothing,
        reference_free=reference_free,
        discopop_tau=discopop_tau,
    )
    chosen_logps, rejected_logps = vectors(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    if reference_free:
        if ref_chosen_logps is not None or ref_rejected_logps is not None:
            raise OptionError("reference_free=True takes no ref_chosen_logps and ref_rejected_logps; leave them out.")
        ref_chosen_logps = ref_rejected_logps = torch.zeros_like(chosen_logps)
    if ref_chosen_logps is None or ref_rejected_logps is None:
        raise OptionError("Pass ref_chosen_logps and ref_rejected_logps, or reference_free=True.")
    chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps = vectors(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    chosen, rejected = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
    chosen_rewards, rejected_rewards = beta * chosen.detach(), beta * rejected.detach()

    if (chosen_lengths is None) != (rejected_lengths is None):
        raise OptionError("Pass both of chosen_lengths and rejected_lengths, or neither.")
    if loss_type in ("sigmoid_norm", "ipo") and chosen_lengths is not None and rejected_lengths is not None:
        chosen = chosen / _lengths("chosen_lengths", chosen_lengths, chosen)
        rejected = rejected / _lengths("rejected_lengths", rejected_lengths, rejected)
    elif loss_type == "sigmoid_norm":
        raise OptionError("loss_type='sigmoid_norm' requires chosen_lengths and rejected_lengths.")
    pairs = _Pairs(
        chosen,
        rejected,
        chosen_logps - rejected_logps,
        ref_chosen_logps - ref_rejected_logps,
        beta,
        label_smoothing,
        discopop_tau,
    )
    return PairLoss(_FUNCTIONS[loss_type](pairs), chosen_rewards, rejected_rewards)


def _lengths(name: str, lengths: Tensor, like: Tensor) -> Tensor:
    if lengths.shape != like.shape:
        raise ShapeError(f"{name} is {tuple(lengths.shape)}; it must be {tuple(like.shape)}.")
    return as_float(name, lengths if lengths.is_floating_point() else lengths.to(like.dtype)).clamp(min=1)


class DPOLoss(
    LossModule,
    of=dpo,
    holds="beta loss_type label_smoothing reference_free discopop_tau",
    check=check_dpo_options,
):
    """`dpo` as a module that holds its options."""
