"""The seam for PEFT's LoRA layers: the layer and its adapter as one op, for dense and for 4-bit weights.

PEFT's forward stays in charge of everything but the plain case: one active adapter of the usual form. Merged or
disabled adapters, several adapters, variants other than DoRA, DoRA with dropout, `adapter_names`, and layers with hooks
of their own (such as those of DeepSpeed's ZeRO-3, which gather a weight) run as without tigon.

Layers that read the same input, such as q, k and v, are one op together. The model calls them one after another with
the same tensor. The first call computes all of them, and the next calls return what it left. If a model calls one of
them with another tensor, as cross-attention does, its layers run singly from then on.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import PatchedModule, Seam, hooks_of, is_dtensor
from tigon.models.seams.fp8 import fp8_scaling
from tigon.ops.linear.dora import dora_linear
from tigon.ops.linear.nf4 import dequantiser

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Weight = Tensor | Callable[[], Tensor]
"""A dense weight, or a function that dequantises it."""


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
        return variant_objection(module, fused=(DORA,))

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Callable[..., Tensor] = base.forward

        def forward(self: LoraLayer, x: Tensor, *args: object, **kwargs: object) -> Tensor:
            adapter = None if args or kwargs else plain_adapter(self, x)
            if adapter is None:
                return plain_forward(self, x, *args, **kwargs)
            together = None if adapter in self.lora_variant else with_siblings(self, x, _weight)
            if together is None:
                together = adapted(self, x, adapter, _weight(self))
            return together.to(x.dtype) if _is_4bit(self.base_layer) else together  # as bitsandbytes does

        # Activation checkpointing may drop the input of such a layer, as that of a linear layer.
        return {"forward": forward, "saves_only_inputs": True}


def unfused_layers(model: nn.Module) -> int:
    """The number of PEFT's layers that `patch` would fuse now."""
    seam = LoraSeam()
    layers = (m for m in model.modules() if seam.candidate(m) and not isinstance(m, PatchedModule))
    return sum(seam.objection(layer) is None for layer in layers)


def adapted(module: LoraLayer, x: Tensor, adapter: str, weight: Weight) -> Tensor:
    """The result of PEFT's layer `module` with one adapter. weight: that of the layer, or a function that makes it."""
    return adapted_from(module, x, adapter, weight, apply_adapter_dropout(module, x, adapter))


def adapted_from(module: LoraLayer, x: Tensor, adapter: str, weight: Weight, adapter_x: Tensor | None) -> Tensor:
    """As `adapted`. adapter_x: the result of `apply_adapter_dropout`."""
    if adapter in module.lora_variant and not module.disable_adapters:
        return dora_linear(
            x,
            weight,
            module.lora_A[adapter].weight,
            module.lora_B[adapter].weight,
            module.lora_magnitude_vector[adapter].weight,
            scaling=scaling_of(module, adapter),
            bias=module.base_layer.bias,
            fp8=fp8_scaling(module.base_layer),
        )
    return ops.lora_linear(
        x,
        weight,
        module.lora_A[adapter].weight,
        module.lora_B[adapter].weight,
        scaling=scaling_of(module, adapter),
        bias=module.base_layer.bias,
        fp8=fp8_scaling(module.base_layer),
        adapter_x=adapter_x,
    )


def apply_adapter_dropout(module: LoraLayer, x: Tensor, adapter: str) -> Tensor | None:
    """The adapter's input instead of x: x after its dropout, or None without one."""
    return module.lora_dropout[adapter](x) if _drops(module, adapter) else None


def _drops(module: LoraLayer, adapter: str) -> bool:
    dropout = module.lora_dropout[adapter]
    return module.training and not module.disable_adapters and not isinstance(dropout, nn.Identity)


def scaling_of(module: LoraLayer, adapter: str) -> float:
    """What the adapter's result is multiplied by: 0 if adapters are disabled, so that only the layer is left."""
    return 0.0 if module.disable_adapters else float(module.scaling[adapter])


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same input. transformers' families with other names pack them into one layer."""


