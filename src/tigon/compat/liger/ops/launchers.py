"""Liger's forward and backward launchers, without autograd: tigon's primitives with Liger's arguments and results.

Differences from Liger:
- No input is written to; gradients are new tensors.
- BLOCK_SIZE, num_warps and num_stages, which a forward returns for its backward, are None and are not read.
- The gradients of the losses are fp32 for fp16 inputs. They are computed before the loss scale is known, and 1/N of a
  probability is too small for fp16.

Scripts pass Liger's arguments by position, so the parameters keep Liger's number and order, up to 21.
"""

# N = rows, H = hidden, F = intermediate, V = vocabulary.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.compat.liger.ops import losses
from tigon.compat.liger.ops.functions import casting_of, rope_tables
from tigon.compat.liger.ops.losses import Options
from tigon.errors import ShapeError
from tigon.kernels.layout import outer_order
from tigon.ops.glu import glu_bwd, glu_fwd
from tigon.ops.norms.norm import NormBackwardOptions, NormOptions, norm_bwd, norm_fwd
from tigon.ops.rope import RopeLayout, rotate

Mode = str | int


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# --- norms ------------------------------------------------------------------------------------------------------------


def rms_norm_forward(
    X: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: Mode, row_mode: bool | None
) -> tuple[Any, ...]:
    """(Y, X (N, H), RSTD (N,), BLOCK_SIZE, num_warps, casting_mode)."""
    X_NH = _rows(X)
    options = NormOptions(eps, offset, center=False, fp32_weight=casting_of(casting_mode) != "llama")
    Y, _, _, RSTD = norm_fwd(X_NH, None, W, None, options)
    return Y.to(X.dtype).view(X.shape), X_NH, RSTD, None, None, casting_mode


def rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, RSTD: Tensor, offset: float, casting_mode: Mode, BLOCK_SIZE: Any,
    num_warps: Any, in_place: bool, row_mode: bool | None, needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(dX of dY's shape, dW or None)."""
    options = _backward_options(W, offset, casting_mode, needs_dw)
    dX, dW, _ = norm_bwd(_rows(dY), None, _rows(X), W, RSTD, RSTD, options)
    return dX.view(dY.shape), dW if options.want_dw else None


def fused_add_rms_norm_forward(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: Mode
) -> tuple[Any, ...]:
    """(Y, S = X + R, RSTD (N,), BLOCK_SIZE, num_warps, num_stages, casting_mode)."""
    options = NormOptions(eps, offset, center=False, fp32_weight=casting_of(casting_mode) != "llama")
    Y, S, _, RSTD = norm_fwd(_rows(X), _rows(R), W, None, options)
    return Y.to(X.dtype).view(X.shape), S.view(X.shape), RSTD, None, None, None, casting_mode


def fused_add_rms_norm_backward(
    dY: Tensor, dS_out: Tensor | None, S: Tensor, W: Tensor | None, RSTD: Tensor, offset: float, casting_mode: Mode,
    BLOCK_SIZE: Any, num_warps: Any, num_stages: Any, in_place: bool, needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dX, dR, dW or None); dX and dR are the same tensor, because only the sum of X and R is used."""
    options = _backward_options(W, offset, casting_mode, needs_dw)
    dS_NH = None if dS_out is None else _rows(dS_out)
    dX_NH, dW, _ = norm_bwd(_rows(dY), dS_NH, _rows(S), W, RSTD, RSTD, options)
    dX = dX_NH.view(dY.shape)
    return dX, dX, dW if options.want_dw else None


def _backward_options(
    W: Tensor | None, offset: float, casting_mode: Mode, needs_dw: bool | None
) -> NormBackwardOptions:  # fmt: skip
    """The options of RMSNorm's backward."""
    want_dw, fp32_weight = W is not None and needs_dw is not False, casting_of(casting_mode) != "llama"
    return NormBackwardOptions(
        offset, center=False, fp32_weight=fp32_weight, want_dx=True, want_dw=want_dw, want_db=False
    )


def layer_norm_forward(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> tuple[Any, ...]:
    """(Y, X (N, H), Mean (N,), RSTD (N,), BLOCK_SIZE, num_warps)."""
    X_NH = _rows(X)
    Y, _, Mean, RSTD = norm_fwd(X_NH, None, W, B, NormOptions(eps, offset=0.0, center=True, fp32_weight=True))
    return Y.view(X.shape), X_NH, Mean, RSTD, None, None


def layer_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, B: Tensor | None, Mean: Tensor, RSTD: Tensor,
    needs_dw: bool | None = None, needs_db: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dX of dY's shape, dW or None, dB or None)."""
    want_dw, want_db = W is not None and needs_dw is not False, B is not None and needs_db is not False
    options = NormBackwardOptions(0.0, center=True, fp32_weight=True, want_dx=True, want_dw=want_dw, want_db=want_db)
    dX, dW, dB = norm_bwd(_rows(dY), None, _rows(X), W, Mean, RSTD, options)
    return dX.view(dY.shape), dW if want_dw else None, dB if want_db else None


# --- gated linear units -----------------------------------------------------------------------------------------------


def swiglu_forward(a: Tensor, b: Tensor, gate_multiplier: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, silu(gate_multiplier · a) · b)."""
    return a, b, glu_fwd(_scaled(a, gate_multiplier), b, "silu")


def swiglu_backward(a: Tensor, b: Tensor, dc: Tensor, gate_multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
    """(da, db)."""
    da, db = glu_bwd(dc, _scaled(a, gate_multiplier), b, "silu", True, True)
    return _scaled(da, gate_multiplier), db


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def swiglu_fused_gate_up_forward(y: Tensor) -> tuple[Tensor, Tensor]:
    """(y, silu(gate) · up) of y (..., 2F) = [gate | up]."""
    return y, glu_fwd(y, None, "silu")


def swiglu_fused_gate_up_backward(y: Tensor, dc: Tensor, in_place: bool = False) -> Tensor:
    """dy (..., 2F)."""
    dy: Tensor = glu_bwd(dc, y, None, "silu", True, False)[0]
    return dy


def geglu_forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, gelu(a) · b), with the tanh form of gelu."""
    return a, b, glu_fwd(a, b, "gelu_tanh")


def geglu_backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """(da, db)."""
    da, db = glu_bwd(dc, a, b, "gelu_tanh", True, True)
    return da, db


# --- rotary embedding -------------------------------------------------------------------------------------------------


def rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(rotated q, rotated k, cos, sin)."""
    return *_rotated(q, k, cos, sin, unsqueeze_dim, rotary_dim, backward=False), cos, sin


def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of q and k before the rotation."""
    return _rotated(dq, dk, cos, sin, unsqueeze_dim, rotary_dim, backward=True)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, rotary_dim: int | None, backward: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(q, cos, sin, heads_dim, rotary_dim)
    layout = RopeLayout(outer_order(q), outer_order(k), heads_dim, interleaved=False)
    rotated: tuple[Tensor, Tensor] = rotate(q, k, cos, sin, layout, backward)
    return rotated


# --- losses -----------------------------------------------------------------------------------------------------------


def _leaf(x: Tensor, wanted: bool) -> Tensor:
    """A detached leaf with the values of x for computing a separate gradient; fp32 if x is fp16."""
    return (x.float() if x.dtype == torch.float16 else x).detach().requires_grad_(wanted)


def cross_entropy_forward(
    _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None, return_z_loss: bool,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens, gradient (N, V)).

    The gradient is that of the loss, or of each row's loss for reduction="none". If `_input` does not require grad, the
    last result is `_input`, unchanged.
    """
    options = Options(
        weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    want = _input.requires_grad
    logits = _leaf(_input, want)
    with torch.set_grad_enabled(want):
        loss, *rest = losses.cross_entropy(logits, target, options)
        gradient = torch.autograd.grad(loss.sum(), logits)[0] if want else _input
    return loss.detach(), *rest, gradient


def cross_entropy_backward(_input: Tensor, grad_output: Tensor) -> Tensor:
    """The forward's gradient (N, V), times grad_output, 0-dim or (N,)."""
    return _input * (grad_output if grad_output.ndim == 0 else grad_output.unsqueeze(-1)).to(_input.dtype)


def fused_linear_cross_entropy_forward(
    _input: Tensor, weight: Tensor, target: Tensor, ce_weight: Tensor | None = None, bias: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ce_impl: Any = None, ce_mode: Any = None, token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None, weight_requires_grad: bool | None = None, chunk_mem_const: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias); ce_weight before bias.

    A gradient is None if its tensor does not require one, independently of the others. For reduction="none" the
    gradients are those of the sum of the losses, weighted with `token_grad_output` (N,) if given.
    """
    losses.no_implementation(ce_impl=ce_impl, ce_mode=ce_mode)
    options = Options(
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    hidden = _leaf(_input, _input.requires_grad if compute_gradients is None else compute_gradients)
    head = _leaf(weight, weight.requires_grad if weight_requires_grad is None else weight_requires_grad)
    offset = None if bias is None else _leaf(bias, bias.requires_grad or bool(compute_gradients))
    wanting = [leaf for leaf in (hidden, head, offset) if leaf is not None and leaf.requires_grad]
    with torch.set_grad_enabled(bool(wanting)):
        loss, *rest = losses.linear_cross_entropy(hidden, head, target, offset, options, use_token_scaling)
        total = loss.sum() if token_grad_output is None else (loss * token_grad_output).sum()
        given = iter(torch.autograd.grad(total, wanting) if wanting else ())
    gradients = [next(given) if leaf is not None and leaf.requires_grad else None for leaf in (hidden, head, offset)]
    return loss.detach(), *rest, *gradients


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The forward's gradients times grad_output, 0-dim; None stays None."""
    if grad_output.ndim:
        raise ShapeError(
            f"grad_output is {tuple(grad_output.shape)}; it must be 0-dim. For one factor per token "
            '(reduction="none"), pass token_grad_output to the forward.'
        )
    grad_input, grad_weight, grad_bias = (
        None if gradient is None else gradient * grad_output.to(gradient.dtype)
        for gradient in (grad_input, grad_weight, grad_bias)
    )
    return grad_input, grad_weight, grad_bias
