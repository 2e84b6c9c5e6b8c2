"""Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams that are mixed per token.

x_out[o] = Σ_i h_res[o, i] · x[i] + h_post[o] · layer(Σ_i h_pre[i] · x[i])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compat.liger.compositions._wide import wide
from tigon.compat.liger.errors import FlagConflict, warn
from tigon.errors import ShapeError

# S = residual streams, C = channels of one, M = S · S + 2 · S.
Coefficients = tuple[Tensor, Tensor, Tensor]


def _doubly_stochastic(logits: Tensor, steps: int, eps: float) -> Tensor:
    """Sinkhorn and Knopp: normalise the rows and the columns of exp(logits) in turn, `steps` times."""
    matrix = torch.softmax(logits, -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class _Together(torch.autograd.Function):
    """Its arguments. One that has no gradient gets zeros, so that what it was computed from gets zeros and not None."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Coefficients:
        pre, post, res = (tensor.clone() for tensor in tensors)  # a view could not be changed in place
        return pre, post, res

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class LigerMHCCoeffsFunction:
    """(h_pre (..., S), h_post (..., S), h_res (..., S, S)), fp32, of the streams x (..., S, C)."""

    @staticmethod
    def apply(
        x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, allow_fp32: bool,
        tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    ) -> Coefficients:  # fmt: skip
        if not allow_fp32 and x.dtype not in (torch.float16, torch.bfloat16):
            raise FlagConflict(f"x is {x.dtype}: pass allow_fp32=True, or x in bf16 or fp16.")
        S = x.shape[-2]
        if phi.shape != (S * x.shape[-1], S * S + 2 * S) or b.shape != phi.shape[1:]:
            raise ShapeError(
                f"phi has the shape {tuple(phi.shape)} and b {tuple(b.shape)}; expected "
                f"{(S * x.shape[-1], S * S + 2 * S)} and ({S * S + 2 * S},)."
            )
        tokens = wide(x).flatten(-2)
        scale = torch.rsqrt(tokens.square().mean(-1, keepdim=True) + rms_eps)
        pre, post, res = ((tokens @ wide(phi)) * scale).split((S, S, S * S), -1)
        b_pre, b_post, b_res = wide(b).split((S, S, S * S))
        h_pre = torch.sigmoid(pre * alpha_pre + b_pre) + pre_eps
        h_post = torch.sigmoid(post * alpha_post + b_post) * post_mult
        h_res = _doubly_stochastic((res * alpha_res + b_res).unflatten(-1, (S, S)), tmax, sinkhorn_eps)
        return _Together.apply(h_pre, h_post, h_res)  # type: ignore[no-any-return]


class LigerMHCPreFunction:
    """Σ_i h_pre[i] · x[i], in x's dtype."""

    @staticmethod
    def apply(x: Tensor, h_pre: Tensor) -> Tensor:
        return (wide(h_pre)[..., None] * wide(x)).sum(-2).to(x.dtype)


class LigerMHCPostResFunction:
    """Σ_i h_res[o, i] · x[i] + h_post[o] · f_out, in x's dtype."""

    @staticmethod
    def apply(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        mixed = wide(h_res) @ wide(x)
        return (mixed + wide(h_post)[..., None] * wide(f_out)[..., None, :]).to(x.dtype)


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> Coefficients:  # fmt: skip
    """The coefficients of hyper-connections.

    Args:
        x: (..., S, C), the residual streams.
        phi: (S · C, S · S + 2 · S), the projection to the coefficients' logits.
        b: (S · S + 2 · S,), their bias.
        alpha_pre, alpha_post, alpha_res: (), the scales of the three kinds of logits.
        allow_fp32: accept x in fp32.
        tmax: steps of Sinkhorn and Knopp's normalisation of h_res.
        rms_eps, pre_eps, sinkhorn_eps: added to the mean square, to h_pre, and to the sums of rows and columns.
        post_mult: multiplies h_post.

    Returns:
        (h_pre (..., S), h_post (..., S), h_res (..., S, S)), fp32. One that is not used gives gradients of 0, not None.
    """
    return LigerMHCCoeffsFunction.apply(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """The layer's input (..., C) from the streams x (..., S, C)."""
    return LigerMHCPreFunction.apply(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """The next streams (..., S, C) from the streams x and the layer's output f_out (..., C)."""
    return LigerMHCPostResFunction.apply(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Any:
    """The next streams; with return_x_in, (streams, the layer's input)."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor, layer: Callable[[Tensor], Tensor], phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor,
    alpha_res: Tensor, *, allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, return_coeffs: bool = False,
) -> Any:  # fmt: skip
    """Coefficients, the layer's input, the layer, and the next streams; with return_coeffs, the coefficients too."""
    h_pre, h_post, h_res = LigerMHCCoeffsFunction.apply(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )
    x_in = liger_mhc_pre(x, h_pre)
    first = next(iter(layer.parameters()), None) if isinstance(layer, nn.Module) else None
    f_out = layer(x_in if first is None else x_in.to(first.dtype))
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, (h_pre, h_post, h_res)) if return_coeffs else x_out


class LigerMHC(nn.Module):
    """A layer of (..., C) between `hc` residual streams of `c` channels: (..., S, C) in and out."""

    def __init__(
        self, layer: nn.Module, *, hc: int, c: int, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if hc > 16:
            warn(f"hc={hc} is above 16, the largest number of streams that Liger recommends.")
        self.layer, self.hc, self.c, self.tmax = layer, hc, c, tmax
        self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult = rms_eps, pre_eps, sinkhorn_eps, post_mult
        self.allow_fp32 = allow_fp32
        first = next(layer.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        M = hc * hc + 2 * hc
        self.phi = nn.Parameter(torch.randn(hc * c, M, dtype=phi_dtype, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(M, device=device))
        self.alpha_pre = nn.Parameter(torch.ones((), device=device))
        self.alpha_post = nn.Parameter(torch.ones((), device=device))
        self.alpha_res = nn.Parameter(torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.hc, self.c):
            raise ShapeError(f"x has the shape {tuple(x.shape)}; expected (..., {self.hc}, {self.c}).")
        return liger_mhc_forward(  # type: ignore[no-any-return]
            x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res,
            allow_fp32=self.allow_fp32, tmax=self.tmax, rms_eps=self.rms_eps, pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps, post_mult=self.post_mult,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"
