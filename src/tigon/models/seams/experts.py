"""The experts of a mixture as one op, for modules of transformers' experts interface.

The interface gives a module its weights in three dimensions and flags for their layout. A module's gated unit is read
from its attributes and compared with its own `_apply_gate`, so a unit that no `ExpertUnit` describes is refused.

A weight may be stored in 4 bits, by bitsandbytes' parametrization or in MXFP4. The op dequantises it for one product at
a time. PEFT adds an adapter as a parametrization too, for one forward. The op reads its two factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.errors import PatchError
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.seams.mlp import gated_op, no_op_for
from tigon.models.verification import probe
from tigon.ops import ExpertUnit

_ACTIVATION_OF = {"tanh": "gelu_tanh", "none": "gelu"}


def _activation(module: nn.Module) -> str | None:
    """The name of the module's activation in `ExpertUnit`; silu if its code calls silu directly."""
    act = getattr(module, "act_fn", None)
    if act is None:
        return "silu"
    gated = gated_op(act)
    if gated is None or gated is ops.swiglu:
        return None if gated is None else "silu"
    return _ACTIVATION_OF[gated.keywords["approximate"]]  # type: ignore[attr-defined]


def unit_of(module: nn.Module) -> ExpertUnit | None:
    """The gated unit that the module's attributes describe, or None."""
    activation = _activation(module)
    if activation is None:
        return None
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    return ExpertUnit(
        activation=activation,
        alpha=1.0 if alpha is None else float(alpha),
        limit=math.inf if limit is None else float(limit),
        up_offset=0.0 if alpha is None else 1.0,
        interleaved=not module.is_concatenated,
    )


def _rows() -> tuple[Tensor]:
    """Rows of gate and up, some of them beyond any limit."""
    return (torch.cat([probe.random(3, 8, seed=1), 20.0 * probe.random(3, 8, seed=2)]).requires_grad_(),)


def unit_objection(module: nn.Module) -> str | None:
    """Why the op cannot compute this module's experts, or None."""
    if not getattr(module, "has_gate", True):
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm behind them"
    unit = unit_of(module)
    if unit is None:
        return no_op_for(module.act_fn)
    own = getattr(type(module), "_apply_gate")  # noqa: B009
    return probe.disagreement(partial(probe.make_stand_in, module), _rows, lambda _, pre: unit(pre), own)


@dataclass(frozen=True)
class Adapter:
    """The low-rank factors of one projection's adapter."""

    a: Tensor
    """(E, R, inputs)."""
    b: Tensor
    """(E, outputs, R)."""
    scaling: float


PROJECTIONS = ("gate_up_proj", "down_proj")


def run_experts(
    module: Any,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: Mapping[str, Adapter] | None = None,
) -> Tensor:
    """The op on the weights of a module of the interface. adapters: those of its projections, by the weight's name."""
    unit = unit_of(module)
    if unit is None:
        raise PatchError(f"tigon's experts: {type(module).__name__} cannot run: {no_op_for(module.act_fn)}.")
    weights, found = [], dict(adapters or {})
    for name in PROJECTIONS:
        weight, adapter = _stored(module, name)
        weights.append(weight)
        if adapter is not None:
            found[name] = adapter
    lora: dict[str, Any] = {}
    for name, adapter in found.items():
        of = name.removesuffix("_proj")
        lora |= {f"{of}_lora_a": adapter.a, f"{of}_lora_b": adapter.b, f"{of}_scaling": adapter.scaling}
    return ops.experts(
        hidden,
        top_k_index,
        top_k_weights,
        *weights,
        unit=unit,
        gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        transposed=module.is_transposed,
        **lora,
    )


