"""Norms and gated MLPs. Their parameter names match the modules that they replace, so state dicts load both ways.

`RMSNorm` has the `weight` of `torch.nn.RMSNorm` and of every Hugging Face `*RMSNorm`. `LayerNorm` has the `weight` and
`bias` of `torch.nn.LayerNorm`. The MLPs have the `gate_proj`, `up_proj` and `down_proj` of `LlamaMLP`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.ops.glu import Approximate, alone
from tigon.ops.norms.rms_norm import Casting

# H hidden size, F intermediate size.


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, (..., H) -> (..., H), computed by `tigon.rms_norm`.

    Args:
        hidden_size: H.
        eps: added to the mean square.
        offset: added to the weight; 1 for Gemma, whose weight then starts at 0.
        casting: "llama" (default), "gemma" or "fp32": where the normalised value is rounded, as in `tigon.rms_norm`.
        elementwise_affine: False for a norm without weight.
        device, dtype: device and dtype of the weight.

    Raises:
        ShapeError, DtypeError, OptionError: in forward, under the conditions of `tigon.rms_norm`.
    """

    tigon_flag: ClassVar[str] = "rms_norm"
    """The flag of `tigon.patch` that such a module in a model satisfies."""
    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: Casting = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.offset = hidden_size, eps, offset
        self.casting: Casting = casting
        weight = torch.empty(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight to 1 - offset, so that the effective weight is 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, (..., H) -> (..., H), computed by `tigon.layer_norm`.

    Unlike `torch.nn.LayerNorm`, it normalises over one dimension only.

    Args:
        hidden_size: H.
        eps: added to the variance.
        elementwise_affine: False for a norm without weight and bias.
        bias: False for a norm without bias.
        device, dtype: device and dtype of weight and bias.

    Raises:
        ShapeError, DtypeError, OptionError: in forward, under the conditions of `tigon.layer_norm`.
    """

    tigon_flag: ClassVar[str] = "layer_norm"
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            values = torch.empty(hidden_size, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.layer_norm(hidden_states, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, bias={self.bias is not None}"


class _GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) · up_proj(x)): (..., H) -> (..., H), with intermediate size F."""

    tigon_flag: ClassVar[str] = "mlp"

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)

    def gated(self, gate: Tensor, up: Tensor, inplace: bool) -> Tensor:
        """gate, up (..., F) -> (..., F). inplace: as in `tigon.swiglu`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        inplace = alone(gate) and alone(up)
        inner = self.gated(gate, up, inplace)
        del gate, up
        return self.down_proj(inner)  # type: ignore[no-any-return]


class SwiGLUMLP(_GatedMLP):
    """Llama's MLP, down_proj(silu(gate_proj(x)) · up_proj(x)), computed with `tigon.swiglu`.

    (..., H) -> (..., H). Source: Shazeer 2020, arXiv 2002.05202.

    Args:
        hidden_size: H.
        intermediate_size: F, the width of gate and up.
        bias: whether the three projections have a bias.
        device, dtype: device and dtype of the parameters.
    """

    def gated(self, gate: Tensor, up: Tensor, inplace: bool) -> Tensor:
        return ops.swiglu(gate, up, inplace=inplace)


class GeGLUMLP(_GatedMLP):
    """Gemma's MLP, down_proj(gelu(gate_proj(x)) · up_proj(x)), computed with `tigon.geglu`.

    (..., H) -> (..., H).

    Args:
        hidden_size: H.
        intermediate_size: F, the width of gate and up.
        approximate: "tanh" (Gemma's) or "none" (the error function), as in `torch.nn.functional.gelu`.
        options: bias, device and dtype, as in `SwiGLUMLP`.

    Raises:
        OptionError: in forward, for any other value of approximate.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, approximate: Approximate = "tanh", **options: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.approximate: Approximate = approximate

    def gated(self, gate: Tensor, up: Tensor, inplace: bool) -> Tensor:
        return ops.geglu(gate, up, approximate=self.approximate, inplace=inplace)
