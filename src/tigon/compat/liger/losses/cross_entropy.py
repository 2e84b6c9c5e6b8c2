"""Liger's two cross entropies, computed by tigon's ops, with four results and Liger's option names.

    loss              fp32 for any dtype of the logits, unless changed by `set_loss_dtype`.
    z_loss            The part of the loss from λ · lse², without a gradient. Its mean is over the labels that are not
                      ignored, even with class weights.
    token_accuracy    Mean over the labels that are not ignored, or one number per token for reduction="none".
    predicted_tokens  (N,) int64, -1 for ignored labels.

tigon's ops do not return lse, so `return_z_loss` and `use_token_scaling` need a second pass without gradients. They
divide the z-loss by the sum of the class weights, so a mean with class weights and a z-loss needs a second pass with
gradients. All three cases are rare. The second pass avoids another implementation of the softmax.

`lse_square_scale` is tigon's `z_loss`. `accum_dtype` and `chunk_mem_const` have no effect: sums are always fp32, and
tigon limits a chunk by bytes.
"""

# N = tokens, H = hidden, V = vocabulary.

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.errors import FlagConflict, LigerLabelError, no_implementation, no_reduce
from tigon.compat.liger.loss_dtype import in_chosen_dtype
from tigon.compat.liger.rows import form, function, module
from tigon.errors import LabelError

Four = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Run = Callable[..., Any]
"""run(class_weight, **options): a tigon loss with its tensors bound."""


@dataclass
class CrossEntropyOutput:
    """The result of a loss if more than the loss was requested."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class _Options(NamedTuple):
    """Liger's options of both losses; `weight` is the class weight."""

    weight: Tensor | None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False


def _check_options(label_smoothing: float, reduction: str, softcap: float | None, **others: object) -> None:
    """Raise `FlagConflict` for values on which Liger's constructors assert."""
    if not 0 <= label_smoothing <= 1:
        raise FlagConflict(f"label_smoothing={label_smoothing} is outside [0, 1].")
    if reduction not in ("mean", "sum", "none"):
        raise FlagConflict(f"reduction={reduction!r} is not known; choose one of mean, sum, none.")
    if softcap is not None and softcap <= 0:
        raise FlagConflict(f"softcap={softcap} must be positive; pass None for no cap.")


# --- the losses -------------------------------------------------------------------------------------------------------


def cross_entropy(_input: Tensor, target: Tensor, **options: Any) -> Four:
    """(loss, z_loss, token_accuracy, predicted_tokens) of logits (N, V); the last three are None unless requested."""

    def run(class_weight: Tensor | None, **keywords: Any) -> Any:
        return ops.cross_entropy(_input, target, weight=class_weight, **keywords)

    four = _four(run, target, _Options(**options), token_scaling=False)
    return _in_chosen_dtype(four, _input.dtype, fused=False)


def linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    *,
    use_token_scaling: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_mem_const: int = 1,
    ce_impl: object = None,
    ce_mode: object = None,
    **options: Any,
) -> Four:
    """The four results of `cross_entropy` for `_input @ weight.T + bias`, without the logits.

    With `use_token_scaling` each token's loss is multiplied by the probability of its label, which gets no gradient
    (dynamic fine-tuning, arXiv 2508.05629).
    """
    no_implementation(ce_impl=ce_impl, ce_mode=ce_mode)

    def run(class_weight: Tensor | None, **keywords: Any) -> Any:
        return ops.linear_cross_entropy(_input, weight, target, bias=bias, class_weight=class_weight, **keywords)

    four = _four(run, target, _Options(ce_weight, **options), use_token_scaling)
    return _in_chosen_dtype(four, _input.dtype, fused=True)


def _in_chosen_dtype(four: Four, dtype: torch.dtype, fused: bool) -> Four:
    """The losses in the dtype chosen by `set_loss_dtype`; `dtype` is that of the logits."""
    loss, z_loss, *metrics = four
    z_loss = None if z_loss is None else in_chosen_dtype(z_loss, dtype, fused=False)
    return in_chosen_dtype(loss, dtype, fused), z_loss, metrics[0], metrics[1]


def _four(run: Run, target: Tensor, options: _Options, token_scaling: bool) -> Four:
    try:
        return _results(run, target, options, token_scaling)
    except LabelError as error:
        raise LigerLabelError(str(error)) from error


