"""Frozen 4-bit weights in NF4 or MXFP4, on a model without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

from tigon.ops.linear.mxfp4 import BLOCK as MXFP4_BLOCK
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.adapter_targets import expert_parameters
from tigon.techniques.lora.lora import keeps_mxfp4

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# bitsandbytes 0.50.2 with double quantisation: half a byte per weight, an 8-bit scale per 64 weights, and an fp32 scale
# per 256 scales. Two tables hold 16 and 256 fp32 values.
NF4_BLOCK, NF4_OUTER_BLOCK, NF4_TABLE_BYTES = 64, 256, 4 * (16 + 256)

OnDequantize = Callable[[int], None]
"""Gets the bytes that a dequantisation reads and writes."""


def nf4_tensor_bytes(numel: int) -> tuple[int, ...]:
    """The tensors that hold `numel` weights in NF4, bytes of each."""
    scales = math.ceil(numel / NF4_BLOCK)
    return math.ceil(numel / 2), scales, 4 * math.ceil(scales / NF4_OUTER_BLOCK), NF4_TABLE_BYTES


def mxfp4_tensor_bytes(numel: int) -> tuple[int, ...]:
    """The tensors that hold `numel` weights in MXFP4, bytes of each: the weights, a scale per block, and the code."""
    return numel // 2, numel // MXFP4_BLOCK, 4 * 16


TENSOR_BYTES_BY_FORMAT: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "nf4": nf4_tensor_bytes,
    "mxfp4": mxfp4_tensor_bytes,
}


class _DequantizedMatmul(torch.autograd.Function):
    """y = x Wᵀ; W is dequantised for the product and then freed, in the forward and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Nf4Linear) -> Tensor:
        ctx.module = module
        return x @ module.dequantised(x, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        module: Nf4Linear = ctx.module
        return dy @ module.dequantised(dy, dy.dtype), None


class Nf4Linear(nn.Linear):
    """A frozen linear module whose weight is stored in 4 bits; `model_states` counts the bytes of the stored weight."""

    on_dequantize: OnDequantize
    """Called at each product."""

    def dequantised(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The dense weight of one product, without data."""
        numel = self.in_features * self.out_features
        self.on_dequantize(sum(nf4_tensor_bytes(numel)) + numel * dtype.itemsize)
        return like.new_empty((self.out_features, self.in_features), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        # bitsandbytes 0.50.2, nn/modules.py, Linear4bit.forward: the input is cast to the product's dtype, and the
        # result back to the input's dtype. After a norm with fp32 weights under autocast the result is therefore fp32;
        # a dense linear module would return 16 bits.
        input_dtype = x.dtype
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        y: Tensor = _DequantizedMatmul.apply(x, self)
        return (y if self.bias is None else y + self.bias).to(input_dtype)


class Bnb4bitParametrization(nn.Module):
    """A weight of experts that is stored in 4 bits. It has the name and the attributes of bitsandbytes' class.

    Its parameter keeps the dense shape; `model_states` counts the bytes of the stored weight.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, on_dequantize: OnDequantize, stored_as: str) -> None:
        super().__init__()
        self.on_dequantize, self.stored_as = on_dequantize, stored_as
        self.quant_state = SimpleNamespace(shape=weight.shape, dtype=dtype, absmax=weight.new_empty(0))

    def forward(self, stored: Tensor) -> Tensor:
        """The dense weight, without data."""
        dtype: torch.dtype = self.quant_state.dtype
        stored_bytes = sum(TENSOR_BYTES_BY_FORMAT[self.stored_as](stored.numel()))
        self.on_dequantize(stored_bytes + stored.numel() * dtype.itemsize)
        return stored.new_empty(stored.shape, dtype=dtype)


def quantized_formats(model: nn.Module) -> dict[int, str]:
    """By parameter id: the key in `TENSOR_BYTES_BY_FORMAT` of each parameter that a run stores in 4 bits."""
    formats = {id(module.weight): "nf4" for module in model.modules() if isinstance(module, Nf4Linear)}
    for module in model.modules():
        if isinstance(module, ParametrizationList) and isinstance(module[0], Bnb4bitParametrization):
            formats[id(module.original)] = module[0].stored_as
    return formats


def quantize(
    model: PreTrainedModel,
    settings: Settings,
    on_dequantize: OnDequantize = lambda moved_bytes: None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Convert experts to 4 bits as a run does, and with NF4 all linear modules except the head.

    on_dequantize: called at each product.
    compute_dtype: the dtype of the experts' dequantised weights.
    """
    keeps_mxfp4_experts = keeps_mxfp4(settings)
    for path in list(expert_parameters(model)):
        module_path, _, name = path.rpartition(".")
        module = model.get_submodule(module_path)
        weight = getattr(module, name).requires_grad_(False)
        stored_as = "mxfp4" if keeps_mxfp4_experts else "nf4"
        parametrization = Bnb4bitParametrization(weight, compute_dtype, on_dequantize, stored_as)
        register_parametrization(module, name, parametrization, unsafe=True)
    head = model.get_output_embeddings()
    for module in () if keeps_mxfp4_experts else model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = Nf4Linear
            vars(module)["on_dequantize"] = on_dequantize
