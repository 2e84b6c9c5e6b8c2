"""The seam for PEFT's LoRA layers: the layer and its adapter as one op, for dense and for 4-bit weights.

PEFT's forward stays in charge of everything but the plain case: one active adapter of the usual form. Merged or
disabled adapters, several adapters, DoRA and other variants, `adapter_names`, and layers with hooks of their own (such
as those of DeepSpeed's ZeRO-3, which gather a weight) run as without tigon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import PatchedModule, Seam, is_dtensor
from tigon.models.seams.fp8 import fp8_scaling


@dataclass(frozen=True, kw_only=True)
class LoraSeam(Seam):
    """`peft.tuners.lora`'s layer around a linear layer."""

    op: ClassVar[str] = "lora_linear"
    flag: ClassVar[str] = "lora"

    def candidate(self, module: nn.Module) -> bool:
        # By name, so that PEFT is not imported for a model that has none of its layers.
        cls = next((c for c in type(module).__mro__ if c.__module__.startswith("peft.tuners.lora.")), None)
        return cls is not None and cls.__name__ in ("Linear", "Linear4bit")

    def objection(self, module: nn.Module) -> str | None:
        base: Any = getattr(module, "base_layer", None)
        if not is_plain_linear(base) and fp8_scaling(base) is None and not _is_4bit(base):
            return f"its layer is a {type(base).__name__}; only torch's Linear and bitsandbytes' Linear4bit are fused"
        if getattr(module, "fan_in_fan_out", False):
            return "its weight is stored as (in, out)"
        variants: Any = module.lora_variant
        if variants:
            return f"its adapter is a variant of LoRA ({', '.join(map(_variant_name, variants.values()))})"
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Callable[..., Tensor] = base.forward

        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            adapter = None if args or kwargs else plain_adapter(self, x)
            if adapter is None:
                return plain_forward(self, x, *args, **kwargs)
            layer = self.base_layer
            if _is_4bit(layer):
                return adapted(self, x, adapter, _dequantise(layer)).to(x.dtype)  # as bitsandbytes does
            return adapted(self, x, adapter, layer.weight)

        # Activation checkpointing may drop the input of such a layer, as that of a linear layer.
        return {"forward": forward, "saves_only_inputs": True}


def adapted(module: Any, x: Tensor, adapter: str, weight: Tensor | Callable[[], Tensor]) -> Tensor:
    """The result of PEFT's layer `module` with one adapter. weight: that of the layer, or a function that makes it."""
    return after_dropout(module, x, adapter, weight, dropped(module, x, adapter))


def after_dropout(
    module: Any, x: Tensor, adapter: str, weight: Tensor | Callable[[], Tensor], adapter_x: Tensor | None
) -> Tensor:
    """As `adapted`. adapter_x: the result of `dropped`."""
    return ops.lora_linear(
        x,
        weight,
        module.lora_A[adapter].weight,
        module.lora_B[adapter].weight,
        scaling=module.scaling[adapter],
        bias=module.base_layer.bias,
        fp8=fp8_scaling(module.base_layer),
        adapter_x=adapter_x,
    )


def dropped(module: Any, x: Tensor, adapter: str) -> Tensor | None:
    """The adapter's input instead of x: x after its dropout, or None without one."""
    dropout = module.lora_dropout[adapter]
    return None if isinstance(dropout, nn.Identity) or not module.training else dropout(x)


def is_plain_linear(layer: Any) -> bool:
    """Whether the layer is torch's Linear, or one whose loss tigon had fused before it got an adapter."""
    return type(layer) is nn.Linear or (isinstance(layer, PatchedModule) and layer._tigon_base is nn.Linear)


def _variant_name(variant: Any) -> str:
    return type(variant).__name__.removesuffix("LinearVariant")


def _is_4bit(layer: Any) -> bool:
    cls = type(layer)
    return cls.__name__ == "Linear4bit" and cls.__module__.startswith("bitsandbytes.")


def _dequantise(layer: Any) -> Callable[[], Tensor]:
    """A function that makes the dense weight of a bitsandbytes layer."""
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

    weight = layer.weight
    return lambda: dequantize_4bit(weight.data, weight.quant_state)


def plain_adapter(module: Any, x: Tensor) -> str | None:
    """The name of the one adapter that the op can compute now, or None."""
    active = module.active_adapters
    if module.disable_adapters or module.merged or len(active) != 1 or active[0] not in module.lora_A:
        return None
    name: str = active[0]
    if name in module.lora_variant:
        return None
    layer, a, b = module.base_layer, module.lora_A[name], module.lora_B[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return None
    if any(is_hooked(part) for part in (layer, a, b)) or is_dtensor(layer.weight) or is_dtensor(a.weight):
        return None
    if _is_4bit(layer):
        stored = getattr(layer.weight, "quant_state", None) is not None  # it is quantised when it moves to the device
        dtype_fits = stored and (torch.is_autocast_enabled(x.device.type) or a.weight.dtype == x.dtype)
    else:
        dtype_fits = torch.is_autocast_enabled(x.device.type) or x.dtype == layer.weight.dtype == a.weight.dtype
    # Without autocast, PEFT computes an fp32 adapter of a bf16 layer in fp32.
    return name if dtype_fits else None


def is_hooked(module: nn.Module) -> bool:
    """Whether something must run when this module is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or "forward" in vars(module)
    )  # fmt: skip
