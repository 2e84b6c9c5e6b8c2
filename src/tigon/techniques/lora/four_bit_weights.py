"""Frozen weights in 4 bits: those of experts while PEFT adds adapters, and all of them for FSDP2.

bitsandbytes stores weights of experts by a parametrization, so torch computes such a weight whenever it is read.

FSDP2 of PyTorch before 2.12 takes no parameters of integers, and Accelerate leaves those of bitsandbytes out of the
sharding. So FSDP2 gets the packed bytes as numbers of a floating dtype. The scales (an eighth of a bit per weight with
NF4, a quarter with MXFP4) stay whole in every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from tigon.errors import RecipeError


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


def let_fsdp_divide(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Give the packed weights a dtype that FSDP2 divides, without a change of a byte, and their scales a device.

    Args:
        model: A model whose linear layers or experts may be in 4 bits. FSDP2 moves its parameters and buffers itself.
        dtype: That of the products. FSDP2 casts weights of another one under autocast, which would change the bytes.
        device_type: The type of the device that trains.

    Raises:
        RecipeError: A weight has no whole number of elements of that dtype.
    """
    weights = list(packed_weights(model))
    for path, packed, _ in weights:
        if packed.dtype != torch.uint8:
            continue
        if packed.numel() % dtype.itemsize:
            raise RecipeError(
                f"sharding.fsdp: {path} has {packed.numel()} bytes in 4 bits, which are no whole elements of "
                f"{dtype}, and FSDP2 divides those; set sharding.fsdp: false"
            )
        packed.quant_storage = dtype  # bitsandbytes' name of the dtype of its packed weights
        flat = packed.shape[-1] == 1
        stored = packed.data.cpu()  # on the GPU the whole weights would stay until all are divided
        packed.data = stored.view(-1).view(dtype).view(-1, 1) if flat else stored.view(dtype)
    states = [state for _, _, state in weights if hasattr(state, "to")]  # MXFP4's scales are a buffer
    if states:
        device = compute_on(model, device_type)
        for state in states:
            state.to(device)


def compute_on(model: nn.Module, device_type: str) -> torch.device:
    """The device of this process that computes with a model whose weights wait elsewhere."""
    device, loaded = torch.device(device_type), cast("Any", model)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if getattr(loaded, "hf_device_map", None):
        loaded.hf_device_map = {"": device}  # Accelerate refuses 4-bit weights that seem to compute on the CPU
    return device


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(path, packed weight, its state) of each module of bitsandbytes, or parametrization, with a weight in 4 bits.

    FSDP2 puts plain parameters in the place of bitsandbytes'. Then the module alone has the state.
    """
    for path, module in model.named_modules():
        experts = isinstance(module, ParametrizationList)
        weight: Any = module.original if experts else module._parameters.get("weight")
        holders: tuple[Any, ...] = (module[0],) if experts else (weight, module)
        state = next(filter(None, (getattr(holder, "quant_state", None) for holder in holders)), None)
        if state is not None and weight is not None:  # the step of a parametrization has a state alone
            yield path, weight, state
