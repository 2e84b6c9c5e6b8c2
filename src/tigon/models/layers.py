"""The seams inside the decoder layer: norm, gated MLP, rotary embedding.

Each reads what it needs from the module at every call (weights through their own modules, eps by name), so LoRA,
quantised projections, hooks and later edits of an attribute act as they do without tigon. Before a module is taken, its
own forward and the op are run on a few random numbers; a module that computes anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from tigon import ops
from tigon.models import probe
from tigon.models.rebind import owner_of, rebind
from tigon.models.seam import Seam

# Activation module, by class name -> the gated op. The names are those of torch.nn and of transformers' ACT2FN.
GATED_OPS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "SiLU": ops.swiglu,
        "SiLUActivation": ops.swiglu,
        "GELUActivation": partial(ops.geglu, approximate="none"),
        "GELUTanh": partial(ops.geglu, approximate="tanh"),
        "PytorchGELUTanh": partial(ops.geglu, approximate="tanh"),
    }
)


@dataclass(frozen=True, kw_only=True)
class NormSeam(Seam):
    """RMSNorm whose weight is `weight` and whose eps is an attribute."""

    op: ClassVar[str] = "rms_norm"
    flag: ClassVar[str] = "rms_norm"

    casting: Any = "llama"  # one of tigon.ops.rms_norm's
    offset: float = 0.0
    eps: str = "variance_epsilon"

    def candidate(self, module: nn.Module) -> bool:
        return any(cls.__name__.endswith("RMSNorm") for cls in type(module).__mro__)

    def objection(self, module: nn.Module) -> str | None:
        if not hasattr(module, self.eps):
            return f"it has no attribute {self.eps!r}"
        fused = self.namespace(type(module))["forward"]
        weight = {"weight": (probe.WIDTH,)}
        return probe.disagreement(module, probe.rows, fused, type(module).forward, parameters=weight)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        casting, offset, eps = self.casting, self.offset, self.eps

        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            return ops.rms_norm(hidden_states, self.weight, getattr(self, eps), offset=offset, casting=casting)

        return {"forward": forward}


@dataclass(frozen=True, kw_only=True)
class GatedMlpSeam(Seam):
    """down(act(gate(x)) * up(x)), the activation read from the module."""

    op: ClassVar[str] = "swiglu"
    flag: ClassVar[str] = "mlp"

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    act: str = "act_fn"

    def candidate(self, module: nn.Module) -> bool:
        return {self.gate, self.up, self.down} <= {name for name, _ in module.named_children()}

    def objection(self, module: nn.Module) -> str | None:
        act = type(getattr(module, self.act, None)).__name__
        if act not in GATED_OPS:
            return f"its activation {act} has no gated op; known are {', '.join(GATED_OPS)}"
        linears = {self.gate: (probe.WIDTH, 6), self.up: (probe.WIDTH, 6), self.down: (6, probe.WIDTH)}
        fused = self.namespace(type(module))["forward"]
        return probe.disagreement(module, probe.rows, fused, type(module).forward, linears=linears)

    def op_for(self, module: nn.Module) -> str:
        return "swiglu" if GATED_OPS[type(getattr(module, self.act)).__name__] is ops.swiglu else "geglu"

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        gate, up, down, act = self.gate, self.up, self.down, self.act
        plain_forward: Callable[[Any, Tensor], Tensor] = base.forward

        def forward(self: Any, x: Tensor) -> Tensor:
            gated = GATED_OPS.get(type(getattr(self, act)).__name__)
            if gated is None:  # the activation was exchanged after the patch
                return plain_forward(self, x)
            return getattr(self, down)(gated(getattr(self, gate)(x), getattr(self, up)(x)))  # type: ignore[no-any-return]

        return {"forward": forward}


@dataclass(frozen=True, kw_only=True)
class RopeSeam(Seam):
    """An attention module whose forward calls the global function `function(q, k, cos, sin)` of its modeling module."""

    op: ClassVar[str] = "rope"
    flag: ClassVar[str] = "rope"

    function: str = "apply_rotary_pos_emb"
    interleaved: bool = False

    def candidate(self, module: nn.Module) -> bool:
        return owner_of(type(module).forward, self.function) is not None

    def objection(self, module: nn.Module) -> str | None:
        owner = owner_of(type(module).forward, self.function)
        assert owner is not None  # candidate() said so
        original, fused = owner.__globals__[self.function], self._fused()
        return probe.disagreement(
            nn.Module(), probe.rotary, lambda _, *qkcs: fused(*qkcs), lambda _, *qkcs: original(*qkcs)
        )

    def _fused(self) -> Callable[..., tuple[Tensor, Tensor]]:
        interleaved = self.interleaved

        def apply_rotary_pos_emb(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
        ) -> tuple[Tensor, Tensor]:
            return ops.rope(q, k, cos, sin, interleaved=interleaved, unsqueeze_dim=unsqueeze_dim)

        return apply_rotary_pos_emb

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        owner = owner_of(base.forward, self.function)
        assert owner is not None and isinstance(base.forward, FunctionType)
        return {"forward": rebind(base.forward, owner, {self.function: self._fused()})}
