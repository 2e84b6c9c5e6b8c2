"""Norms and gated MLPs, with the parameter names of what they replace, so that state dicts load either way.

`RMSNorm` has the `weight` of `torch.nn.RMSNorm` and of every Hugging Face `*RMSNorm`; `LayerNorm` the `weight` and
`bias` of `torch.nn.LayerNorm`; the MLPs the `gate_proj`, `up_proj` and `down_proj` of `LlamaMLP`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.ops.glu import Approximate, alone
from tigon.ops.rms_norm import Casting

# B, T = any leading dimensions; H = hidden, F = intermediate.


class RMSNorm(nn.Module):
    """`tigon.rms_norm` over the last dimension: (..., H) -> (..., H).

    Args:
        hidden_size: H. eps: added to the mean square.
        offset: added to the weight; 1 for Gemma, whose weight then starts at 0.
        casting: where the normalised value is rounded; see `tigon.rms_norm`.
        elementwise_affine: False for a norm without weight.
    """

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
        """Make the effective weight, weight + offset, 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"


class LayerNorm(nn.Module):
    """`tigon.layer_norm` over the last dimension: (..., H) -> (..., H).

    One dimension only, where `torch.nn.LayerNorm` takes several.
    """

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
    """down_proj(act(gate_proj(x)) · up_proj(x)): (..., H) -> (..., H), F wide inside."""

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
        """gate, up (..., F) -> (..., F). inplace: as in the ops."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        inplace = alone(gate) and alone(up)
        inner = self.gated(gate, up, inplace)
        del gate, up
        return self.down_proj(inner)  # type: ignore[no-any-return]


class SwiGLUMLP(_GatedMLP):
    """Llama's MLP: act = silu (Shazeer 2020, arXiv 2002.05202)."""

    def gated(self, gate: Tensor, up: Tensor, inplace: bool) -> Tensor:
        return ops.swiglu(gate, up, inplace=inplace)


class GeGLUMLP(_GatedMLP):
    """Gemma's MLP: act = gelu, in its tanh form unless `approximate="none"`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, approximate: Approximate = "tanh", **options: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.approximate: Approximate = approximate

    def gated(self, gate: Tensor, up: Tensor, inplace: bool) -> Tensor:
        return ops.geglu(gate, up, approximate=self.approximate, inplace=inplace)
