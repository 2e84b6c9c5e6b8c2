"""The seams for gated MLPs: act(gate) · up in one pass, for any names of the projections.

The projections are called as modules, so LoRA, quantised weights and hooks on them work as without tigon. The
activation is a part of the op and is not called. If it has hooks, the module runs its own forward instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import Seam, is_dtensor, runs_more_than_its_class
from tigon.models.seams.fp8 import fp8_scaling
from tigon.models.verification import probe
from tigon.ops.glu import alone

Gated = Callable[..., Tensor]
_GELU_ERF, _GELU_TANH = partial(ops.geglu, approximate="none"), partial(ops.geglu, approximate="tanh")

# Activation module, by class name -> the gated op. The names are those of torch.nn and of transformers' ACT2FN.
# A dict, because Dynamo breaks the graph at a MappingProxyType.
GATED_OPS: Mapping[str, Gated] = {
    "SiLU": ops.swiglu,
    "SiLUActivation": ops.swiglu,
    "GELUActivation": _GELU_ERF,
    "GELUTanh": _GELU_TANH,
    "PytorchGELUTanh": _GELU_TANH,
    "NewGELUActivation": _GELU_TANH,
    "FastGELUActivation": _GELU_TANH,
}


def gated_op(activation: object) -> Gated | None:
    """The op for an activation module, or None. With hooks there is none, because an op would skip them."""
    if isinstance(activation, nn.Module) and runs_more_than_its_class(activation):
        return None
    if isinstance(activation, nn.GELU):
        return _GELU_ERF if activation.approximate == "none" else _GELU_TANH
    return GATED_OPS.get(type(activation).__name__)


def _name_of(gated: Gated | None) -> str:
    return "swiglu" if gated is ops.swiglu else "geglu"


def no_op_for(activation: object) -> str:
    """Why `gated_op` gives no op for this activation."""
    if activation is None:
        return "its gate is a formula in its forward, not an activation module"
    if isinstance(activation, nn.Module) and runs_more_than_its_class(activation):
        return f"its activation {type(activation).__name__} has a hook or its own forward, which an op would skip"
    return f"its activation {type(activation).__name__} has no gated op; known are {', '.join(GATED_OPS)}"


@dataclass(frozen=True, kw_only=True)
class GatedMlpSeam(Seam):
    """down(act(gate(x)) · up(x)); the activation is read from the module.

    With `packed`, one projection computes both halves, [gate | up], which are read in place.
    """

    op: ClassVar[str] = "swiglu"
    flag: ClassVar[str] = "mlp"

    gate: str = "gate_proj"
    up: str = "up_proj"
    packed: str | None = None
    down: str = "down_proj"
    act: str | None = "act_fn"
    """The attribute of the activation; None if the family's code calls silu directly."""
    gate_scale: str | None = None
    """An attribute that multiplies gate before the activation."""
    down_scale: str | None = None
    """An attribute that multiplies the result."""

    @property
    def _projections(self) -> tuple[str, ...]:
        return (self.gate, self.up) if self.packed is None else (self.packed,)

    def candidate(self, module: nn.Module) -> bool:
        names = {*self._projections, self.down}
        attributes = [name for name in (self.act, self.gate_scale, self.down_scale) if name is not None]
        children = {name for name, _ in module.named_children()}
        return names <= children and all(hasattr(module, name) for name in attributes)

    def objection(self, module: nn.Module) -> str | None:
        if self._gated(module) is None:
            return no_op_for(getattr(module, self.act or "", None))
        inner = 6
        wide = inner if self.packed is None else 2 * inner
        linears = {**dict.fromkeys(self._projections, (probe.WIDTH, wide)), self.down: (inner, probe.WIDTH)}
        make = partial(probe.make_stand_in, module, linears=linears)
        return probe.disagreement(make, probe.rows, self.namespace(type(module))["forward"], type(module).forward)

    def op_for(self, module: nn.Module) -> str:
        return _name_of(self._gated(module))

    def _gated(self, module: Any) -> Gated | None:
        return ops.swiglu if self.act is None else gated_op(getattr(module, self.act, None))

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        seam = self
        gate, up, packed, down = self.gate, self.up, self.packed, self.down
        gate_scale, down_scale = self.gate_scale, self.down_scale
        plain_forward: Callable[[Any, Tensor], Tensor] = base.forward

        def forward(self: Any, x: Tensor) -> Tensor:
            gated = seam._gated(self)
            if gated is None:  # the activation was replaced or given a hook after the patch
                return plain_forward(self, x)
            g = getattr(self, gate if packed is None else packed)(x)
            if is_dtensor(g):
                return plain_forward(self, x)
            if gate_scale is not None:
                g = g * getattr(self, gate_scale)
            # FP8 layers read the result and the gradients, and need their largest magnitudes.
            fp8 = {"find_amax": True} if fp8_scaling(getattr(self, down)) == "tensorwise" else {}
            if packed is not None:
                inplace = alone(g)
                y = gated(g, inplace=inplace, **fp8)
            else:
                u = getattr(self, up)(x)
                inplace = alone(g) and alone(u)
                y = gated(g, u, inplace=inplace, **fp8)
                del u
            del g  # without gradients, this frees gate and up before the down projection
            z: Tensor = getattr(self, down)(y)
            return z if down_scale is None else z * getattr(self, down_scale)

        return {"forward": forward}


@dataclass(frozen=True, kw_only=True)
class ExpertsSeam(Seam):
    """The experts of a mixture, whose gate and up projections are one (experts, 2F, H) parameter.

    transformers has several implementations (`grouped_mm`, `batched_mm`, ...), which all call the method `_apply_gate`
    with a packed (tokens, 2F). This seam replaces that method. The `eager` loop over experts calls it only in some
    families; in the others the seam does not change the eager loop.
    """

    op: ClassVar[str] = "swiglu"
    flag: ClassVar[str] = "mlp"

    act: str = "act_fn"

    def candidate(self, module: nn.Module) -> bool:
        return callable(getattr(type(module), "_apply_gate", None))

    def objection(self, module: nn.Module) -> str | None:
        if not getattr(module, "has_gate", True):
            return "its experts have no gate"
        if getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager":
            return "its experts run as transformers' eager loop, which has no seam; set_experts_implementation first"
        activation = getattr(module, self.act, None)
        if gated_op(activation) is None:
            return no_op_for(activation)
        fused, original = self.namespace(type(module))["_apply_gate"], getattr(type(module), "_apply_gate")  # noqa: B009
        return probe.disagreement(partial(probe.make_stand_in, module), probe.rows, fused, original)

    def op_for(self, module: nn.Module) -> str:
        return _name_of(gated_op(getattr(module, self.act, None)) or ops.swiglu)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        act = self.act
        plain: Callable[[Any, Tensor], Tensor] = getattr(base, "_apply_gate")  # noqa: B009

        def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
            gated = gated_op(getattr(self, act, None))
            return plain(self, gate_up) if gated is None or is_dtensor(gate_up) else gated(gate_up)

        return {"_apply_gate": _apply_gate}