def _results(run: Run, target: Tensor, options: _Options, token_scaling: bool) -> Four:
    statistics = _statistics(run, options) if options.return_z_loss or token_scaling else None
    token_weight = statistics[0].exp() if statistics is not None and token_scaling else None
    want_predicted = options.return_token_accuracy or options.return_predicted_tokens
    # In a mean with class weights, the z-loss has a different denominator.
    apart = options.weight is not None and options.reduction == "mean" and options.lse_square_scale != 0.0
    out = run(
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


def _mean_z_loss(run: Run, target: Tensor, options: _Options, token_weight: Tensor | None) -> Tensor:
    """Σ λ · lse² divided by the number of labels that are not ignored, 0-dim. Class weights of 0 remove other terms."""
    assert options.weight is not None  # without class weights the loss itself has this denominator
    total: Tensor = run(
        torch.zeros_like(options.weight),
        ignore_index=options.ignore_index,
        reduction="sum",
        softcap=options.softcap,
        z_loss=options.lse_square_scale,
        token_weight=token_weight,
    )
    return total / (target != options.ignore_index).sum().clamp(min=1)


@torch.no_grad()
def _statistics(run: Run, options: _Options) -> tuple[Tensor, Tensor]:
    """log p(label) and lse², both (N,), 0 for ignored labels; computed from the loss -log p + 1 · lse²."""
    out = run(
        None,
        ignore_index=options.ignore_index,
        reduction="none",
        softcap=options.softcap,
        z_loss=1.0,
        outputs=("logprob",),
    )
    assert out.logprob is not None  # outputs= requests it
    return out.logprob, out.loss + out.logprob


def _reduce(per_token: Tensor, target: Tensor, options: _Options) -> Tensor:
    """Apply the loss's reduction; a mean is over the labels that are not ignored."""
    if options.reduction == "none":
        return per_token
    total = per_token.sum()
    return total if options.reduction == "sum" else total / (target != options.ignore_index).sum().clamp(min=1)


def _packed(call: Callable[..., Four]) -> Callable[..., Tensor | CrossEntropyOutput]:
    """The loss alone, or a `CrossEntropyOutput` if an option requests more."""

    @functools.wraps(call)
    def run(size_average: object = None, reduce: object = None, **values: object) -> Tensor | CrossEntropyOutput:
        no_reduce(None, size_average=size_average, reduce=reduce)
        four = call(**values)
        more = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
        return CrossEntropyOutput(*four) if any(values[name] for name in more) else four[0]

    return run


# --- Liger's names ----------------------------------------------------------------------------------------------------

_METRICS = "return_token_accuracy=False return_predicted_tokens=False"
_COMMON = "ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None return_z_loss=False"
_FUSED = f"ce_weight=None {_COMMON} accum_dtype=None use_token_scaling=False {_METRICS}"

_of_logits = form(cross_entropy, f"_input target weight! {_COMMON} {_METRICS}")
LigerCrossEntropyFunction = function("LigerCrossEntropyFunction", _of_logits)
liger_cross_entropy = form(
    _packed(_of_logits),
    "input:_input target weight=None size_average=None ignore_index reduce=None reduction label_smoothing "
    "lse_square_scale softcap return_z_loss return_token_accuracy return_predicted_tokens",
)
LigerCrossEntropyLoss = module(
    "LigerCrossEntropyLoss",
    _packed(_of_logits),
    holds=f"weight=None {_COMMON} {_METRICS}",
    takes="_input target",
    check=_check_options,
)

_of_heads = form(
    linear_cross_entropy,
    f"_input weight target bias {_FUSED} ce_impl ce_mode chunk_mem_const",
)
LigerFusedLinearCrossEntropyFunction = function("LigerFusedLinearCrossEntropyFunction", _of_heads)
liger_fused_linear_cross_entropy = form(_packed(_of_heads), f"input:_input weight target bias {_FUSED} chunk_mem_const")
LigerFusedLinearCrossEntropyLoss = module(
    "LigerFusedLinearCrossEntropyLoss",
    _packed(_of_heads),
    holds=_FUSED,
    takes="lin_weight:weight _input target bias",
    check=_check_options,
)
