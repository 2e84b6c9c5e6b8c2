"""The Jensen-Shannon loss of a student and a teacher with the loss on the labels, from their hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.losses.divergences import check_temperature
from tigon.compat.liger.rows import function, module
from tigon.errors import ShapeError

# N tokens, H and G hidden, V vocabulary.

Distilled = Tensor | tuple[Tensor, Tensor, Tensor]


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Distilled:
    """weight_hard_loss · hard + weight_soft_loss · soft, each a mean over the labels that are not ignored.

    hard is the cross entropy of the student. soft is the generalized Jensen-Shannon divergence of `tigon.linear_kl`
    from the teacher, whose share of the mixture is `beta`; `temperature` changes soft only. With return_soft_hard_loss
    the result is (loss, soft, hard), where soft and hard carry no gradient. The teacher gets none either.
    """
    check_temperature(temperature)
    for name, hidden in (("student_input", student_input), ("teacher_input", teacher_input)):
        if hidden.ndim != 2 or true_labels.shape != hidden.shape[:1]:
            raise ShapeError(
                f"{name} is {tuple(hidden.shape)} and true_labels {tuple(true_labels.shape)}; pass (N, H) and (N,)."
            )
    has_label = true_labels != ignore_index
    n_labels = has_label.sum().clamp(min=1)
    # A teacher's head may be padded with rows of no token, for example up to a multiple of 64. They are cut off. Liger
    # gives the student a logit of 0 there, so that the loss depends on a constant added to all logits.
    V = student_weight.shape[0]
    divergence = ops.linear_kl(
        student_input,
        student_weight,
        teacher_input.detach(),
        teacher_weight.detach()[:V],
        kind="jsd",
        beta=beta,
        bias=student_bias,
        teacher_bias=None if teacher_bias is None else teacher_bias.detach()[:V],
        temperature=temperature,
        mask=has_label,
    )
    soft = divergence.masked_fill(~has_label, 0.0).sum() / n_labels
    loss, hard = weight_soft_loss * soft, soft.new_zeros(())
    if weight_hard_loss or return_soft_hard_loss:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(weight_hard_loss)):
            total = ops.linear_cross_entropy(
                student_input,
                student_weight,
                true_labels,
                bias=student_bias,
                ignore_index=ignore_index,
                reduction="sum",
            )
            assert isinstance(total, Tensor)  # no further outputs are requested
            hard = total / n_labels
        if weight_hard_loss:
            loss = loss + weight_hard_loss * hard
    return (loss, soft.detach(), hard.detach()) if return_soft_hard_loss else loss


liger_fused_linear_jsd = fused_linear_jsd
LigerFusedLinearJSDFunction = function("LigerFusedLinearJSDFunction", fused_linear_jsd)
LigerFusedLinearJSDLoss = module(
    "LigerFusedLinearJSDLoss",
    fused_linear_jsd,
    holds="weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size return_soft_hard_loss",
    takes="student_input student_weight teacher_input teacher_weight true_labels student_bias=None teacher_bias=None",
    check=check_temperature,
)