def _stored(module: Any, name: str) -> tuple[Tensor | Callable[[], Tensor], Adapter | None]:
    """(the weight, or a function that dequantises it; the adapter that PEFT has added for this forward)."""
    if name not in getattr(module, "parametrizations", ()):
        return getattr(module, name), None
    stored = module.parametrizations[name]
    steps, weight = list(stored), getattr(stored, "original", None)
    if steps and is_dequantisation(steps[0]):
        weight = partial(steps.pop(0), weight)
    if weight is None or len(steps) > 1 or any(type(step).__name__ != "_LoraFactorsProxy" for step in steps):
        return getattr(module, name), None  # another package's parametrization
    if not steps:
        return weight, None
    left, right, scaling = steps[0].lhs, steps[0].rhs, steps[0].scaling  # their product has the weight's layout
    if module.is_transposed:
        left, right = right.transpose(1, 2), left.transpose(1, 2)
    return weight, Adapter(right, left, scaling)


def is_dequantisation(step: object) -> bool:
    """Whether a parametrization makes a dense weight: that of bitsandbytes' 4-bit weights, or of MXFP4."""
    return type(step).__name__ in ("Bnb4bitParametrization", "Mxfp4Parametrization")


def _plain(module: nn.Module) -> nn.Module:
    """The module without its parametrizations, for stand-ins: torch has given it a class whose weights are computed."""
    if "parametrizations" not in module._modules:
        return module
    computed = [c for c in type(module).__mro__ if c.__name__.startswith("Parametrized")]
    plain: nn.Module = object.__new__(computed[-1].__bases__[0])
    vars(plain).update(vars(module))
    vars(plain)["_modules"] = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    return plain


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The implementation "tigon" of transformers' experts interface.

    Raises:
        PatchError: the module's experts are not those of the op. The message says how they differ.
    """
    if not torch.compiler.is_compiling():  # a comparison of numbers has no place in a graph
        _check_once(self)
    return run_experts(self, hidden_states, top_k_index, top_k_weights)


def _check_once(module: nn.Module) -> None:
    # not a parametrized class, which holds its module
    key = (type(_plain(module)), unit_of(module), bool(module.has_gate))
    if key not in _checked:
        objection = unit_objection(module)
        if objection is not None:
            raise PatchError(
                f'experts_implementation="tigon" cannot run {type(module).__name__}: {objection}. '
                'Call set_experts_implementation("grouped_mm").'
            )
        _checked.add(key)


_checked: set[tuple[type, ExpertUnit | None, bool]] = set()


@dataclass(frozen=True)
class ExpertsOpSeam(Seam):
    """Calls the op instead of the implementation that the config names."""

    op: ClassVar[str] = "experts"
    flag: ClassVar[str] = "experts"

    def candidate(self, module: nn.Module) -> bool:
        return hasattr(module, "is_transposed") and callable(getattr(type(module), "_apply_gate", None))

    def objection(self, module: nn.Module) -> str | None:
        module = _plain(module)
        objection = unit_objection(module)
        if objection is not None:
            return objection
        attributes = {"num_experts": _EXPERTS}
        make = partial(probe.make_stand_in, module, parameters=_shapes(module), attributes=attributes)
        fused, forward = self.namespace(type(module))["forward"], type(module).forward
        return probe.disagreement(make, _probe_inputs, fused, forward)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Callable[..., Tensor] = base.forward

        def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if unit_of(self) is None or is_dtensor(hidden_states) or any(is_dtensor(p) for p in self.parameters()):
                return plain_forward(self, hidden_states, top_k_index, top_k_weights)
            return run_experts(self, hidden_states, top_k_index, top_k_weights)

        return {"forward": forward}


_EXPERTS, _INNER = 3, 4


def _shapes(module: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """The stand-in's weights, in the module's layout."""
    up, down = (2 * _INNER, probe.WIDTH), (probe.WIDTH, _INNER)
    if module.is_transposed:
        up, down = up[::-1], down[::-1]
    shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (_EXPERTS, *up), "down_proj": (_EXPERTS, *down)}
    if module.has_bias:
        shapes |= {"gate_up_proj_bias": (_EXPERTS, 2 * _INNER), "down_proj_bias": (_EXPERTS, probe.WIDTH)}
    return shapes


def _probe_inputs() -> tuple[Tensor, ...]:
    hidden = probe.random(5, probe.WIDTH, seed=1).requires_grad_()
    index = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    return hidden, index, probe.random(5, 2, seed=3).abs().requires_grad_()
