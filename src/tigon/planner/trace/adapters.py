"""LoRA with PEFT's modules, and frozen 4-bit weights in NF4 or MXFP4, on a model without data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

from tigon._install import install_command
from tigon.errors import UsageError
from tigon.models.seams import lora
from tigon.ops.linear.mxfp4 import BLOCK as MXFP4_BLOCK
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.adapter_targets import expert_parameters
from tigon.techniques.lora.lora import keeps_mxfp4
from tigon.techniques.technique import RunInfo

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

# bitsandbytes 0.50.2 with double quantisation: half a byte per weight, an 8-bit scale per 64 weights, and an fp32 scale
# per 256 scales. Two tables hold 16 and 256 fp32 values.
NF4_BLOCK, NF4_OUTER_BLOCK, NF4_TABLE_BYTES = 64, 256, 4 * (16 + 256)


Watch = Callable[[int], None]
"""Gets the bytes that a dequantisation reads and writes."""


def nf4_bytes(numel: int) -> tuple[int, ...]:
    """The tensors that hold `numel` weights in NF4, bytes of each."""
    scales = math.ceil(numel / NF4_BLOCK)
    return math.ceil(numel / 2), scales, 4 * math.ceil(scales / NF4_OUTER_BLOCK), NF4_TABLE_BYTES


def mxfp4_bytes(numel: int) -> tuple[int, ...]:
    """The tensors that hold `numel` weights in MXFP4, bytes of each: the weights, a scale per block, and the code."""
    return numel // 2, numel // MXFP4_BLOCK, 4 * 16


STORED: Mapping[str, Callable[[int], tuple[int, ...]]] = {"nf4": nf4_bytes, "mxfp4": mxfp4_bytes}


class _Product(torch.autograd.Function):
    """y = x Wᵀ; W is dequantised for the product and then freed, in the forward and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, module: Nf4Linear) -> Tensor:
        ctx.module = module
        return x @ module.dequantised(x, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        module: Nf4Linear = ctx.module
        return dy @ module.dequantised(dy, dy.dtype), None, None


class Nf4Linear(nn.Linear):
    """A frozen linear module whose weight is stored in 4 bits; `model_states` counts the bytes of the stored weight."""

    watch: Watch
    """Called at each product."""

    def dequantised(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The dense weight of one product, without data."""
        numel = self.in_features * self.out_features
        self.watch(sum(nf4_bytes(numel)) + numel * dtype.itemsize)
        return like.new_empty((self.out_features, self.in_features), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        # bitsandbytes 0.50.2, nn/modules.py, Linear4bit.forward: the input is cast to the product's dtype, and the
        # result back to the input's dtype. After a norm with fp32 weights under autocast the result is therefore fp32;
        # a dense linear module would return 16 bits.
        entered = x.dtype
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        y: Tensor = _Product.apply(x, None, self)
        return (y if self.bias is None else y + self.bias).to(entered)


class Bnb4bitParametrization(nn.Module):
    """A weight of experts that is stored in 4 bits. It has the name and the attributes of bitsandbytes' class.

    Its parameter keeps the dense shape; `model_states` counts the bytes of the stored weight.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, watch: Watch, stored_as: str) -> None:
        super().__init__()
        self.watch, self.stored_as = watch, stored_as
        self.quant_state = SimpleNamespace(shape=weight.shape, dtype=dtype, absmax=weight.new_empty(0))

    def forward(self, stored: Tensor) -> Tensor:
        """The dense weight, without data."""
        dtype: torch.dtype = self.quant_state.dtype
        self.watch(sum(STORED[self.stored_as](stored.numel())) + stored.numel() * dtype.itemsize)
        return stored.new_empty(stored.shape, dtype=dtype)


def quantized_formats(model: nn.Module) -> dict[int, str]:
    """The format of each parameter that a run stores in 4 bits, a key of `STORED`, by the parameter's id."""
    found = {id(module.weight): "nf4" for module in model.modules() if isinstance(module, Nf4Linear)}
    for module in model.modules():
        if isinstance(module, ParametrizationList) and isinstance(module[0], Bnb4bitParametrization):
            found[id(module.original)] = module[0].stored_as
    return found


def quantize(
    model: PreTrainedModel,
    settings: Settings,
    watch: Watch = lambda moved_bytes: None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Convert experts to 4 bits as a run does, and with NF4 all linear modules except the head. Products call `watch`.

    compute_dtype: the dtype of the experts' dequantised weights.
    """
    kept = keeps_mxfp4(settings)
    for path in list(expert_parameters(model)):
        module_path, _, name = path.rpartition(".")
        module = model.get_submodule(module_path)
        weight = getattr(module, name).requires_grad_(False)
        step = Bnb4bitParametrization(weight, compute_dtype, watch, "mxfp4" if kept else "nf4")
        register_parametrization(module, name, step, unsafe=True)
    head = model.get_output_embeddings()
    for module in () if kept else model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = Nf4Linear
            vars(module)["watch"] = watch


def _adapted(layer: LoraLayer, x: Tensor) -> Tensor:
    """The forward of PEFT's layer around a 4-bit layer (PEFT 0.21, tuners/lora/bnb.py, Linear4bit.forward).

    Switched off, it is the 4-bit layer alone. The product is cloned. Under autocast the adapter gets the input
    unchanged; otherwise in the adapter's dtype.
    """
    if layer.disable_adapters:
        return layer.base_layer(x)  # type: ignore[no-any-return]
    result: Tensor = layer.base_layer(x).clone()
    for name in layer.active_adapters:
        if name in layer.lora_variant:
            raise UsageError(
                "lora.dora with lora.quantize is planned for tigon's layers only: set model.kernels: tigon and "
                "lora.dropout: 0."
            )
        a, b = layer.lora_A[name], layer.lora_B[name]
        entering = x if torch.is_autocast_enabled("cpu") else x.to(a.weight.dtype)
        added = b(a(layer.lora_dropout[name](entering))) * layer.scaling[name]
        result = result + (added if torch.is_autocast_enabled("cpu") else added.to(result.dtype))
    return result


def _fused(layer: LoraLayer, x: Tensor) -> Tensor:
    """The forward of `tigon.models.seams.lora` around a 4-bit layer, with a dense weight that holds no data."""
    name = layer.active_adapters[0]
    a: Tensor = layer.lora_A[name].weight
    autocast = torch.is_autocast_enabled("cpu")
    alone = layer.disable_adapters and torch.is_grad_enabled()
    variant = name in layer.lora_variant
    drops = variant and lora.apply_adapter_dropout(layer, x, name) is not None
    if alone or drops or (not autocast and a.dtype != x.dtype):
        return _adapted(layer, x)
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype

    def weight(layer: LoraLayer) -> Callable[[], Tensor]:
        # Made from the adapter: the op keeps this function until its backward, and x must not live as long.
        like = layer.lora_A[layer.active_adapters[0]].weight
        return functools.partial(layer.base_layer.dequantised, like, dtype)

    together = None if variant else lora.with_siblings(layer, x, weight)
    return (lora.adapted(layer, x, name, weight(layer)) if together is None else together).to(x.dtype)


def attach(model: PreTrainedModel, settings: Settings, fused: bool) -> None:
    """Add adapters to `model` in place and freeze its other weights, as the run does, before it is patched.

    fused: whether the run's kernels are tigon's.

    Raises UsageError if PEFT is missing, or if the trace lacks what the run computes.
    """
    if settings.lora.quantize and settings.lora.quantize_to not in STORED:
        what = f"lora.quantize_to: {settings.lora.quantize_to}"
        raise UsageError(f"{what} cannot be planned: the memory of its products was never measured.")
    technique = TECHNIQUES["lora"]
    # The frozen weights have no values to initialise adapters from, and no memory depends on the initial values.
    settings = settings.having({"lora.init": "default"})
    try:
        with torch.device("meta"):  # on the CPU, PEFT would initialise adapters of a large rank for seconds
            technique.model(model, settings, RunInfo())
    except ImportError as error:
        raise UsageError(f"LoRA cannot be traced: {error}; {install_command('train')}.") from None
    for module in list(model.modules()):
        if _around_nf4(module):
            module.forward = functools.partial(_fused if fused else _adapted, module)
    if fused:
        lora.find_siblings(model, _around_nf4)


def _around_nf4(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", None), Nf4Linear)
