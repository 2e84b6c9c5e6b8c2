"""The seams for RMSNorm and LayerNorm.

Weight, bias and eps are read from the module at every call, so hooks, adapters and later edits work as without tigon.
The differences between families are fields: where the value is rounded, the offset of the weight, and the name of eps.
A comparison of results decides whether the fields fit a module.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.verification import probe
from tigon.ops import dispatch
from tigon.ops.norms.rms_norm import Casting

_FINDS_AMAX = "_tigon_finds_amax"
_NOT_OVER_THE_LAST_DIMENSION = re.compile("Batch|Group|Instance|Conv|2d|2D")


def _norm_names(module: nn.Module) -> list[str]:
    """The class names with "norm" in them of a module without children."""
    if next(module.children(), None) is not None:
        return []
    names = [cls.__name__ for cls in type(module).__mro__ if "norm" in cls.__name__.lower()]
    return [name for name in names if not _NOT_OVER_THE_LAST_DIMENSION.search(name)]


def mark_finds_amax(norms: Iterable[nn.Module], finds: bool) -> None:
    """Whether these norms find the largest magnitudes of their results, because FP8 layers read them."""
    for norm in norms:
        if finds:
            vars(norm)[_FINDS_AMAX] = True
        else:
            vars(norm).pop(_FINDS_AMAX, None)


def finds_amax(norm: nn.Module) -> dict[str, bool]:
    """The keyword of `rms_norm` with which a marked norm finds them; empty for other norms."""
    return {"find_amax": True} if _FINDS_AMAX in vars(norm) else {}


@dataclass(frozen=True, kw_only=True)
class _NormSeam(Seam):
    eps: str | tuple[str, ...] | float
    """The name of the attribute with eps, or several names of which the first existing one is used, or eps itself."""

    def objection(self, module: nn.Module) -> str | None:
        if len(inspect.signature(type(module).forward).parameters) != 1 + len(self._rows()):
            return "its forward takes more than the hidden states"
        if not isinstance(self._eps_of(module), (int, float)):
            return f"it has no number called {' or '.join(self._eps_names)}"
        wide = [name for name, p in module.named_parameters(recurse=False) if p.ndim != 1 and p.numel()]
        if wide:
            return f"its {wide[0]} has {getattr(module, wide[0]).ndim} dimensions; the op takes one"
        if not module._buffers.keys().isdisjoint(("weight", "bias")):
            return "its weight is a buffer, which its forward may not use"
        present = [name for name in ("weight", "bias") if module._parameters.get(name) is not None]
        shapes = dict.fromkeys(present, (probe.WIDTH,))
        make = partial(
            probe.make_stand_in, module, shapes, attributes={"normalized_shape": (probe.WIDTH,), **self._sizes()}
        )
        fused, original = self.namespace(type(module))["forward"], type(module).forward
        return probe.disagreement(make, self._rows, fused, original) or self._rounds_elsewhere(make, fused, original)

    def _rows(self) -> tuple[Tensor, ...]:
        """Arguments of the module's forward, for the comparison."""
        return probe.rows()

    def _sizes(self) -> dict[str, Any]:
        """Attributes of the stand-in that follow from its width."""
        return {}

    def _rounds_elsewhere(
        self, make: Callable[[], nn.Module], fused: Callable[..., Any], original: Callable[..., Any]
    ) -> str | None:
        return None

    @property
    def _eps_names(self) -> tuple[str, ...]:
        if isinstance(self.eps, float):
            return ()
        return (self.eps,) if isinstance(self.eps, str) else self.eps

    def _eps_of(self, module: nn.Module) -> Any:
        """The module's current eps, or None."""
        if isinstance(self.eps, float):
            return self.eps
        values = [getattr(module, name) for name in self._eps_names if hasattr(module, name)]
        return values[0] if values else None


