"""Liger's two losses over tigon's: four results, Liger's names for the options.

    loss              fp32, whatever the input's dtype (Liger: the input's)
    z_loss            what λ · lse² contributes to the loss, by the loss's own reduction; no gradient of its own
    token_accuracy    mean over the labels that are not ignored, or one number a token for reduction="none"
    predicted_tokens  (N,) int64, -1 where the label is ignored

tigon's ops return no lse, so `return_z_loss` and `use_token_scaling` cost a second pass without gradients. Both are
rare, and a pass through the op keeps one implementation of the softmax.
"""

# N = tokens, H = hidden, V = vocabulary.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.errors import FlagConflict
from tigon.errors import OptionError
from tigon.ops._loss import LossOutput

Four = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Run = Callable[..., Any]
"""run(class_weight, **options): a tigon loss with its tensors bound."""


@dataclass
class CrossEntropyOutput:
    """What a loss returns when more than the loss was asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class Options(NamedTuple):
    """Liger's options of both losses, in its order; `weight` is the class weight."""

    weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def pack(self, four: Four) -> Tensor | CrossEntropyOutput:
        """The loss alone, or a `CrossEntropyOutput` where an option asks for more."""
        more = self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens
        return CrossEntropyOutput(*four) if more else four[0]


def check_options(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    """Raise `FlagConflict` where Liger's constructors assert."""
    if not 0 <= label_smoothing <= 1:
        raise FlagConflict(f"label_smoothing={label_smoothing} is outside [0, 1].")
    if reduction not in ("mean", "sum", "none"):
        raise FlagConflict(f"reduction={reduction!r} is not known; choose one of mean, sum, none.")
    if softcap is not None and softcap <= 0:
        raise FlagConflict(f"softcap={softcap} must be positive; pass None for no cap.")


def no_implementation(**named: Any) -> None:
    """Refuse the choice of one of Liger's backends; tigon has one implementation a device."""
    for name, value in named.items():
        if value is not None:
            raise OptionError(f"{name}={value!r}: Liger's backends do not exist here. Leave {name} out.")


def cross_entropy(logits: Tensor, target: Tensor, options: Options) -> Four:
    """logits (N, V), target (N,)."""

    def run(class_weight: Tensor | None, **keywords: Any) -> Any:
        return ops.cross_entropy(logits, target, weight=class_weight, **keywords)

    return _four(run, target, options, token_scaling=False)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, token_scaling: bool
) -> Four:
    """hidden (N, H), weight (V, H), target (N,), bias (V,) or None.

    With `token_scaling` each token's loss is multiplied by the probability of its label, which gets no gradient
    (dynamic fine-tuning, arXiv 2508.05629).
    """

    def run(class_weight: Tensor | None, **keywords: Any) -> Any:
        return ops.linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=class_weight, **keywords)

    return _four(run, target, options, token_scaling)


def _four(run: Run, target: Tensor, options: Options, token_scaling: bool) -> Four:
    statistics = _statistics(run, options) if options.return_z_loss or token_scaling else None
    token_weight = statistics[0].exp() if statistics is not None and token_scaling else None
    want_predicted = options.return_token_accuracy or options.return_predicted_tokens
    out: LossOutput = run(
        options.weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
        softcap=options.softcap,
        z_loss=options.lse_square_scale,
        token_weight=token_weight,
        outputs=("accuracy", "predicted") if want_predicted else ("logprob",),
    )
    z_loss = accuracy = predicted = None
    if options.return_z_loss and statistics is not None:
        z_N = options.lse_square_scale * statistics[1] * (1.0 if token_weight is None else token_weight)
        z_loss = _reduce(z_N, target, options)
    if out.predicted is not None:
        ignored = target == options.ignore_index
        per_token = ((out.predicted == target) & ~ignored).float()
        accuracy = per_token if options.reduction == "none" else out.accuracy
        predicted = out.predicted.masked_fill(ignored, -1)
    return (
        out.loss,
        z_loss,
        accuracy if options.return_token_accuracy else None,
        predicted if options.return_predicted_tokens else None,
    )


@torch.no_grad()
def _statistics(run: Run, options: Options) -> tuple[Tensor, Tensor]:
    """log p(label) and lse², both (N,), 0 where ignored: -log p + 1 · lse² is a loss that tigon computes."""
    out: LossOutput = run(
        None, ignore_index=options.ignore_index, reduction="none", softcap=options.softcap, z_loss=1.0,
        outputs=("logprob",),
    )  # fmt: skip
    assert out.logprob is not None  # it was asked for
    return out.logprob, out.loss + out.logprob


def _reduce(per_token: Tensor, target: Tensor, options: Options) -> Tensor:
    """By the loss's reduction and denominator."""
    if options.reduction == "none":
        return per_token
    if options.reduction == "sum":
        return per_token.sum()
    valid = target != options.ignore_index
    count = valid if options.weight is None else options.weight[target.clamp(min=0).long()] * valid
    total: Tensor = count.sum()
    return torch.where(total == 0, 0.0, per_token.sum() / total)
