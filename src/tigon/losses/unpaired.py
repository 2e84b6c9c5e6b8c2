"""Losses of single sequences with a label, desirable or not: KTO, APO-zero unpaired and BCO."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses._checks import as_float, check_choice, check_number, same_shape, vectors
from tigon.losses.common import LossFormula, LossModule

KTOLossType = Literal["kto", "apo_zero_unpaired"]

KTO_FORMULAS: dict[str, LossFormula] = {
    "kto": LossFormula("λ_D σ(-β(r - z)) if desirable, else λ_U σ(β(r - z)); z = max(0, KL)", ("2402.01306",)),
    "apo_zero_unpaired": LossFormula("λ_D σ(-βr) if desirable, else λ_U σ(βr)", ("2408.06266",)),
}
BCO_FORMULAS: dict[str, LossFormula] = {
    "bco": LossFormula("-λ_D log σ(βr - δ) if desirable, else -λ_U log σ(δ - βr)", ("2404.04656",)),
}


class UnpairedLoss(NamedTuple):
    """A loss over labelled sequences, and the rewards that trainers log.

    Attributes:
        loss: (B,) loss of each sequence; the mean is the batch's.
        rewards: (B,) implicit rewards β r, without gradient.
    """

    loss: Tensor
    rewards: Tensor


def kto_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """KTO's estimate of the KL divergence from the reference model, from mismatched prompts and completions.

    z = max(0, mean(log π - log π_ref)) over completions that belong to other prompts of the batch.

    Args:
        logps, ref_logps: (B,) log-probabilities of the mismatched completions.

    Returns:
        A scalar without gradient; 0 for an empty batch. With several processes, average the log-ratios of all of them
        before the maximum instead.

    Raises:
        ShapeError: the tensors are not vectors of one length.
        DtypeError: a tensor is not floating-point.
    """
    logps, ref_logps = vectors(logps=logps, ref_logps=ref_logps)
    return ((logps - ref_logps).detach().sum() / max(len(logps), 1)).clamp(min=0)


def _signs(labels: Tensor, like: Tensor) -> Tensor:
    """+1 for a desirable sequence and -1 for another."""
    same_shape(like.shape, labels=labels)
    if labels.is_floating_point() or labels.is_complex():
        raise OptionError(f"labels is {labels.dtype}; pass bool or integers, True or 1 for a desirable sequence.")
    return torch.where(labels > 0, 1.0, -1.0).to(like.dtype)


def _weights(signs: Tensor, desirable_weight: float, undesirable_weight: float) -> Tensor:
    return torch.where(signs > 0, desirable_weight, undesirable_weight).to(signs.dtype)


def _scalar(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    """A number or a tensor of one element as a scalar tensor without gradient."""
    if not isinstance(value, Tensor):
        return like.new_tensor(check_number(name, value))
    if value.numel() != 1:
        raise ShapeError(f"{name} is {tuple(value.shape)}; it must be one number for the batch.")
    return as_float(name, value).detach().reshape(())


def check_kto_options(
    *, beta: float, desirable_weight: float, undesirable_weight: float, loss_type: str = "kto"
) -> None:
    """Raise `OptionError` for an option of `kto` or `bco` that is not valid."""
    check_choice("loss_type", loss_type, KTO_FORMULAS)
    check_number("beta", beta, above=0)
    check_number("desirable_weight", desirable_weight, at_least=0)
    check_number("undesirable_weight", undesirable_weight, at_least=0)


def kto(
    logps: Tensor,
    ref_logps: Tensor,
    labels: Tensor,
    kl: Tensor | float | None = None,
    *,
    beta: float = 0.1,
    loss_type: KTOLossType = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> UnpairedLoss:
    """Kahneman-Tversky optimization, from sequences that are each desirable or undesirable.

    With r = log π - log π_ref: λ_D σ(-β (r - z)) for a desirable sequence, λ_U σ(β (r - z)) for another (Ethayarajh et
    al. 2024, arXiv 2402.01306). "apo_zero_unpaired" has z = 0 (D'Oosterlinck et al. 2024, arXiv 2408.06266).

    Args:
        logps, ref_logps: (B,) log-probability of each sequence under the model and the reference, summed over tokens.
        labels: (B,) bool or integers: True or positive for a desirable sequence.
        kl: z, one number or tensor of one element, such as `kto_kl` gives. No gradient flows into it.
        beta: β, above 0.
        loss_type: "kto" or "apo_zero_unpaired".
        desirable_weight, undesirable_weight: λ_D and λ_U.

    Returns:
        `UnpairedLoss`: loss (B,) and rewards (B,) = β r.

    Raises:
        OptionError: an option is unknown or out of range, labels are not bool or integers, or kl is missing for "kto"
            or given for "apo_zero_unpaired".
        ShapeError: the tensors are not vectors of one length, or kl has more than one element.
        DtypeError: a log-probability is not a floating-point tensor.
    """
    check_kto_options(
        beta=beta, loss_type=loss_type, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    logps, ref_logps = vectors(logps=logps, ref_logps=ref_logps)
    signs = _signs(labels, logps)
    log_ratio = logps - ref_logps
    if loss_type == "kto":
        if kl is None:
            raise OptionError("loss_type='kto' requires kl, such as tigon.losses.kto_kl gives.")
        margin = log_ratio - _scalar("kl", kl, logps)
    else:
        if kl is not None:
            raise OptionError(f"loss_type={loss_type!r} has no KL term; leave kl out.")
        margin = log_ratio
    loss = _weights(signs, desirable_weight, undesirable_weight) * torch.sigmoid(-beta * signs * margin)
    return UnpairedLoss(loss, beta * log_ratio.detach())


def bco(
    logps: Tensor,
    ref_logps: Tensor,
    labels: Tensor,
    delta: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> UnpairedLoss:
    """Binary classifier optimization: a classifier whose logit is the reward tells desirable sequences from others.

    With r = log π - log π_ref: -log σ(β r - δ) for a desirable sequence, -log σ(δ - β r) for another (Jung et al. 2024,
    arXiv 2404.04656). Trainers take the running mean of the rewards β r as δ.

    Args:
        logps, ref_logps: (B,) log-probability of each sequence under the model and the reference, summed over tokens.
        labels: (B,) bool or integers: True or positive for a desirable sequence.
        delta: δ, one number or tensor of one element. No gradient flows into it.
        beta: β, above 0.
        desirable_weight, undesirable_weight: λ_D and λ_U.

    Returns:
        `UnpairedLoss`: loss (B,) and rewards (B,) = β r.

    Raises:
        OptionError: an option is out of range, or labels are not bool or integers.
        ShapeError: the tensors are not vectors of one length, or delta has more than one element.
        DtypeError: a log-probability is not a floating-point tensor.
    """
    check_kto_options(beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    logps, ref_logps = vectors(logps=logps, ref_logps=ref_logps)
    signs = _signs(labels, logps)
    log_ratio = logps - ref_logps
    margin = beta * log_ratio - _scalar("delta", delta, logps)
    loss = -F.logsigmoid(signs * margin) * _weights(signs, desirable_weight, undesirable_weight)
    return UnpairedLoss(loss, beta * log_ratio.detach())


class KTOLoss(LossModule, of=kto, holds="beta loss_type desirable_weight undesirable_weight", check=check_kto_options):
    """`kto` as a module that holds its options."""


class BCOLoss(LossModule, of=bco, holds="beta desirable_weight undesirable_weight", check=check_kto_options):
    """`bco` as a module that holds its options."""
