"""`liger_kernel.functional`: ops without the prefix, with Liger's choice of a backend.

tigon has one implementation per device, so `impl`, `mode` and `backend` must be None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.compat.liger.compositions.activations import LigerSoftmaxFunction
from tigon.compat.liger.ops import divergences as d
from tigon.compat.liger.ops import functions as f
from tigon.compat.liger.ops.losses import Four, no_implementation


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False, row_mode: bool | None = None, impl: Any = None, mode: Any = None, backend: Any = None,
) -> Tensor:  # fmt: skip
    """`tigon.rms_norm`; `in_place` and `row_mode` are ignored."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6, *, impl: Any = None,
    mode: Any = None, backend: Any = None,
) -> Tensor:  # fmt: skip
    """`tigon.layer_norm`."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerLayerNormFunction.apply(x, weight, bias, eps)


def fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False, *, impl: Any = None, mode: Any = None, backend: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tigon.add_rms_norm`: (normed, X + R)."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def softmax(x: Tensor, *, impl: Any = None, mode: Any = None, backend: Any = None) -> Tensor:
    """`torch.softmax` over the last dimension."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return LigerSoftmaxFunction.apply(x)


def swiglu(
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, *, impl: Any = None,
    mode: Any = None, backend: Any = None,
) -> Tensor:  # fmt: skip
    """silu(gate_multiplier · a) · b · down_multiplier."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


def geglu(a: Tensor, b: Tensor, *, impl: Any = None, mode: Any = None, backend: Any = None) -> Tensor:
    """gelu(a) · b, with the tanh form of gelu."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerGELUMulFunction.apply(a, b)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1, *,
    impl: Any = None, mode: Any = None, backend: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tigon.rope` with half-split tables."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, *, impl: Any = None, mode: Any = None, backend: Any = None,
) -> Four:  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens) of logits; the last three are None unless requested."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerCrossEntropyFunction.apply(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def fused_linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False, *,
    impl: Any = None, mode: Any = None, backend: Any = None,
) -> Four:  # fmt: skip
    """The four results of `cross_entropy` for `_input @ weight.T + bias`, without the logits."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return f.LigerFusedLinearCrossEntropyFunction.apply(
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def jsd(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100, *,
    impl: Any = None, mode: Any = None, backend: Any = None,
) -> Tensor:  # fmt: skip
    """The generalized Jensen-Shannon divergence of log-probabilities (N, V), as a mean over rows."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return d.LigerJSDFunction.apply(_input, target, shift_labels, beta, ignore_index)


def kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10, *,
    impl: Any = None, mode: Any = None, backend: Any = None,
) -> Tensor:  # fmt: skip
    """KL divergence of log-probabilities y_pred from y_true (N, V), which gets no gradient."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return d.LigerKLDivLossFunction.apply(y_pred, y_true, reduction, log_target, eps)


def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, *,
    impl: Any = None, mode: Any = None, backend: Any = None,
) -> Tensor:  # fmt: skip
    """The Jensen-Shannon divergence between two heads' distributions, without their logits; a mean over rows."""
    no_implementation(impl=impl, mode=mode, backend=backend)
    return d.LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature
    )
