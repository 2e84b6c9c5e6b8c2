"""4-bit weights that FSDP2 can divide: their packed bytes, shown as numbers of a floating dtype.

FSDP2 of PyTorch before 2.12 takes no parameters of integers, and Accelerate leaves those of bitsandbytes out of the
sharding. The scales (an eighth of a bit per weight with NF4, a quarter with MXFP4) stay whole in every process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from tigon.errors import RecipeError


def let_fsdp_divide(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Give the packed weights a dtype that FSDP2 divides, without a change of a byte, and their scales a device.

    Args:
        model: A model whose linear layers or experts may be in 4 bits. FSDP2 moves its parameters and buffers itself.
        dtype: That of the products. FSDP2 casts weights of another one under autocast, which would change the bytes.
        device_type: The type of the device that trains.

    Raises:
        RecipeError: A weight has no whole number of elements of that dtype.
    """
    packed_weights = [(path, *found) for path, module in model.named_modules() if (found := _packed(module))]
    for path, packed, _ in packed_weights:
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
    states = [state for _, _, state in packed_weights if hasattr(state, "to")]  # MXFP4's scales are a buffer
    if not states:
        return
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for state in states:
        state.to(device)
    loaded: Any = model
    if getattr(loaded, "hf_device_map", None):
        loaded.hf_device_map = {"": device}  # Accelerate refuses 4-bit weights that seem to compute on the CPU


def _packed(module: nn.Module) -> tuple[Any, Any] | None:
    """The packed weight of one module, of a bitsandbytes layer or of experts, and its state; None if it has none."""
    experts = isinstance(module, ParametrizationList)
    weight: Any = module.original if experts else module._parameters.get("weight")
    state = getattr(module[0] if experts else weight, "quant_state", None)  # type: ignore[index]
    return None if state is None else (weight, state)
