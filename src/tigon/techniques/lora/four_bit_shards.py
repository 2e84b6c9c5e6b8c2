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


def let_fsdp_divide(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the packed weights a dtype that FSDP2 divides, without a change of a byte, and move them to the host.

    FSDP2 moves them back layer by layer. Accelerate keeps the whole weights until all are divided, which on the GPU
    would be its peak.

    Args:
        model: A model whose linear layers or experts may be in 4 bits.
        dtype: That of the products. FSDP2 casts weights of another one under autocast, which would change the bytes.

    Raises:
        RecipeError: A weight has no whole number of elements of that dtype.
    """
    for path, module in model.named_modules():
        for packed in _packed(module):
            if packed.dtype != torch.uint8:
                continue
            if packed.numel() % dtype.itemsize:
                raise RecipeError(
                    f"sharding.fsdp: {path} has {packed.numel()} bytes in 4 bits, which are no whole elements of "
                    f"{dtype}, and FSDP2 divides those; set sharding.fsdp: false"
                )
            packed.quant_storage = dtype  # bitsandbytes' name of the dtype of its packed weights
            flat = packed.shape[-1] == 1
            stored = packed.data.cpu()
            packed.data = stored.view(-1).view(dtype).view(-1, 1) if flat else stored.view(dtype)


def _packed(module: nn.Module) -> list[Any]:
    """The parameters of one module that hold packed weights: those of bitsandbytes' layers, and of experts."""
    if isinstance(module, ParametrizationList):
        return [module.original] if hasattr(module[0], "quant_state") else []
    weight = module._parameters.get("weight")
    return [weight] if getattr(weight, "quant_state", None) is not None else []
