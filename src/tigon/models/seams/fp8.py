"""The seam for linear layers whose products run in FP8. The weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import PatchedModule, Seam, is_dtensor
from tigon.ops.linear.fp8 import ALIGNMENT

# A router's scores decide which experts run, and its product is small.
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, kw_only=True)
class Fp8Seam(Seam):
    """torch's linear layer, also inside PEFT's layer around it."""

    op: ClassVar[str] = "fp8_linear"
    flag: ClassVar[str] = "fp8"

    scaling: str = "tensorwise"

    def candidate(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear

    def objection(self, module: nn.Module) -> str | None:
        odd = next((n for n in (module.in_features, module.out_features) if n % ALIGNMENT), None)  # type: ignore[operator]
        return None if odd is None else f"FP8 matmuls need widths that are multiples of {ALIGNMENT}, and it has {odd}"

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        scaling = self.scaling
        plain_forward: Callable[..., Tensor] = base.forward

        def forward(self: Any, input: Tensor) -> Tensor:
            if is_dtensor(self.weight):
                return plain_forward(self, input)
            return ops.fp8_linear(input, self.weight, self.bias, scaling=scaling)

        return {"forward": forward}


def is_router(path: str) -> bool:
    """Whether a linear layer chooses experts, by its name."""
    return path.rpartition(".")[2] in _ROUTERS


def fp8_scaling(layer: Any) -> str | None:
    """The scaling of a linear layer's FP8 matmuls; None if its matmuls are not in FP8."""
    seam = layer._tigon_seam if isinstance(layer, PatchedModule) else None
    return seam.scaling if isinstance(seam, Fp8Seam) else None
