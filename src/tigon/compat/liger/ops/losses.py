"""Liger's two losses, computed by tigon's ops, with four results and Liger's option names.

    loss              fp32 for any dtype of the logits, unless changed by `set_loss_dtype`.
    z_loss            The part of the loss from λ · lse², without a gradient. Its mean is over the labels that are not
                      ignored, even with class weights.
    token_accuracy    Mean over the labels that are not ignored, or one number per token for reduction="none".
    predicted_tokens  (N,) int64, -1 for ignored labels.

tigon's ops do not return lse, so `return_z_loss` and `use_token_scaling` need a second pass without gradients. They
divide the z-loss by the sum of the class weights, so a mean with class weights and a z-loss needs a second pass with
gradients. All three cases are rare. The second pass avoids another implementation of the softmax.
"""

# N = tokens, H = hidden, V = vocabulary.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.errors import FlagConflict, LigerLabelError
from tigon.errors import LabelError, OptionError
from tigon.ops.losses.results import LossOutput

Four = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
LOSS_DTYPES = ("fp32", "logits", "liger")
LOSS_DTYPE_OPTION = "--loss-dtype"  # of python -m tigon.compat.liger
_loss_dtype = "fp32"
Run = Callable[..., Any]
"""run(class_weight, **options): a tigon loss with its tensors bound."""


@dataclass
class CrossEntropyOutput:
    """The result of a loss if more than the loss was requested."""

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
        """The loss alone, or a `CrossEntropyOutput` if an option requests more."""
        more = self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens
        return CrossEntropyOutput(*four) if more else four[0]


def check_options(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    """Raise `FlagConflict` for values on which Liger's constructors assert."""
    if not 0 <= label_smoothing <= 1:
        raise FlagConflict(f"label_smoothing={label_smoothing} is outside [0, 1].")
    if reduction not in ("mean", "sum", "none"):
        raise FlagConflict(f"reduction={reduction!r} is not known; choose one of mean, sum, none.")
    if softcap is not None and softcap <= 0:
        raise FlagConflict(f"softcap={softcap} must be positive; pass None for no cap.")


def no_implementation(**named: Any) -> None:
    """Refuse the choice of one of Liger's backends; tigon has one implementation per device."""
    for name, value in named.items():
        if value is not None:
            raise OptionError(f"{name}={value!r}: tigon does not have Liger's backends. Leave {name} out.")


def set_loss_dtype(choice: str) -> None:
    """Choose the dtype of the losses that Liger's classes and functions return in this process.

    PyTorch's cross entropy of bf16 logits is bf16, and `torch.allclose` refuses to compare fp32 with bf16. Losses of
    patched models are always fp32, as in transformers. Gradients do not change.

    Args:
        choice: one of three values.

            - "fp32": the default.
            - "logits": the dtype of the logits; for the fused loss, the dtype of the hidden states.
            - "liger": as in liger-kernel 0.8.5, where only the fused loss is fp32.

    Raises:
        OptionError: `choice` is not one of the three values.
    """
    global _loss_dtype
    if choice not in LOSS_DTYPES:
        raise OptionError(f"loss_dtype={choice!r} is not known; choose one of {', '.join(LOSS_DTYPES)}.")
    _loss_dtype = choice


def in_chosen_dtype(loss: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    """A loss in the dtype chosen by `set_loss_dtype`.

    Args:
        dtype: of the logits, or of the hidden states.
        fused: whether Liger returns this loss in fp32.
    """
    return loss if _loss_dtype == "fp32" or (fused and _loss_dtype == "liger") else loss.to(dtype)


def _in_chosen_dtype(four: Four, dtype: torch.dtype, fused: bool) -> Four:
    """The losses in the dtype chosen by `set_loss_dtype`; `dtype` is that of the logits."""
    if _loss_dtype == "fp32":
        return four
    loss, z_loss, *metrics = four
    loss = in_chosen_dtype(loss, dtype, fused)
    return loss, None if z_loss is None else z_loss.to(dtype), metrics[0], metrics[1]


def cross_entropy(logits: Tensor, target: Tensor, options: Options) -> Four:
    """logits (N, V), target (N,)."""

    def run(class_weight: Tensor | None, **keywords: Any) -> Any:
        return ops.cross_entropy(logits, target, weight=class_weight, **keywords)

    return _in_chosen_dtype(_four(run, target, options, token_scaling=False), logits.dtype, fused=False)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, token_scaling: bool
) -> Four:
    """hidden (N, H), weight (V, H), target (N,), bias (V,) or None.

    With `token_scaling` each token's loss is multiplied by the probability of its label, which gets no gradient
    (dynamic fine-tuning, arXiv 2508.05629).
    """

    def run(class_weight: Tensor | None, **keywords: Any) -> Any:
        return ops.linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=class_weight, **keywords)

    return _in_chosen_dtype(_four(run, target, options, token_scaling), hidden.dtype, fused=True)


def _four(run: Run, target: Tensor, options: Options, token_scaling: bool) -> Four:
    try:
        return _results(run, target, options, token_scaling)
    except LabelError as error:
        raise LigerLabelError(str(error)) from error


def _results(run: Run, target: Tensor, options: Options, token_scaling: bool) -> Four:
    statistics = _statistics(run, options) if options.return_z_loss or token_scaling else None
    token_weight = statistics[0].exp() if statistics is not None and token_scaling else None
    want_predicted = options.return_token_accuracy or options.return_predicted_tokens
    # In a mean with class weights, the z-loss has a different denominator.
    apart = options.weight is not None and options.reduction == "mean" and options.lse_square_scale != 0.0
    out: LossOutput = run(
        options.weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
        softcap=options.softcap,
        z_loss=0.0 if apart else options.lse_square_scale,
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
        out.loss + _mean_z_loss(run, target, options, token_weight) if apart else out.loss,
        z_loss,
        accuracy if options.return_token_accuracy else None,
        predicted if options.return_predicted_tokens else None,
    )


def _mean_z_loss(run: Run, target: Tensor, options: Options, token_weight: Tensor | None) -> Tensor:
    """Σ λ · lse² divided by the number of labels that are not ignored, 0-dim. Class weights of 0 remove other terms."""
    assert options.weight is not None  # without class weights the loss itself has this denominator
    total: Tensor = run(
        torch.zeros_like(options.weight), ignore_index=options.ignore_index, reduction="sum", softcap=options.softcap,
        z_loss=options.lse_square_scale, token_weight=token_weight,
    )  # fmt: skip
    return total / (target != options.ignore_index).sum().clamp(min=1)


@torch.no_grad()
def _statistics(run: Run, options: Options) -> tuple[Tensor, Tensor]:
    """log p(label) and lse², both (N,), 0 for ignored labels; computed from the loss -log p + 1 · lse²."""
    out: LossOutput = run(
        None, ignore_index=options.ignore_index, reduction="none", softcap=options.softcap, z_loss=1.0,
        outputs=("logprob",),
    )  # fmt: skip
    assert out.logprob is not None  # outputs= requests it
    return out.logprob, out.loss + out.logprob


def _reduce(per_token: Tensor, target: Tensor, options: Options) -> Tensor:
    """Apply the loss's reduction; a mean is over the labels that are not ignored."""
    if options.reduction == "none":
        return per_token
    total = per_token.sum()
    return total if options.reduction == "sum" else total / (target != options.ignore_index).sum().clamp(min=1)