@dataclass(eq=False)
class Siblings:
    """Layers of one module that read the same input, and the results that are not fetched yet."""

    layers: Sequence[weakref.ref[Any]]
    x: Tensor | None = None
    state: tuple[Any, ...] = ()
    """The results depend on it besides x; see `_state`."""
    results: dict[int, Tensor] = field(default_factory=dict)
    apart: bool = False
    """Whether the model has called them with different inputs."""

    def forget(self) -> None:
        self.x = None
        self.results.clear()


_SIBLINGS: weakref.WeakKeyDictionary[nn.Module, Siblings] = weakref.WeakKeyDictionary()


def find_siblings(model: nn.Module, fits: Callable[[Any], bool]) -> None:
    """Let layers that read the same input run together. fits: whether a module is PEFT's layer and runs the op."""
    for module in model.modules():
        for names in SIBLINGS:
            layers = [layer for name in names if (layer := getattr(module, name, None)) is not None and fits(layer)]
            if len(layers) > 1:
                siblings = Siblings([weakref.ref(layer) for layer in layers])
                _SIBLINGS.update(dict.fromkeys(layers, siblings))


def with_siblings(module: LoraLayer, x: Tensor, weight: Callable[[LoraLayer], Weight]) -> Tensor | None:
    """The result of PEFT's layer `module`, computed together with its siblings'. None if it must be computed alone.

    weight: the weight of one of the layers, or a function that makes it.
    """
    siblings = _SIBLINGS.get(module)
    if siblings is None or siblings.apart or torch.compiler.is_compiling():
        return None
    result = siblings.results.pop(id(module), None)
    state = _state(siblings, x)
    if result is not None and siblings.x is x and siblings.state == state:
        if not siblings.results:
            siblings.forget()
        return result
    # The results that are left belong to an input that a sibling has not read. An interrupted pass leaves some too.
    siblings.apart = result is not None and siblings.x is not x
    siblings.forget()
    if siblings.apart:
        return None
    siblings.state = state
    layers = [layer() for layer in siblings.layers]
    described = [operands for layer in layers if (operands := _described(layer, x, weight)) is not None]
    if x.ndim < 2 or len(described) < len(layers):
        return None
    results = ops.lora_linears(x, described)
    siblings.x = x
    siblings.results = {id(layer): y for layer, y in zip(layers, results, strict=True)}
    return siblings.results.pop(id(module))


def _state(siblings: Siblings, x: Tensor) -> tuple[Any, ...]:
    """A value that changes if a sibling would now compute something else from x."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    adapters = [
        (name, part[name].weight._version, layer.training, layer.disable_adapters)
        for reference in siblings.layers
        if (layer := reference()) is not None
        for name in layer.active_adapters
        for part in (layer.lora_A, layer.lora_B)
        if name in part
    ]
    return torch.is_grad_enabled(), dtype, x._version, *adapters


def _described(layer: LoraLayer, x: Tensor, weight: Callable[[LoraLayer], Weight]) -> ops.LoraLayer | None:
    """The operands of a layer, or None if `lora_linears` cannot compute it."""
    adapter = None if layer is None else plain_adapter(layer, x)
    if adapter is None or fp8_scaling(layer.base_layer) is not None:
        return None
    if adapter in layer.lora_variant or _drops(layer, adapter):
        return None
    stored = weight(layer)
    if isinstance(stored, Tensor) and stored.requires_grad:
        return None
    return ops.LoraLayer(
        weight=stored,
        lora_a=layer.lora_A[adapter].weight,
        lora_b=layer.lora_B[adapter].weight,
        scaling=scaling_of(layer, adapter),
        bias=layer.base_layer.bias,
    )


def _weight(module: LoraLayer) -> Weight:
    layer = module.base_layer
    return _dequantise(layer) if _is_4bit(layer) else layer.weight


def is_plain_linear(layer: LoraLayer) -> bool:
    """Whether the layer is torch's Linear, or one whose loss tigon had fused before it got an adapter."""
    return type(layer) is nn.Linear or (isinstance(layer, PatchedModule) and layer._tigon_base is nn.Linear)


DORA = "Dora"


