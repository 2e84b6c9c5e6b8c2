"""PEFT's adapters on the three-dimensional weights of experts: the experts and their adapters as one op.

PEFT's `ParamWrapper` adds the adapters' products to the weights of all experts before each forward, and keeps the sums
for the backward. These are dense weights of every layer, where two small factors suffice. One wrapper adapts one
weight, so that the experts have a wrapper in a wrapper. The outer one calls the op.

PEFT's forward stays in charge of everything but the plain case, as in `lora.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from tigon.models.seams.base import PatchedModule, Seam, is_dtensor
from tigon.models.seams.experts import PROJECTIONS, Adapter, ExpertsOpSeam, run_experts, unit_of
from tigon.models.seams.lora import is_hooked

if TYPE_CHECKING:
    from peft.tuners.lora.layer import ParamWrapper

_EXPERTS = ExpertsOpSeam()


def is_wrapper(module: object) -> bool:
    """Whether it is PEFT's layer around one parameter. By name, so that PEFT is not imported for models without it."""
    return any(c.__name__ == "ParamWrapper" and c.__module__.startswith("peft.") for c in type(module).__mro__)


def factors(wrapper: ParamWrapper, name: str) -> Adapter:
    """The factors of one adapter, as views of its two matrices.

    PEFT stores A as (E · R, inputs) and B as (outputs, R · E). Its first releases with this layer took the last
    dimension of every weight for the outputs. For weights with one row per output the two then change places.
    """
    a, b, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a = a.reshape(experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    if not getattr(wrapper, "_did_swap_in_out_features", False) and not wrapper.get_base_layer().is_transposed:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return Adapter(a, b, float(wrapper.scaling[name]))


@dataclass(frozen=True)
class ExpertsLoraSeam(Seam):
    """Gives the adapters' factors to the op instead of adding their products to the weights."""

    op: ClassVar[str] = "experts"
    flag: ClassVar[str] = "experts"

    def candidate(self, module: nn.Module) -> bool:
        return is_wrapper(module) and _EXPERTS.candidate(_innermost(module))

    def objection(self, module: nn.Module) -> str | None:
        wrapper: Any = module
        if wrapper.parameter_name not in PROJECTIONS:
            return (
                f"its adapter is that of {wrapper.parameter_name}; the op has adapters of {' and '.join(PROJECTIONS)}"
            )
        experts = _innermost(module)
        return None if _runs_the_op(experts) else _EXPERTS.objection(experts)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Callable[..., Tensor] = base.forward

        def forward(self: ParamWrapper, x: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
            adapters = None if kwargs or len(args) != 2 else plain_adapters(self)
            if adapters is not None and not is_dtensor(x):
                index, weights = args
                return run_experts(_innermost(self), x, index, weights, adapters)
            try:
                return plain_forward(self, x, *args, **kwargs)
            finally:
                _remove_leftovers(_innermost(self), self.parameter_name)

        return {"forward": forward}


def _remove_leftovers(experts: nn.Module, name: str) -> None:
    """Remove the adapter that PEFT 0.21.2 leaves on a 4-bit weight after a forward; the next one would add to it."""
    parametrizations: Any = getattr(experts, "parametrizations", {})
    steps: Any = dict(parametrizations.items()).get(name, ())
    for at in reversed(range(len(steps))):
        if type(steps[at]).__name__ == "_LoraFactorsProxy":
            del steps[at]


def plain_adapters(wrapper: ParamWrapper) -> dict[str, Adapter] | None:
    """The adapter of each weight by its name, if the op can compute them now; None if not."""
    found: dict[str, Adapter] = {}
    layer, outer = wrapper, True
    while is_wrapper(layer):
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        name = layer.parameter_name
        if layer.disable_adapters or layer.merged or len(active) != 1 or name not in PROJECTIONS or name in found:
            return None
        a, b = layer.lora_A[active[0]], layer.lora_B[active[0]]
        if any(type(part) is not nn.Linear or part.bias is not None or is_hooked(part) for part in (a, b)):
            return None
        if is_dtensor(a.weight) or (not outer and is_hooked(layer)):
            return None
        found[name] = factors(layer, active[0])
        layer, outer = layer.base_layer, False
    if not _runs_the_op(layer) or unit_of(layer) is None or _is_hooked_by_others(layer):
        return None
    return None if any(is_dtensor(parameter) for parameter in layer.parameters()) else found


def _innermost(module: Any) -> Any:
    while is_wrapper(module):
        module = module.base_layer
    return module


def _runs_the_op(experts: Any) -> bool:
    patched = isinstance(experts, PatchedModule) and isinstance(experts._tigon_seam, ExpertsOpSeam)
    return patched or getattr(experts.config, "_experts_implementation", None) == "tigon"


def _is_hooked_by_others(experts: nn.Module) -> bool:
    """Whether a hook must run when the experts are called. Those of bitsandbytes cache what this seam does not read."""
    hooks = (*experts._forward_hooks.values(), *experts._forward_pre_hooks.values())
    others = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("bitsandbytes.")]
    return bool(others or experts._backward_hooks or experts._backward_pre_hooks or "forward" in vars(experts))
