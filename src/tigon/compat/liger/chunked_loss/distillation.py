"""The Jensen-Shannon and the cosine loss of a student and a teacher, from their hidden states.

Each returns weight_hard_loss · hard + weight_soft_loss · soft. hard is the cross entropy of the student, soft the
divergence from the teacher, each a mean over the labels that are not ignored. With return_soft_hard_loss each returns
(loss, soft, hard), where soft and hard carry no gradient. The teacher gets none either. `temperature` changes soft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.chunked_loss.cosine_similarity import cosine_of_logits
from tigon.compat.liger.chunked_loss.reference import Head
from tigon.compat.liger.errors import FlagConflict
from tigon.errors import ShapeError

# N tokens, H and G hidden, V vocabulary.

Distilled = Tensor | tuple[Tensor, Tensor, Tensor]
Divergence = Callable[[Head, Head, Tensor], Tensor]
"""(student, teacher, mask (N,): True for tokens with a label) -> divergence of each token (N,)."""


@dataclass(frozen=True, kw_only=True)
class DistillationOptions:
    """Options of both losses, under Liger's names."""

    weight_hard_loss: float
    weight_soft_loss: float
    ignore_index: int
    temperature: float
    return_soft_hard_loss: bool


def _distilled(
    student: Head, teacher: Head, labels: Tensor, options: DistillationOptions, divergence: Divergence
) -> Distilled:
    _check(student, teacher, labels, options.temperature)
    has_label = labels != options.ignore_index
    n_labels = has_label.sum().clamp(min=1)
    teacher = _frozen_to_vocab(teacher, student.weight.shape[0])
    soft = divergence(student, teacher, has_label).masked_fill(~has_label, 0.0).sum() / n_labels
    loss, hard = options.weight_soft_loss * soft, soft.new_zeros(())
    if options.weight_hard_loss or options.return_soft_hard_loss:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(options.weight_hard_loss)):
            total = ops.linear_cross_entropy(
                student.hidden, student.weight, labels, bias=student.bias, ignore_index=options.ignore_index,
                reduction="sum",
            )  # fmt: skip
            assert isinstance(total, Tensor)  # no further outputs are requested
            hard = total / n_labels
        if options.weight_hard_loss:
            loss = loss + options.weight_hard_loss * hard
    return (loss, soft.detach(), hard.detach()) if options.return_soft_hard_loss else loss


def _check(student: Head, teacher: Head, labels: Tensor, temperature: float) -> None:
    if temperature == 0:
        raise FlagConflict("temperature=0: the logits are divided by it; pass another number.")
    for name, head in (("student_input", student), ("teacher_input", teacher)):
        if head.hidden.ndim != 2 or labels.shape != head.hidden.shape[:1]:
            raise ShapeError(
                f"{name} is {tuple(head.hidden.shape)} and true_labels {tuple(labels.shape)}; pass (N, H) and (N,)."
            )


def _frozen_to_vocab(teacher: Head, vocab: int) -> Head:
    """The teacher without gradients, over the student's vocabulary.

    A teacher's head may be padded with rows of no token, for example up to a multiple of 64. They are cut off. Liger
    instead gives the student a logit of 0 there, so that the loss depends on a constant added to all logits.
    """
    bias = None if teacher.bias is None else teacher.bias.detach()[:vocab]
    return Head(teacher.hidden.detach(), teacher.weight.detach()[:vocab], bias)


class _Distillation:
    """Liger's arguments of both losses. A subclass names the divergence."""

    @staticmethod
    def _divergence_of(beta: float, temperature: float) -> Divergence:
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
        student = Head(student_input, student_weight, student_bias)
        teacher = Head(teacher_input, teacher_weight, teacher_bias)
        return _distilled(student, teacher, true_labels, options, cls._divergence_of(beta, temperature))


class LigerFusedLinearJSDFunction(_Distillation):
    """The generalized Jensen-Shannon divergence of `tigon.linear_kl`.

    `beta` is the teacher's share of the mixture. 0 gives the forward KL divergence, 1 the reverse.
    """

    @staticmethod
    def _divergence_of(beta: float, temperature: float) -> Divergence:
        return lambda student, teacher, has_label: ops.linear_kl(
            student.hidden, student.weight, teacher.hidden, teacher.weight, kind="jsd", beta=beta,
            bias=student.bias, teacher_bias=teacher.bias, temperature=temperature, mask=has_label,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityFunction(_Distillation):
    """beta · (1 - cosine similarity of the logits). `temperature` does not change an angle."""

    @staticmethod
    def _divergence_of(beta: float, temperature: float) -> Divergence:
        return lambda student, teacher, has_label: beta * (1.0 - cosine_of_logits(student, teacher, has_label))