def variant_objection(module: LoraLayer, fused: Sequence[str] = ()) -> str | None:
    """What stands against a layer whose adapter is a variant of LoRA. fused: the variants that an op computes."""
    names = [name for variant in module.lora_variant.values() if (name := _variant_name(variant)) not in fused]
    return f"its adapter is a variant of LoRA ({', '.join(names)})" if names else None


def _variant_name(variant: object) -> str:
    return type(variant).__name__.removesuffix("LinearVariant")


def _is_4bit(layer: LoraLayer) -> bool:
    cls = type(layer)
    return cls.__name__ == "Linear4bit" and cls.__module__.startswith("bitsandbytes.")


def _quant_state(layer: LoraLayer) -> Any:
    """How bitsandbytes has packed a layer's weight. The layer keeps it when FSDP2 replaces the parameter."""
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def _dequantise(layer: LoraLayer) -> Callable[[], Tensor]:
    """A function that makes the dense weight of a bitsandbytes layer."""
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

    packed, state = layer.weight.data, _quant_state(layer)
    if packed.dtype != torch.uint8:  # FSDP2 divides weights of a floating dtype alone
        packed = packed.view(torch.uint8).view(-1, 1)
    by_bitsandbytes: Callable[[], Tensor] = lambda: dequantize_4bit(packed, state)  # noqa: E731
    in_one_pass = dequantiser(packed, state)
    if in_one_pass is None:
        return by_bitsandbytes
    ours = functools.partial(in_one_pass, state.dtype)
    device = packed.device
    if device not in _AGREES and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return by_bitsandbytes  # a comparison waits for the GPU, which a capture must not
    if device not in _AGREES:
        _AGREES[device] = _agree(ours(), by_bitsandbytes())
        if not _AGREES[device]:
            warnings.warn(
                "tigon's kernel for NF4 weights differs from bitsandbytes' on this device; bitsandbytes' is used.",
                stacklevel=2,
            )
    return ours if _AGREES[device] else by_bitsandbytes


_AGREES: dict[torch.device, bool] = {}
"""Whether the kernel for NF4 weights gave bitsandbytes' weights, by device. The first one of a process is compared."""


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to one rounding of the result: the scale may differ in the last bit of fp32."""
    step = torch.finfo(theirs.dtype).eps * 2
    return bool(((ours.float() - theirs.float()).abs() <= step * theirs.float().abs()).all())


def plain_adapter(module: LoraLayer, x: Tensor) -> str | None:
    """The name of the one adapter that the op can compute now, or None.

    The op also computes a layer whose adapters are disabled, in passes without gradients, with a scaling of 0. A
    reference in post-training is such a pass. By bitsandbytes it would be rounded otherwise: on an H100, DPO with new
    adapters over NF4 began at a margin of -0.0015 instead of 0.
    """
    active = module.active_adapters
    if module.merged or len(active) != 1 or active[0] not in module.lora_A:
        return None
    if module.disable_adapters and (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return None
    name: str = active[0]
    if name in module.lora_variant and (_variant_name(module.lora_variant[name]) != DORA or _drops(module, name)):
        return None
    layer, a, b = module.base_layer, module.lora_A[name], module.lora_B[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return None
    if any(is_hooked(part) for part in (layer, a, b)) or is_dtensor(layer.weight) or is_dtensor(a.weight):
        return None
    if _is_4bit(layer):
        state = _quant_state(layer)  # it is quantised when it moves to the device
        stored = state is not None and not getattr(state, "packing_format_for_cpu", False)  # else in another order
        dtype_fits = stored and (torch.is_autocast_enabled(x.device.type) or a.weight.dtype == x.dtype)
    else:
        dtype_fits = torch.is_autocast_enabled(x.device.type) or x.dtype == layer.weight.dtype == a.weight.dtype
    # Without autocast, PEFT computes an fp32 adapter of a bf16 layer in fp32.
    return name if dtype_fits else None


def is_hooked(module: nn.Module) -> bool:
    """Whether something must run when this module is called."""
    return bool(hooks_of(module)) or "forward" in vars(module)
