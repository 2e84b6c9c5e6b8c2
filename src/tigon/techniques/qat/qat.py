"""`train.qat`: the forward pass computes with weights rounded as `tigon export --format` rounds them.

Rounding has no useful gradient, so the backward pass treats it as the identity (straight-through, arXiv 1308.3432).

With adapters, what is rounded is the merged weight W + s B A, because that is what an export rounds. The adapter's own
product is then computed for its gradient alone, from the rounded input, and adds nothing to the result. Its gradient is
that of the merged weight, without a matrix of the weight's shape.

torchao 0.18 rounds bf16 weights to the same numbers in int4 and FP8. Its modules know no adapters, the gradient of its
FP8 goes through the scale, and its MXFP4 is a prototype, so tigon rounds by `formats.py`, as its export does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.lora import DIFFERENCE_INITS, EXPERTS
from tigon.techniques.keys.settings import Settings
from tigon.techniques.qat.formats import FORMATS, WeightFormat, rounded_input, rounded_layers
from tigon.techniques.technique import Declaration, RunInfo, Spans, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "train.qat"
NONE = "none"
EXPORTED = torch.bfloat16
"""The dtype of scales and of dequantised weights in an export, whatever the run's precision."""


class _StraightThrough(torch.autograd.Function):
    """Returns `rounded`; the gradient goes to x unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its rounded weight. Parameters and their names are those of the layer."""

    chosen: WeightFormat
    group: int | None

    def forward(self, x: Tensor) -> Tensor:
        weight = _StraightThrough.apply(self.weight, rounded(self.weight, self.chosen, self.group))
        return _product(_entering(x, self.chosen), weight, self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@torch.no_grad()
def rounded(weight: Tensor, chosen: WeightFormat, group: int | None) -> Tensor:
    """The weight that a reader of the export computes with, in the dtype of `weight`."""
    return chosen.codes(weight.to(EXPORTED), group).weight().to(weight.dtype)


def _entering(x: Tensor, chosen: WeightFormat) -> Tensor:
    if not chosen.rounds_inputs:
        return x
    with torch.no_grad():
        near = rounded_input(x)
    entering: Tensor = _StraightThrough.apply(x, near)
    return entering


def _with_rounded_merge(base: type[nn.Module]) -> type[nn.Module]:
    """A class of PEFT's LoRA layer that computes with the rounded sum of weight and adapters."""

    def forward(self: Any, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        layer: RoundedLinear = self.base_layer
        entering = _entering(x, layer.chosen)
        active = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        y = _product(entering, rounded(_merged(self, active), layer.chosen, layer.group), layer.bias)
        if torch.is_grad_enabled():
            for name in active:
                a, b = self.lora_A[name], self.lora_B[name]
                z = b(a(entering.detach().to(a.weight.dtype))) * self.scaling[name]
                y = y + (z - z.detach()).to(y.dtype)  # exactly 0
        return y

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


@torch.no_grad()
def _merged(module: Any, active: list[str]) -> Tensor:
    """The weight as PEFT merges it: sums in fp32, rounded once to the weight's dtype."""
    weight: Tensor = module.base_layer.weight
    with torch.autocast(weight.device.type, enabled=False):
        for name in active:
            weight = (weight.float() + module.get_delta_weight(name).float()).to(weight.dtype)
    return weight


def round_layers(model: nn.Module, chosen: WeightFormat) -> Callable[[], None]:
    """Let the decoder's linear layers compute with rounded weights, with or without adapters, on this instance only.

    Returns:
        A function that restores the layers.

    Raises:
        RecipeError: The model has experts, no linear layers, or rows that the format does not divide.
    """
    try:
        layers, group = rounded_layers(model, chosen)
    except ValueError as error:
        raise RecipeError(f"{KEY} is {chosen.name}, but {error}; set {KEY}: {NONE}") from None
    before: list[tuple[nn.Module, type[nn.Module]]] = [(module, type(module)) for module in layers.values()]
    for module in layers.values():
        module.__class__ = RoundedLinear
        vars(module).update(chosen=chosen, group=group)
    adapted = [m for m in model.modules() if hasattr(m, "lora_A") and _is_rounded(getattr(m, "base_layer", None))]
    classes = {base: _with_rounded_merge(base) for base in {type(module) for module in adapted}}
    before += [(module, type(module)) for module in adapted]
    for adapter in adapted:
        adapter.__class__ = classes[type(adapter)]

    def undo() -> None:
        for changed, base in before:
            changed.__class__ = base

    return undo


def _is_rounded(module: object) -> bool:
    return isinstance(module, RoundedLinear)


def _model(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    round_layers(model, FORMATS[settings.train.qat])
    return model


def _trace(model: PreTrainedModel, settings: Settings, spans: Spans) -> None:
    if settings.train.qat != NONE:
        round_layers(model, FORMATS[settings.train.qat])


def _not_with(condition: Condition, reason: str, instead: str) -> Exclusion:
    return Exclusion(
        when=(Condition(KEY, "is not", NONE), condition),
        reason=reason,
        instead=f"{instead}, or {KEY}: {NONE}",
        source="docs/techniques/precision.md",
    )


_NO_SUM = "what is rounded is the sum of a weight and its adapters, and this is no such sum"
_REFUSED: Mapping[Condition, tuple[str, str]] = {
    Condition("train.precision", "is", "fp8"): ("both would round the weights", "train.precision: amp-bf16"),
    Condition("lora.quantize", "is", True): (
        "the frozen weights would be rounded twice, and the export rounds those of the checkpoint",
        "lora.quantize: false",
    ),
    Condition("lora.dropout", "is above", 0): (_NO_SUM, "lora.dropout: 0"),
    Condition("lora.dora", "is", True): (_NO_SUM, "lora.dora: false"),
    Condition("lora.targets", "includes", EXPERTS): (_NO_SUM, "lora.targets without experts"),
    Condition("lora.init", "starts with", DIFFERENCE_INITS): (
        "the saved adapters are converted, so an export would sum and round other numbers",
        "lora.init: default",
    ),
    Condition("lora.base_offload", "is", True): (
        "tigon has not tried weights that are replaced during a step",
        "lora.base_offload: false",
    ),
    Condition("train.gradient_accumulation_fusion", "is", True): (
        "the product that adds to `.grad` reads the weight before it is rounded",
        "train.gradient_accumulation_fusion: false",
    ),
    Condition("train.cuda_graphs", "is", True): ("tigon has not tried both", "train.cuda_graphs: false"),
    Condition("sharding.zero", "is at least", 1): ("DeepSpeed manages the weights", "sharding.gpus with zero: 0"),
    Condition("sharding.fsdp", "is", True): ("tigon has not tried weights that FSDP2 divides", "sharding.gpus alone"),
}

DECLARATION = Declaration(
    labels={KEY: "rounded to {}"},
    techniques=(
        Technique(
            name="qat",
            effect_on_result="The forward pass computes with the decoder layers' weights rounded to 4 or 8 bits, and "
            "with `fp8` with rounded inputs too. The trained weights keep their dtype.",
            recipe={KEY: "int4"},
            chosen=(Condition(KEY, "is not", NONE),),
            change_rank=6,
            model=_model,
            trace=_trace,
        ),
    ),
    exclusions=tuple(_not_with(condition, *words) for condition, words in _REFUSED.items()),
    last=True,
)
