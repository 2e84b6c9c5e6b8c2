"""The seam for the short convolution of hybrid models: a layer whose forward calls the global `causal_conv1d_fn`.

transformers binds that name to causal-conv1d's kernel if it is installed, and to PyTorch's convolution otherwise. The
op takes the place of PyTorch's. The layer's forward is rebuilt with the op under that name (`rebind.py`), and whatever
the op does not do runs the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor, nn

from tigon import ops
from tigon.models import hybrid_layers
from tigon.models.hybrid_layers import CONVOLUTION, DELTA_RULE, PYTORCH, runs_in
from tigon.models.seams import delta_rule
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.seams.rebind import Forward, owner_of, rebind
from tigon.models.verification import probe
from tigon.ops.causal_conv1d import MAX_TAPS, ConvActivation

NAME = CONVOLUTION.function
_ACTIVATIONS: Mapping[str | None, ConvActivation | None] = {None: None, "silu": "silu", "swish": "silu"}
_CHANNELS, _TOKENS = 6, 9


def function_of(module_class: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The convolution that the forward of a class calls, or None."""
    forward = module_class.forward
    owner = owner_of(forward, NAME)
    return None if owner is None else owner.__globals__[NAME]


_STATES = ("initial_states", "return_final_states", "final_states_out")
"""Arguments of causal-conv1d that the op does not take. Models hand over others, which no convolution reads."""


def convolution(
    original: Callable[..., Tensor],
    x_BDT: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """transformers' `causal_conv1d_fn`, which takes the channels before the tokens: a view of what the op takes."""
    fits = activation in _ACTIVATIONS and weight.shape[1] <= MAX_TAPS and x_BDT.ndim == 3
    fits = fits and rest.keys().isdisjoint(_STATES)
    if not fits or is_dtensor(x_BDT) or is_dtensor(weight):
        more = {} if seq_idx is None else {"seq_idx": seq_idx}
        return original(x_BDT, weight, bias, activation, **more, **rest)
    x_BTD, silu = x_BDT.transpose(1, 2), _ACTIVATIONS[activation]
    return ops.causal_conv1d(x_BTD, weight, bias, activation=silu, seq_idx=seq_idx).transpose(1, 2)


@functools.cache
def fused(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The convolution with the op; one object for each original."""
    return functools.partial(convolution, original)


@dataclass(frozen=True)
class ConvolutionSeam(Seam):
    """A layer whose short convolution or gated delta rule PyTorch runs, or a library that cannot train.

    rule: whether the layer's gated delta rule becomes tigon's op.
    convolves: whether its convolution does.
    """

    rule: bool = False
    convolves: bool = True
    op: ClassVar[str] = "causal_conv1d"
    flag: ClassVar[str] = "convolution"

    def candidate(self, module: nn.Module) -> bool:
        forward = type(module).forward
        fits = isinstance(forward, FunctionType) and function_of(type(module)) is not None
        return fits and (not self.rule or owner_of(forward, delta_rule.NAME) is not None)

    def code(self, module: nn.Module) -> Callable[..., Any]:
        return function_of(type(module)) or type(module).forward

    def ops_for(self, module: nn.Module) -> tuple[str, ...]:
        return (*(["gated_delta_rule"] if self.rule else []), *([self.op] if self.convolves else []))

    def objection(self, module: nn.Module) -> str | None:
        if self.rule and (reason := rule_objection(module)):
            return reason
        return self._objection_to_convolution(module) if self.convolves else None

    def _objection_to_convolution(self, module: nn.Module) -> str | None:
        runs = runs_in(CONVOLUTION, type(module))
        if runs != PYTORCH:
            return f"{runs} runs its convolution"
        original = self.code(module)
        for width, silu in ((4, "silu"), (3, None)):
            reason = probe.disagreement(
                nn.Module,
                functools.partial(_inputs, width),
                lambda _, *given, silu=silu: fused(original)(*given, activation=silu),
                lambda _, *given, silu=silu: original(*given, activation=silu),
            )
            if reason is not None:
                return reason
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        forward: Forward = base.forward
        owner = owner_of(forward, NAME)
        assert owner is not None  # candidate() would have said so
        replacements: dict[str, Any] = {}
        if self.convolves:
            replacements[NAME] = fused(owner.__globals__[NAME])
        if self.rule:
            replacements[delta_rule.NAME] = delta_rule.fused(owner.__globals__[delta_rule.NAME])
        return {"forward": rebind(forward, owner, replacements)}


def rule_objection(module: nn.Module) -> str | None:
    """Why the gated delta rule of a layer stays, or None."""
    runs = runs_in(DELTA_RULE, type(module))
    if runs != PYTORCH and hybrid_layers.refused_on() is None:
        return f"{runs} runs its gated delta rule"
    if (reason := hybrid_layers.rule_objection(getattr(module, "head_k_dim", 0))) is not None:
        return reason
    owner = owner_of(type(module).forward, delta_rule.NAME)
    assert owner is not None  # candidate() would have said so
    return delta_rule.objection(owner.__globals__[delta_rule.NAME])


def _inputs(width: int) -> tuple[Tensor, ...]:
    """x (2, D, T), weight (D, width) and bias (D,)."""
    shapes = ((2, _CHANNELS, _TOKENS), (_CHANNELS, width), (_CHANNELS,))
    return tuple(probe.random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes, start=1))
