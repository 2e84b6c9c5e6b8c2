"""The Jensen-Shannon and the cosine loss of a student and a teacher, from their hidden states.

Each returns w_hard · NLL + w_soft · D, both means over the labels that count, or on request (loss, soft, hard). The
last two and the teacher are constants for autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.chunked_loss.cosine import Rows, cosine_of_logits
from tigon.compat.liger.errors import FlagConflict
from tigon.errors import ShapeError

# N tokens, H and G hidden, V vocabulary.

Distilled = Tensor | tuple[Tensor, Tensor, Tensor]
Soft = Callable[[Rows, Rows, Tensor], Tensor]
"""(student, teacher, which tokens count (N,)) -> divergence of each token (N,)."""


@dataclass(frozen=True, kw_only=True)
class DistillationOptions:
    """Options of both losses, under Liger's names."""

    weight_hard_loss: float
    weight_soft_loss: float
    ignore_index: int
    temperature: float
    return_soft_hard_loss: bool


def _distilled(student: Rows, teacher: Rows, labels: Tensor, options: DistillationOptions, soft_of: Soft) -> Distilled:
    _check(student, teacher, labels, options.temperature)
    counts = labels != options.ignore_index
    tokens = counts.sum().clamp(min=1)
    teacher = _frozen(teacher, student.weight.shape[0])
    soft = soft_of(student, teacher, counts).masked_fill(~counts, 0.0).sum() / tokens
    loss, hard = options.weight_soft_loss * soft, soft.new_zeros(())
    if options.weight_hard_loss or options.return_soft_hard_loss:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(options.weight_hard_loss)):
            total = ops.linear_cross_entropy(
                student.hidden, student.weight, labels, bias=student.bias, ignore_index=options.ignore_index,
                reduction="sum",
            )  # fmt: skip
            assert isinstance(total, Tensor)  # no further outputs are requested
            hard = total / tokens
        if options.weight_hard_loss:
            loss = loss + options.weight_hard_loss * hard
    return (loss, soft.detach(), hard.detach()) if options.return_soft_hard_loss else loss


def _check(student: Rows, teacher: Rows, labels: Tensor, temperature: float) -> None:
    if temperature == 0:
        raise FlagConflict("temperature=0: divide the logits by a number that is not 0.")
    for name, rows in (("student_input", student), ("teacher_input", teacher)):
        if rows.hidden.ndim != 2 or labels.shape != rows.hidden.shape[:1]:
            raise ShapeError(
                f"{name} is {tuple(rows.hidden.shape)} and true_labels {tuple(labels.shape)}; pass (N, H) and (N,)."
            )


def _frozen(teacher: Rows, vocab: int) -> Rows:
    """The teacher without gradients, over the student's vocabulary.

    A larger head of the teacher has rows that no token has, up to a multiple of a power of two. They are left out.
    Liger gives the student the logit 0 there, so that the loss changes with a constant that is added to all logits.
    """
    bias = None if teacher.bias is None else teacher.bias.detach()[:vocab]
    return Rows(teacher.hidden.detach(), teacher.weight.detach()[:vocab], bias)


class _Distillation:
    """Liger's arguments of both losses. A subclass names the divergence."""

    @staticmethod
    def _soft(beta: float, temperature: float) -> Soft:
        raise NotImplementedError

    @classmethod
    def apply(
        cls, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None, teacher_bias: Tensor | None, weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> Distilled:  # fmt: skip
        options = DistillationOptions(
            weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss, ignore_index=ignore_index,
            temperature=temperature, return_soft_hard_loss=return_soft_hard_loss,
        )  # fmt: skip
        student = Rows(student_input, student_weight, student_bias)
        teacher = Rows(teacher_input, teacher_weight, teacher_bias)
        return _distilled(student, teacher, true_labels, options, cls._soft(beta, temperature))


class LigerFusedLinearJSDFunction(_Distillation):
    """The generalized Jensen-Shannon divergence of `tigon.linear_kl`, with `beta` the teacher's share."""

    @staticmethod
    def _soft(beta: float, temperature: float) -> Soft:
        return lambda student, teacher, counts: ops.linear_kl(
            student.hidden, student.weight, teacher.hidden, teacher.weight, kind="jsd", beta=beta,
            bias=student.bias, teacher_bias=teacher.bias, temperature=temperature, mask=counts,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityFunction(_Distillation):
    """beta · (1 - cosine similarity of the logits). `temperature` does not change an angle."""

    @staticmethod
    def _soft(beta: float, temperature: float) -> Soft:
        return lambda student, teacher, counts: beta * (1.0 - cosine_of_logits(student, teacher, counts))