@dataclass(frozen=True, kw_only=True)
class NormSeam(_NormSeam):
    """RMSNorm, with or without a weight."""

    op: ClassVar[str] = "rms_norm"
    flag: ClassVar[str] = "rms_norm"

    eps: str | tuple[str, ...] | float = "variance_epsilon"
    casting: Casting = "llama"
    offset: float = 0.0

    def candidate(self, module: nn.Module) -> bool:
        return bool(_norm_names(module))

    def _rounds_elsewhere(
        self, make: Callable[[], nn.Module], fused: Callable[..., Any], original: Callable[..., Any]
    ) -> str | None:
        if dispatch.INTERPRET:  # Triton's interpreter truncates bf16; hardware rounds
            return None
        return probe.rounding_disagreement(make, probe.many_rows, fused, original)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        seam, casting, offset = self, self.casting, self.offset
        plain_forward: Callable[[Any, Tensor], Tensor] = base.forward

        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            weight = getattr(self, "weight", None)
            if is_dtensor(hidden_states) or is_dtensor(weight):
                return plain_forward(self, hidden_states)
            eps, fp8 = seam._eps_of(self), finds_amax(self)
            return ops.rms_norm(hidden_states, weight, eps, offset=offset, casting=casting, **fp8)

        return {"forward": forward}


@dataclass(frozen=True, kw_only=True)
class GatedNormSeam(_NormSeam):
    """RMSNorm and a gate, as after a gated delta rule or a Mamba 2 scan.

    The module's `activation`, `group_size`, `n_groups` and `norm_before_gate` are read if it has them.
    """

    op: ClassVar[str] = "gated_rms_norm"
    flag: ClassVar[str] = "rms_norm"

    eps: str | tuple[str, ...] | float = "variance_epsilon"
    gate_first: bool = False
    """The gate is multiplied before the norm, if the module does not say so itself."""

    def candidate(self, module: nn.Module) -> bool:
        named = bool(_norm_names(module)) and getattr(module, "weight", None) is not None
        return named and list(inspect.signature(type(module).forward).parameters)[2:] == ["gate"]

    def _rows(self) -> tuple[Tensor, ...]:
        return *probe.rows(), probe.random(3, probe.WIDTH, seed=3).requires_grad_()

    def _sizes(self) -> dict[str, Any]:
        return {"group_size": probe.WIDTH // 2, "n_groups": 2}

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        seam = self
        plain_forward: Callable[..., Tensor] = base.forward

        def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            if gate is None or any(is_dtensor(x) for x in (hidden_states, gate, self.weight)):
                return plain_forward(self, hidden_states, gate)
            return ops.gated_rms_norm(
                hidden_states,
                gate.reshape(hidden_states.shape),
                self.weight,
                seam._eps_of(self),
                activation=getattr(self, "activation", "silu"),
                gate_first=not getattr(self, "norm_before_gate", not seam.gate_first),
                groups=_groups(self),
            )

        return {"forward": forward}


def _groups(norm: Any) -> int:
    """The number of groups that a gated norm normalises by themselves."""
    width = norm.weight.numel()
    return int(getattr(norm, "n_groups", None) or width // getattr(norm, "group_size", width))


@dataclass(frozen=True, kw_only=True)
class LayerNormSeam(_NormSeam):
    """LayerNorm over the last dimension, with or without weight and bias."""

    op: ClassVar[str] = "layer_norm"
    flag: ClassVar[str] = "layer_norm"

    eps: str | tuple[str, ...] | float = "eps"
    offset: float = 0.0

    def candidate(self, module: nn.Module) -> bool:
        names = _norm_names(module)
        return bool(names) and not any("RMS" in name for name in names)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        seam, offset = self, self.offset
        plain_forward: Callable[[Any, Tensor], Tensor] = base.forward
        widens = base.forward is nn.LayerNorm.forward

        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
            if is_dtensor(hidden_states) or is_dtensor(weight):
                return plain_forward(self, hidden_states)
            x = hidden_states
            if widens and x.is_cuda and torch.is_autocast_enabled("cuda"):
                x = x.float()  # under autocast, PyTorch's layer_norm does this too and returns fp32
            if weight is not None and offset:
                weight = weight + offset
            return ops.layer_norm(x, weight, bias, seam._eps_of(self))

        return {"forward": forward}
