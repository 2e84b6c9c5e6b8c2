"""`LigerXFunction.apply(...)`: tigon's differentiable ops with Liger's positional order and defaults.

The classes are namespaces, not subclasses of `torch.autograd.Function`. `apply` calls the op, which has its own
autograd.Function. In a subclass Dynamo would look for a `forward`; here it sees the op. Keywords work too.

Four options are accepted and ignored, because they only control how Liger saves memory:

- `in_place`: Liger writes the gradient over the incoming one;
- `row_mode`;
- `accum_dtype`: tigon always accumulates in fp32;
- `chunk_mem_const`: tigon chooses chunk sizes by bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.ops import losses
from tigon.compat.liger.ops.losses import Four, Options
from tigon.errors import OptionError
from tigon.ops.norms.rms_norm import Casting

# In Liger, "none" computes in x's dtype throughout. Here its statistics are fp32, which is more accurate.
CASTINGS: dict[str | int, Casting] = {
    "llama": "llama", "gemma": "gemma", "none": "llama",
    0: "llama", 1: "gemma", -1: "llama",
}  # fmt: skip


def casting_of(mode: str | int) -> Casting:
    """tigon's casting for Liger's name or number."""
    if mode not in CASTINGS:
        raise OptionError(f"casting_mode={mode!r} is not known; choose llama, gemma or none.")
    return CASTINGS[mode]


class LigerRMSNormFunction:
    """`tigon.rms_norm` with the result in X's dtype."""

    @staticmethod
    def apply(
        X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
        in_place: bool = True, row_mode: bool | None = None,
    ) -> Tensor:  # fmt: skip
        return ops.rms_norm(X, W, eps, offset=offset, casting=casting_of(casting_mode)).to(X.dtype)


class LigerFusedAddRMSNormFunction:
    """`tigon.add_rms_norm`: (normed, X + R)."""

    @staticmethod
    def apply(
        X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        Y, S = ops.add_rms_norm(X, R, W, eps, offset=offset, casting=casting_of(casting_mode))
        return Y.to(X.dtype), S


class LigerLayerNormFunction:
    """`tigon.layer_norm`."""

    @staticmethod
    def apply(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
        return ops.layer_norm(X, W, B, eps)


class LigerSiLUMulFunction:
    """silu(gate_multiplier · a) · b · down_multiplier."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        c = ops.swiglu(a if gate_multiplier == 1.0 else a * gate_multiplier, b)
        return c if down_multiplier == 1.0 else c * down_multiplier


class LigerFusedGateUpSiLUMulFunction:
    """silu(gate) · up for a packed (..., 2F) = [gate | up]."""

    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        return ops.swiglu(y)


class LigerGELUMulFunction:
    """gelu(a) · b, with the tanh form of gelu."""

    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        return ops.geglu(a, b)


class LigerRopeFunction:
    """`tigon.rope` with half-split tables."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        cos, sin = rope_tables(q, cos, sin, unsqueeze_dim, rotary_dim)
        return ops.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def rope_tables(
    q: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rotary_dim: int | None
) -> tuple[Tensor, Tensor]:
    """Convert (T, R), (B, T, R) or 4-D tables (with a heads dimension) to the form that `tigon.rope` takes.

    A table that is wider than the rotated width holds each angle twice; the start of the first copy is used.
    """
    if cos.ndim == 4:
        cos, sin = cos.squeeze(unsqueeze_dim), sin.squeeze(unsqueeze_dim)
    half = (min(cos.shape[-1], q.shape[-1]) if rotary_dim is None else rotary_dim) // 2
    if cos.shape[-1] == 2 * half:
        return cos, sin
    cos, sin = (torch.cat((table[..., :half], table[..., :half]), -1) for table in (cos, sin))
    return cos, sin


class LigerCrossEntropyFunction:
    """Returns (loss, z_loss, token_accuracy, predicted_tokens); the last three are None unless requested."""

    @staticmethod
    def apply(
        _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> Four:  # fmt: skip
        options = Options(
            weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
            return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        return losses.cross_entropy(_input, target, options)


class LigerFusedLinearCrossEntropyFunction:
    """The loss of `_input @ weight.T + bias`, without the logits; returns the four results of the other loss."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
        softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
        ce_impl: Any = None, ce_mode: Any = None, chunk_mem_const: int = 1,
    ) -> Four:  # fmt: skip
        losses.no_implementation(ce_impl=ce_impl, ce_mode=ce_mode)
        options = Options(
            ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
            return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        return losses.linear_cross_entropy(_input, weight, target, bias, options, use_token_scaling)
