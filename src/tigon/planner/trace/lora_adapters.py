"""LoRA with PEFT's modules, on a model without data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tigon._install import install_command
from tigon.errors import UsageError
from tigon.models.seams import lora
from tigon.planner.trace.quantized_weights import TENSOR_BYTES_BY_FORMAT, Nf4Linear
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel


def _peft_forward(layer: LoraLayer, x: Tensor) -> Tensor:
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
        adapter_x = x if torch.is_autocast_enabled("cpu") else x.to(a.weight.dtype)
        added = b(a(layer.lora_dropout[name](adapter_x))) * layer.scaling[name]
        result = result + (added if torch.is_autocast_enabled("cpu") else added.to(result.dtype))
    return result


def _tigon_forward(layer: LoraLayer, x: Tensor) -> Tensor:
    """The forward of `tigon.models.seams.lora` around a 4-bit layer, with a dense weight that holds no data."""
    name = layer.active_adapters[0]
    a: Tensor = layer.lora_A[name].weight
    autocast = torch.is_autocast_enabled("cpu")
    adapters_off = layer.disable_adapters and torch.is_grad_enabled()
    variant = name in layer.lora_variant
    drops = variant and lora.apply_adapter_dropout(layer, x, name) is not None
    if adapters_off or drops or (not autocast and a.dtype != x.dtype):
        return _peft_forward(layer, x)
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype

    def weight(layer: LoraLayer) -> Callable[[], Tensor]:
        # Made from the adapter: the op keeps this function until its backward, and x must not live as long.
        like = layer.lora_A[layer.active_adapters[0]].weight
        return functools.partial(layer.base_layer.dequantised, like, dtype)

    together = None if variant else lora.with_siblings(layer, x, weight)
    return (lora.adapted(layer, x, name, weight(layer)) if together is None else together).to(x.dtype)


def add_lora(model: PreTrainedModel, settings: Settings, fused: bool) -> None:
    """Add adapters to `model` in place and freeze its other weights, as the run does, before it is patched.

    fused: whether the run's kernels are tigon's.

    Raises UsageError if PEFT is missing, or if `lora.quantize_to` has no measured format.
    """
    if settings.lora.quantize and settings.lora.quantize_to not in TENSOR_BYTES_BY_FORMAT:
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
            module.forward = functools.partial(_tigon_forward if fused else _peft_forward, module)
            module.saves_only_inputs = fused  # as the seam's class says, so that a layer's state may drop its input
    if fused:
        lora.find_siblings(model, _around_nf4)


def _around_nf4(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", None), Nf4Linear)
