"""Weights of experts that bitsandbytes stores in 4 bits: torch computes such a weight whenever it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def names_in_4_bits(module: nn.Module) -> list[str]:
    """Names of the module's own three-dimensional weights in 4 bits, in the order in which they were stored."""
    parametrizations: Any = getattr(module, "parametrizations", {})
    return [name for name, steps in parametrizations.items() if len(_shape(steps[0])) == 3]


def _shape(step: Any) -> tuple[int, ...]:
    return tuple(getattr(getattr(step, "quant_state", None), "shape", ()))


@contextlib.contextmanager
def shown_as_plain(model: nn.Module) -> Iterator[None]:
    """Give the 4-bit experts ordinary parameters of the dense shape, which take no memory, while PEFT adds adapters.

    PEFT reads a weight for its shape, which would dequantise it. It also wraps computed weights in another order than
    ordinary ones, so that its names of the adapters would fit no model in 16 bits.
    """
    hidden: list[tuple[nn.Module, type[nn.Module], nn.Module, list[str]]] = []
    for module in model.modules():
        if names := names_in_4_bits(module):
            hidden.append((module, type(module), module._modules.pop("parametrizations"), names))  # type: ignore[arg-type]
    for module, cls, parametrizations, names in hidden:
        module.__class__ = [c for c in cls.__mro__ if c.__name__.startswith("Parametrized")][-1].__bases__[0]
        for name in names:
            state = parametrizations[name][0].quant_state  # type: ignore[index]
            empty = torch.empty((), dtype=state.dtype, device=state.absmax.device)
            module.register_parameter(name, nn.Parameter(empty.expand(state.shape), requires_grad=False))
    try:
        yield
    finally:
        for module, cls, parametrizations, names in hidden:
            for name in names:
                del module._parameters[name]
            module._modules["parametrizations"] = parametrizations
            module.__class__ = cls
