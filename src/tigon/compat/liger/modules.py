"""Liger's norms, MLPs and experts as modules: its constructors, attributes and parameter names on tigon's ops.

`isinstance(module, LigerRMSNorm)` is also true for a norm that tigon has patched, because Liger replaces the model's
class by its own. The patched module keeps the class and the attributes of the model.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.compat.liger.errors import FlagConflict, no_implementation
from tigon.compat.liger.layers import fused_add_rms_norm, rms_norm
from tigon.compat.liger.rows import form
from tigon.errors import OptionError
from tigon.models.seams.base import PatchedModule
from tigon.models.seams.mlp import GatedMlpSeam
from tigon.nn import GeGLUMLP, SwiGLUMLP
from tigon.ops.glu import Approximate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class _StandsForPatched(abc.ABCMeta):
    """Metaclass of a Liger class whose `stands_for` names the patched modules that count as its instances.

    An ABCMeta, so that a user's class can inherit from a Liger module and an abstract class, as with Liger itself.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        stands_for = vars(cls).get("stands_for")  # not inherited, so a user's subclass matches no patched module
        return isinstance(instance, PatchedModule) and stands_for == _op_of(instance)


def _op_of(module: PatchedModule) -> str:
    """The op that a patched module runs; "packed" precedes it for an MLP with one projection for gate and up."""
    seam = module._tigon_seam
    if not isinstance(seam, GatedMlpSeam):
        return str(seam.op)
    return f"packed {seam.op_for(module)}" if seam.packed else seam.op_for(module)


# --- norms ------------------------------------------------------------------------------------------------------------


def _initial_weight(size: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise FlagConflict(f"init_fn={init_fn!r} is not known; choose ones or zeros.")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class _RMSNorm(nn.Module):
    """The attributes that both RMSNorms show."""

    variance_epsilon: float
    offset: float
    casting_mode: str

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNorm(_RMSNorm, metaclass=_StandsForPatched):
    """`tigon.rms_norm` over the last dimension. `in_place` and `row_mode` are kept as attributes only."""

    stands_for = "rms_norm"
    tigon_flag: ClassVar[str] = "rms_norm"
    """The flag of `tigon.patch` that such a module in a model satisfies."""
    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        self.register_parameter("weight", _initial_weight(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)


def _norm_of_family(name: str, line: str) -> type:
    """`LigerRMSNorm` with the defaults of a model family."""
    body = {"__init__": form(LigerRMSNorm.__init__, f"self {line}"), "__doc__": LigerRMSNorm.__doc__}
    return _StandsForPatched(name, (LigerRMSNorm,), {**body, "__module__": __name__})


_GEMMA = "eps offset=1.0 casting_mode='gemma' init_fn='zeros'"
_GEMMA4 = "eps offset casting_mode='gemma' init_fn in_place=False with_scale:elementwise_affine=True"
_OLMO2 = "hidden_size eps offset casting_mode init_fn in_place=False row_mode"
LigerRMSNormForGemma = _norm_of_family("LigerRMSNormForGemma", f"hidden_size {_GEMMA} in_place row_mode")
LigerRMSNormForGemma2 = _norm_of_family("LigerRMSNormForGemma2", f"hidden_size {_GEMMA} in_place=False row_mode")
LigerRMSNormForGemma3 = _norm_of_family("LigerRMSNormForGemma3", f"dim:hidden_size {_GEMMA} in_place=False")
LigerRMSNormForGemma4 = _norm_of_family("LigerRMSNormForGemma4", f"dim:hidden_size {_GEMMA4}")
LigerRMSNormForGlm4 = _norm_of_family("LigerRMSNormForGlm4", _OLMO2)
LigerRMSNormForOlmo2 = _norm_of_family("LigerRMSNormForOlmo2", _OLMO2)
LigerRMSNormForQwen3Next = _norm_of_family("LigerRMSNormForQwen3Next", f"hidden_size {_GEMMA} in_place=False row_mode")


class LigerFusedAddRMSNorm(_RMSNorm):
    """`tigon.add_rms_norm`: (normed, hidden_states + residual)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.weight = _initial_weight(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module, metaclass=_StandsForPatched):
    """`tigon.layer_norm`. As in Liger, the `bias` parameter always exists; it starts at 0."""

    stands_for = "layer_norm"
    tigon_flag: ClassVar[str] = "layer_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: object = None,
        mode: object = None,
        backend: object = None,
    ) -> None:
        super().__init__()
        no_implementation(impl=impl, mode=mode, backend=backend)
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _initial_weight(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


# --- MLPs and experts -------------------------------------------------------------------------------------------------

# Names of transformers' ACT2FN -> the form of gelu they stand for.
_GELUS: dict[str, Approximate] = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
}


def _require_silu(config: PreTrainedConfig) -> None:
    """Refuse a config whose `hidden_act` (`hidden_activation` in some families) is not silu."""
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in ("silu", "swish"):
        raise OptionError(f"hidden_act={name!r}: a SwiGLU MLP needs silu; use LigerGEGLUMLP for gelu.")


class LigerSwiGLUMLP(SwiGLUMLP, metaclass=_StandsForPatched):
    """down_proj(silu(gate_proj(x)) · up_proj(x)), without biases."""

    stands_for = "swiglu"

    def __init__(self, config: PreTrainedConfig, intermediate_size: int | None = None) -> None:
        _require_silu(config)
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        super().__init__(config.hidden_size, width)
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, width


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`."""


class LigerGEGLUMLP(GeGLUMLP, metaclass=_StandsForPatched):
    """down_proj(gelu(gate_proj(x)) · up_proj(x)), without biases, with the form of gelu that the config names.

    Liger ignores the config and always computes the tanh form.
    """

    stands_for = "geglu"

    def __init__(self, config: PreTrainedConfig) -> None:
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        if name not in _GELUS:
            raise OptionError(f"activation {name!r}: a GeGLU MLP needs gelu; choose one of {', '.join(_GELUS)}.")
        super().__init__(config.hidden_size, config.intermediate_size, approximate=_GELUS[name])
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size


class LigerPhi3SwiGLUMLP(nn.Module, metaclass=_StandsForPatched):
    """down_proj(silu(gate) · up) with one projection for both; its halves are read in place."""

    stands_for = "packed swiglu"
    tigon_flag: ClassVar[str] = "mlp"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        _require_silu(config)
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) · w3(x)): one expert of transformers 4."""

    tigon_flag: ClassVar[str] = "mlp"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        _require_silu(config)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))  # type: ignore[no-any-return]


class LigerExperts(nn.Module):
    """The experts of transformers 5 in its 3-D layout. Their weights are uninitialised, as in transformers."""

    tigon_flag: ClassVar[str] = "mlp"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        _require_silu(config)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(getattr(config, name) for name in names if hasattr(config, name))
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        K = top_k_index.shape[-1]
        rows = hidden_states.reshape(-1, self.hidden_dim)
        index, weights = top_k_index.reshape(-1, K), top_k_weights.reshape(-1, K)
        return ops.experts(rows, index, weights, self.gate_up_proj, self.down_proj).view(hidden_states.shape)
