"""Liger's modules: tigon's ops with Liger's constructors, attributes and parameter names.

`isinstance(module, LigerRMSNorm)` is also true for a norm that tigon has patched, because Liger replaces the model's
class by its own. The patched module keeps the class and the attributes of the model.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.ops import functions as f
from tigon.compat.liger.ops import losses
from tigon.compat.liger.ops.losses import CrossEntropyOutput, Options
from tigon.errors import OptionError
from tigon.models.seams.base import PatchedModule, Seam
from tigon.models.seams.mlp import GatedMlpSeam
from tigon.ops.glu import Approximate


class _StandsForPatched(abc.ABCMeta):
    """Metaclass of a Liger class whose `stands_for` decides which patched modules count as its instances.

    An ABCMeta, so that a user's class can inherit from a Liger module and an abstract class, as with Liger itself.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        stands_for = vars(cls).get("stands_for")  # not inherited, so a user's subclass matches no patched module
        if stands_for is None or not isinstance(instance, PatchedModule):
            return False
        return bool(stands_for(instance._tigon_seam, instance))


def _is_norm(op: str) -> Callable[[Seam, nn.Module], bool]:
    return lambda seam, module: seam.op == op


def _is_gated_mlp(op: str, packed: bool) -> Callable[[Seam, nn.Module], bool]:
    return lambda seam, module: (
        isinstance(seam, GatedMlpSeam) and bool(seam.packed) is packed and seam.op_for(module) == op
    )


# --- norms ------------------------------------------------------------------------------------------------------------


def initial_weight(size: int, init_fn: str) -> nn.Parameter:
    """A norm's weight of ones or zeros."""
    if init_fn not in ("ones", "zeros"):
        raise FlagConflict(f"init_fn={init_fn!r} is not known; choose ones or zeros.")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module, metaclass=_StandsForPatched):
    """`tigon.rms_norm` over the last dimension. `in_place` and `row_mode` are kept as attributes only."""

    stands_for = staticmethod(_is_norm("rms_norm"))
    tigon_flag: ClassVar[str] = "rms_norm"
    """The flag of `tigon.patch` that such a module in a model satisfies."""
    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_parameter("weight", initial_weight(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine

    def forward(self, hidden_states: Tensor) -> Tensor:
        return f.LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(nn.Module):
    """`tigon.add_rms_norm`: (normed, hidden_states + residual)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = initial_weight(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return f.LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerLayerNorm(nn.Module, metaclass=_StandsForPatched):
    """`tigon.layer_norm`. As in Liger, the `bias` parameter always exists; it starts at 0."""

    stands_for = staticmethod(_is_norm("layer_norm"))
    tigon_flag: ClassVar[str] = "layer_norm"

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", impl: Any = None,
        mode: Any = None, backend: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        losses.no_implementation(impl=impl, mode=mode, backend=backend)
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = initial_weight(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


# --- MLPs -------------------------------------------------------------------------------------------------------------


def require_silu(config: Any) -> None:
    """Refuse a config whose `hidden_act` (`hidden_activation` in some families) is not silu."""
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in ("silu", "swish"):
        raise OptionError(f"hidden_act={name!r}: a SwiGLU MLP needs silu; use LigerGEGLUMLP for gelu.")


class LigerMLPBase(nn.Module, metaclass=_StandsForPatched):
    """The attributes that all of Liger's MLPs have."""

    tigon_flag: ClassVar[str] = "mlp"

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size


class LigerSwiGLUMLP(LigerMLPBase):
    """down_proj(silu(gate_proj(x)) · up_proj(x)), without biases."""

    stands_for = staticmethod(_is_gated_mlp("swiglu", packed=False))

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        require_silu(config)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


# Names of transformers' ACT2FN -> the form of gelu they stand for.
_GELUS: dict[str, Approximate] = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
}


class LigerGEGLUMLP(LigerMLPBase):
    """down_proj(gelu(gate_proj(x)) · up_proj(x)), without biases, with the form of gelu that the config names.

    Liger ignores the config and always computes the tanh form.
    """

    stands_for = staticmethod(_is_gated_mlp("geglu", packed=False))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        if name not in _GELUS:
            raise OptionError(f"activation {name!r}: a GeGLU MLP needs gelu; choose one of {', '.join(_GELUS)}.")
        self.approximate: Approximate = _GELUS[name]
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated = ops.geglu(self.gate_proj(x), self.up_proj(x), approximate=self.approximate)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class LigerPhi3SwiGLUMLP(LigerMLPBase):
    """down_proj(silu(gate) · up) with one projection for both; its halves are read in place."""

    stands_for = staticmethod(_is_gated_mlp("swiglu", packed=True))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        require_silu(config)
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))  # type: ignore[no-any-return]


# --- losses -----------------------------------------------------------------------------------------------------------


class LigerCrossEntropyLoss(nn.Module):
    """Cross entropy of (N, V) logits, which are not written to."""

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        losses.check_options(label_smoothing, reduction, softcap)
        # Not a buffer, as in Liger: the state dict does not contain it, and `to` does not move it.
        self.weight = weight
        self.ignore_index, self.lse_square_scale = ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        options = _options_of(self, self.weight)
        return options.pack(losses.cross_entropy(_input, target, options))


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """The loss of `_input @ lin_weight.T + bias`, without the logits. In forward, the weight is the first argument.

    `accum_dtype` is only kept as an attribute, because sums are always fp32.
    """

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        losses.check_options(label_smoothing, reduction, softcap)
        self.ce_weight = ce_weight
        self.ignore_index, self.lse_square_scale = ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.accum_dtype, self.use_token_scaling = return_z_loss, accum_dtype, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        options = _options_of(self, self.ce_weight)
        four = losses.linear_cross_entropy(_input, lin_weight, target, bias, options, self.use_token_scaling)
        return options.pack(four)


def _options_of(module: Any, class_weight: Tensor | None) -> Options:
    return Options(class_weight, *(getattr(module, name) for name in Options._fields[1:]))
