"""`liger_kernel.transformers.functional`: Liger's functions for the ops that tigon has.

Names, order and defaults of the arguments are Liger's. Arguments whose names differ from those of tigon's ops:

    X, R, W, B                       input, residual, weight and bias of a norm
    a, b                             gate and up projection of a gated unit
    lse_square_scale                 tigon's `z_loss`
    weight of the cross entropy      class weights (V,)
    ce_weight of the fused loss      class weights (V,); `weight` is the head's weight (V, H)
    use_token_scaling                multiply each token's loss by the probability of its label

Three arguments are accepted and ignored, because they only control how Liger saves memory:

    in_place          tigon's norms never overwrite their inputs or the incoming gradient.
    accum_dtype       tigon always sums the chunks' weight gradients in fp32.
    chunk_mem_const   Liger's factor for the chunk size; tigon limits a chunk by bytes.
"""

# N = tokens, H = hidden, V = vocabulary.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.compat.liger.ops import divergences as d
from tigon.compat.liger.ops import functions as f
from tigon.compat.liger.ops.losses import CrossEntropyOutput, Options
from tigon.compat.liger.ops.losses import cross_entropy as _cross_entropy
from tigon.compat.liger.ops.losses import linear_cross_entropy as _linear_cross_entropy
from tigon.errors import OptionError

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_geglu",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "liger_swiglu",
    "liger_tvd",
]


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Cross entropy of logits, with arguments in the order of `torch.nn.functional.cross_entropy`.

    Args:
        input: (N, V), the logits.
        target: (N,), the labels.
        weight: (V,), class weights; None: all 1.
        size_average, reduce: must be None. PyTorch has deprecated them and Liger ignores them.
        lse_square_scale: tigon's `z_loss`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: what to return in addition to the loss.
        ignore_index, reduction, label_smoothing, softcap: as in `tigon.cross_entropy`.

    Returns:
        The loss, or a `CrossEntropyOutput` if more is requested.

    Raises:
        OptionError: size_average or reduce is not None, or as in `tigon.cross_entropy`.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None:
            raise OptionError(f"{name}={value!r} is deprecated in PyTorch and not supported; use reduction.")
    options = Options(
        weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return options.pack(_cross_entropy(input, target, options))


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Cross entropy of `input @ weight.T + bias`, without holding all the logits.

    Args:
        input: (N, H), the hidden states.
        weight: (V, H), the weight of the head.
        target: (N,), the labels.
        bias: (V,), the bias of the head, or None.
        ce_weight: (V,), class weights; None: all 1.
        lse_square_scale: tigon's `z_loss`.
        accum_dtype: ignored; tigon always sums the chunks' weight gradients in fp32.
        use_token_scaling: multiply each token's loss by the probability of its label, which gets no gradient.
        return_z_loss, return_token_accuracy, return_predicted_tokens: what to return in addition to the loss.
        chunk_mem_const: ignored; tigon limits a chunk by bytes (`chunk_bytes` of `tigon.linear_cross_entropy`).
        ignore_index, reduction, label_smoothing, softcap: as in `tigon.linear_cross_entropy`.

    Returns:
        The loss, or a `CrossEntropyOutput` if more is requested.

    Raises:
        OptionError: as in `tigon.linear_cross_entropy`.
    """
    options = Options(
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return options.pack(_linear_cross_entropy(input, weight, target, bias, options, use_token_scaling))


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """`tigon.rms_norm` of X (..., H) with weight W (H,); `in_place` is ignored."""
    return f.LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tigon.add_rms_norm` of input X and residual R: (normed, X + R); `in_place` is ignored."""
    return f.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """`tigon.layer_norm` of X (..., H) with weight W (H,) and bias B (H,)."""
    return f.LigerLayerNormFunction.apply(X, W, B, eps)


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`liger_rotary_pos_emb` under its other name."""
    return liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tigon.rope` with half-split tables: returns new q and k; the inputs are not written to.

    q and k are (B, heads, T, D), or (B, T, heads, D) with unsqueeze_dim=2. `position_ids` is ignored, as in
    transformers, because the tables already belong to the positions.
    """
    return f.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b, with the gate a and the up projection b."""
    return f.LigerSiLUMulFunction.apply(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) · b, with the gate a, the up projection b, and the tanh form of gelu."""
    return f.LigerGELUMulFunction.apply(a, b)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """The generalized Jensen-Shannon divergence of log-probabilities (N, V), as a mean over rows.

    Args:
        input: the student's log-probabilities.
        target: the teacher's log-probabilities. They get no gradient.
        shift_labels: (N,); rows with the label `ignore_index` do not count.
        beta: the teacher's share of the mixture; 0 is the forward and 1 the reverse KL divergence.
        ignore_index: the label of rows that do not count.
    """
    return d.LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: bool = True, reduce: bool = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """KL divergence with the arguments of `torch.nn.functional.kl_div`; the target gets no gradient.

    Args:
        input: (N, V), the student's log-probabilities.
        target: (N, V), probabilities, or log-probabilities with `log_target=True`.
        size_average, reduce: deprecated in PyTorch; only the default True is accepted.
        reduction: "none", "sum", "mean" over all entries, or "batchmean" over rows.
        log_target: whether the target is in log space.
        eps: the smallest probability whose logarithm is taken.

    Raises:
        OptionError: size_average or reduce is not True, or the reduction is unknown.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not True:
            raise OptionError(f"{name}={value!r} is deprecated in PyTorch and not supported; use reduction.")
    return d.LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """The total variation distance of probabilities (N, V); the target gets no gradient."""
    return d.LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The Jensen-Shannon divergence between two heads' distributions, without their logits; a mean over rows."""
    return d.LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
        temperature, accum_dtype,
    )  # fmt: skip


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """KL from target probabilities (N, V) to a head's distribution, without the head's logits."""
    return d.LigerFusedLinearKLDivFunction.apply(
        student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature, eps, accum_dtype
    )
