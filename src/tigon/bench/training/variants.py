"""The variants of a training step: whose code runs, what is recomputed in the backward pass, and the micro-batch.

A variant is written `CODE:RECOMPUTED[@MICRO_BATCH]`. `liger:none@fits` is Liger without recomputation, at the largest
micro-batch that fits the memory limit. Each variant has its own copy of the model, with shared parameters.

`benchmarks/training` of the repository has more codes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon.errors import OptionError
from tigon.models.kv_cache import without_cache
from tigon.models.patch import patch
from tigon.planner import model_checkpoint
from tigon.techniques.checkpointing import layer_function
from tigon.techniques.checkpointing.layer_checkpointing import is_by_layer
from tigon.techniques.keys.settings import complaint_about
from tigon.techniques.keys.train import STATES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHOLE, FITS, AUTO = "whole", "fits", "auto"
Loss = Callable[[Tensor, Tensor], Tensor]
"""(ids of a micro-batch, number of learned tokens of the whole batch) -> its share of the mean loss."""


@dataclass(frozen=True)
class Ready:
    """A variant's code, ready to run."""

    loss: Loss
    active: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Has to be entered around every step."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """A library that trains the model."""

    name: str
    meaning: str
    prepare: Callable[[PreTrainedModel], Ready]
    """Changes a model that nothing else uses. Raises ImportError if the library is not installed, and
    NotImplementedError if it does not support the model."""
    kernels: str | None = None
    """The value of `model.kernels` by which the planner knows it."""
    ours: bool = False
    """Whether tigon recomputes, so that `auto` and the states of layers exist."""
    finish: Callable[[PreTrainedModel, Ready, str], Ready] | None = None
    """Changes the model once more. Graphs set up their recomputation here. Only for `none` and `full`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The planner's settings that describe it, beside its kernels."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a case is trained."""

    code: Code
    recomputed: str
    """`none`, `full`, or, with tigon, `auto` or the layers' states."""
    micro: str
    """`whole`, `fits` or a number of samples."""

    @property
    def name(self) -> str:
        return f"{self.code.name}:{self.recomputed}{'' if self.micro == WHOLE else f'@{self.micro}'}"

    def prepare(self, model: nn.Module, recomputed: str) -> Ready:
        """The variant on a copy of `model` that shares its parameters. recomputed: instead of `auto`."""
        own: PreTrainedModel = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        if self.code.ours:
            ready = self.code.prepare(own)
            if self.code.settings.get("train.cuda_graphs"):  # a graph contains the recomputation
                without_cache(own)
            else:
                model_checkpoint.checkpoint(own, recomputed)
            return ready if self.code.finish is None else self.code.finish(own, ready, recomputed)
        if recomputed == "full":
            layer_function.enable(own)
        return self.code.prepare(own)


def by_forward(model: PreTrainedModel) -> Loss:
    return lambda ids, learned: model(input_ids=ids, labels=ids, num_items_in_batch=learned).loss


def _hugging_face(model: PreTrainedModel) -> Ready:
    return Ready(by_forward(model))


def _compiled(model: PreTrainedModel) -> Ready:
    return Ready(by_forward(torch.compile(model)))


def _liger(model: PreTrainedModel) -> Ready:
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NotImplementedError(f"Liger Kernel has no patch for {model.config.model_type}")
    before = _shared_names(model)
    try:
        monkey_patch._apply_liger_kernel_to_instance(model=model)
        now = {(owner, name): getattr(owner, name) for owner, name in before}
    finally:
        _assign(before)
    changed = {key: value for key, value in now.items() if value is not before[key]}
    originals = {key: before[key] for key in changed}

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        _assign(changed)
        try:
            yield
        finally:
            _assign(originals)

    return Ready(by_forward(model), active)


def _shared_names(model: PreTrainedModel) -> dict[tuple[Any, str], Any]:
    """The functions and classes that Liger may replace for every model of the process: (owner, name) -> value."""
    module = sys.modules[type(model).__module__]
    names: dict[tuple[Any, str], Any] = {(module, name): value for name, value in vars(module).items()}
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and "forward" in vars(value):
            names[value, "forward"] = vars(value)["forward"]
    names[nn.functional, "cross_entropy"] = nn.functional.cross_entropy
    return names


def _assign(values: Mapping[tuple[Any, str], Any]) -> None:
    for (owner, name), value in values.items():
        setattr(owner, name, value)


def patched(model: PreTrainedModel) -> Ready:
    patch(model)
    return Ready(by_forward(model))


CODES: Mapping[str, Code] = {
    code.name: code
    for code in (
        Code(name="hf", meaning="transformers as it is", prepare=_hugging_face, kernels="none"),
        Code(name="compile", meaning="transformers under `torch.compile`", prepare=_compiled),
        Code(name="liger", meaning="transformers with Liger Kernel's patch", prepare=_liger, kernels="liger"),
        Code(name="tigon", meaning="transformers with `tigon.patch`", prepare=patched, kernels="tigon", ours=True),
    )
}
DEFAULT = ("hf:full", "compile:full", "liger:full", "liger:none@fits", "tigon:full", "tigon:none@fits", "tigon:auto")


def parse(text: str, flag: str = "--variant", codes: Mapping[str, Code] = CODES) -> Variant:
    """The variant of one of `codes` that `text` names. Raises OptionError."""
    name, _, rest = text.partition(":")
    recomputed, at, micro = rest.partition("@")
    if name not in codes:
        raise OptionError(f"{flag} {text}: {name!r} is not known; choose one of {', '.join(codes)}.")
    ours = codes[name].ours and not codes[name].settings  # the planner chooses for tigon alone
    usual = ("none", "full", AUTO) if ours else ("none", "full")
    by_layer = ours and is_by_layer(recomputed) and complaint_about("train.checkpointing", recomputed) is None
    if recomputed not in usual and not by_layer:
        or_states = f", or layers such as full:7,none:9 ({', '.join(STATES)})" if ours else ""
        raise OptionError(f"{flag} {text}: {name} recomputes {', '.join(usual)}{or_states}; got {recomputed!r}.")
    micro = micro if at else WHOLE
    if micro not in (WHOLE, FITS) and not (micro.isdecimal() and int(micro) > 0):
        raise OptionError(f"{flag} {text}: the micro-batch is {micro!r}; write {FITS}, {WHOLE} or a number of samples.")
    if recomputed == AUTO and micro != WHOLE:
        raise OptionError(f"{flag} {text}: the planner chooses the micro-batch of auto; write {name}:{AUTO}.")
    return Variant(code=codes[name], recomputed=recomputed, micro=micro)
