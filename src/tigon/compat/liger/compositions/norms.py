"""Group norm, PolyNorm, DyT and the RMSNorm with a scale and a shift per row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon import ops
from tigon.compat.liger.compositions._wide import wide
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.ops import functions as f
from tigon.compat.liger.transformers.modules import initial_weight
from tigon.errors import ShapeError
from tigon.ops.norms.norm import check_parameter

# --- group norm -------------------------------------------------------------------------------------------------------


class LigerGroupNormFunction:
    """`torch.nn.functional.group_norm` of X (B, C, ...)."""

    @staticmethod
    def apply(
        X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
        eps: float,
    ) -> Tensor:  # fmt: skip
        if X.ndim < 3 or X.shape[1] != num_channels:
            raise ShapeError(f"X has the shape {tuple(X.shape)}; expected (batch, {num_channels} channels, ...).")
        weight, bias = affine_scaling_weight.to(X.dtype), affine_shifting_bias.to(X.dtype)
        return F.group_norm(X, num_groups, weight, bias, eps)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Group norm of X (B, C, ...) with weight and bias (C,)."""
    return LigerGroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)


class LigerGroupNorm(nn.Module):
    """Group norm. As in Liger, the `bias` parameter always exists; it starts at 0."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise FlagConflict(f"num_channels={num_channels} is not a multiple of num_groups={num_groups}.")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = initial_weight(num_channels, init_fn)
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerGroupNormFunction.apply(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


# --- PolyNorm (Zhuo et al. 2024, arXiv 2411.03884) --------------------------------------------------------------------


class LigerPolyNormFunction:
    """w0 · norm(x³) + w1 · norm(x²) + w2 · norm(x) + b, with norm(u) = u / sqrt(mean(u²) + eps)."""

    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
        x, weights = wide(X), wide(W)
        powers = (x.pow(3), x.square(), x)
        y = wide(B)
        for w, power in zip(weights, powers, strict=True):
            y = y + w * F.rms_norm(power, x.shape[-1:], eps=eps)
        return y.to(X.dtype)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """PolyNorm of X (..., H) with weights W (3,) and bias B ()."""
    return LigerPolyNormFunction.apply(X, W, B, eps, in_place)


class LigerPolyNorm(nn.Module):
    """PolyNorm; the weights start at 1/3 and the bias at 1."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerPolyNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"


# --- dynamic tanh (Zhu et al. 2025, arXiv 2503.10622) -----------------------------------------------------------------


class LigerDyTFunction:
    """gamma · tanh(alpha · x) + beta."""

    @staticmethod
    def apply(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        y = wide(gamma) * torch.tanh(wide(alpha) * wide(x))
        return (y if beta is None else y + wide(beta)).to(x.dtype)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Dynamic tanh of x (..., H) with alpha (1,), gamma (H,) and beta (H,) or None."""
    return LigerDyTFunction.apply(x, alpha, gamma, beta)


class LigerDyT(nn.Module):
    """Dynamic tanh, which stands in for a norm."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), init_alpha))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        return LigerDyTFunction.apply(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


# --- modulated RMSNorm ------------------------------------------------------------------------------------------------


def _rounded(u: Tensor, dtype: torch.dtype) -> Tensor:
    """u, rounded to the values of `dtype`. The gradient is not rounded."""
    with torch.no_grad():
        error = u.to(dtype).to(u.dtype) - u
    return u + error


class LigerModulatedRMSNormFunction:
    """(1 + scale) · rms_norm(X) + shift; x / rms(x) is tigon's kernel.

    The values are rounded where Liger rounds them. The gradients that are summed for a parameter are fp32, as in Liger.
    A norm with a weight would round the gradient of its result to X's dtype before that sum.
    """

    @staticmethod
    def apply(
        X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float = 0.0,
        casting_mode: str | int = "llama", in_place: bool = True,
    ) -> Tensor:  # fmt: skip
        H = X.shape[-1]
        tokens, rows = X.numel() // max(H, 1), scale.numel() // max(H, 1)
        if scale.shape[-1] != H or rows == 0 or tokens % rows:
            raise ShapeError(
                f"scale has the shape {tuple(scale.shape)}; its rows of {H} must divide the {tokens} rows of X."
            )
        if shift is not None and shift.shape != scale.shape:
            raise ShapeError(f"shift has the shape {tuple(shift.shape)}; scale has {tuple(scale.shape)}.")
        if W is not None:
            check_parameter("W", W, X)
        normed = ops.rms_norm(wide(X), None, eps)
        if f.casting_of(casting_mode) == "llama":
            normed = _rounded(normed, X.dtype)
        weighted = normed if W is None else normed * (wide(W) + offset)
        y = _rounded(weighted, X.dtype).reshape(rows, -1, H) * (1.0 + wide(scale).reshape(rows, 1, H))
        if shift is not None:
            y = y + wide(shift).reshape(rows, 1, H)
        return y.reshape(X.shape).to(X.dtype)


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """RMSNorm of X (..., H), times 1 + scale, plus shift.

    Args:
        X: (..., H).
        W: (H,) or None.
        scale, shift: (H,), (1, H), (B, H) for X (B, T, H), or one row for each row of X; shift may be None.
        eps, offset, casting_mode: as in `liger_rms_norm`; `in_place` is ignored.
    """
    return LigerModulatedRMSNormFunction.apply(X, W, scale, shift, eps, offset, casting_mode)


class LigerModulatedRMSNorm(nn.Module):
    """`liger_modulated_rms_norm` with a weight; forward takes the scale and the shift."""

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_parameter("weight", initial_weight(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.elementwise_affine = in_place, elementwise_affine

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return LigerModulatedRMSNormFunction.apply(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"
