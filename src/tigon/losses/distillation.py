"""Knowledge distillation: divergences from vectors of log-probabilities, and their weighted mean over tokens.

T is the teacher's distribution and S the student's. `tigon.linear_kl` computes the same divergences from hidden states
without the vectors over the vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses._checks import as_float, check_choice, check_number, same_shape
from tigon.losses.common import LossFormula
from tigon.losses.numerics import log1mexp
from tigon.losses.sequences import Tokens

DivergenceKind = Literal["forward", "reverse", "jsd"]

DIVERGENCE_FORMULAS: dict[str, LossFormula] = {
    "forward": LossFormula("KL(T ‖ S) = Σ T (log T - log S)", ("1503.02531",)),
    "reverse": LossFormula("KL(S ‖ T) = Σ S (log S - log T)", ("2306.08543",)),
    "jsd": LossFormula("b KL(T ‖ M) + (1-b) KL(S ‖ M); M = b T + (1-b) S", ("2306.13649",)),
}
DISTILLATION_FORMULAS: dict[str, LossFormula] = {
    "distillation": LossFormula("mean over tokens of w_soft t² D(T, S) + w_hard NLL", ("1503.02531", "2306.13649")),
}


class DistillationLoss(NamedTuple):
    """The loss of a student.

    Attributes:
        loss: scalar, to differentiate.
        soft: scalar, the mean divergence from the teacher without weight, without gradient.
        hard: scalar, the mean negative log-likelihood of the labels without weight, without gradient; None without it.
    """

    loss: Tensor
    soft: Tensor
    hard: Tensor | None


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p (log p - log q) over the last dimension. An entry with p = 0 adds nothing, whatever log q is."""
    impossible = log_p == -math.inf
    # Both logarithms are replaced before the difference, because -inf - -inf is NaN in the gradient too.
    difference = log_p.masked_fill(impossible, 0.0) - log_q.masked_fill(impossible, 0.0)
    return (torch.exp(log_p) * difference).sum(-1)


def _check_divergence_options(kind: str, beta: float) -> None:
    check_choice("kind", kind, get_args(DivergenceKind))
    check_number("beta", beta, at_least=0, at_most=1)


def divergence(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, kind: DivergenceKind = "forward", beta: float = 0.5
) -> Tensor:
    """Divergence between two distributions that are given by all of their log-probabilities.

    forward: KL(T || S). reverse: KL(S || T) (Gu et al. 2023, arXiv 2306.08543). jsd: β KL(T || M) + (1 - β) KL(S || M)
    with M = β T + (1 - β) S, the generalized Jensen-Shannon divergence of GKD (Agarwal et al. 2023, arXiv 2306.13649).

    Args:
        student_logprobs, teacher_logprobs: (..., V) normalized log-probabilities. An entry may be -inf where the
            distribution on the other side of the divergence is 0 too. Detach the teacher's to freeze it.
        kind: "forward", "reverse" or "jsd".
        beta: β of "jsd", in [0, 1]. As in GKD, 0 stands for the forward and 1 for the reverse KL.

    Returns:
        (...,) divergence of each token, in nats.

    Raises:
        OptionError: an option is unknown or out of range.
        ShapeError: the shapes differ, or are ().
        DtypeError: a tensor is not floating-point.
    """
    _check_divergence_options(kind, beta)
    student = as_float("student_logprobs", student_logprobs)
    teacher = as_float("teacher_logprobs", teacher_logprobs)
    if student.shape != teacher.shape or not student.ndim:
        raise ShapeError(
            f"student_logprobs is {tuple(student.shape)} and teacher_logprobs {tuple(teacher.shape)}; "
            "both must be (..., V)."
        )
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse" if beta else "forward"
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    # The mixture of two impossible entries is impossible. It is set by hand, because logaddexp's gradient is NaN there.
    impossible = (student == -math.inf) & (teacher == -math.inf)
    mixture = torch.logaddexp(
        student.masked_fill(impossible, 0.0) + math.log1p(-beta), teacher.masked_fill(impossible, 0.0) + math.log(beta)
    ).masked_fill(impossible, -math.inf)
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def add_tail(topk_logprobs: Tensor) -> Tensor:
    """Append a bin for all other entries of the vocabulary: (..., K) -> (..., K + 1) that sums to 1.

    The tail is log(1 - Σ p). It is at least log(eps) of the dtype, because rounding errors of the sum reach eps. At
    this bound its gradient is 0.

    Args:
        topk_logprobs: (..., K) log-probabilities of K different ids.

    Returns:
        (..., K + 1) log-probabilities; the last one is the tail's.

    Raises:
        ShapeError: the shape is ().
        DtypeError: the tensor is not floating-point.
    """
    x = as_float("topk_logprobs", topk_logprobs)
    if not x.ndim:
        raise ShapeError("topk_logprobs is (); it must be (..., K).")
    return torch.cat([x, log1mexp(torch.logsumexp(x, -1, keepdim=True))], -1)


def topk_divergence(
    student_logprobs: Tensor,
    teacher_topk_logprobs: Tensor,
    *,
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
) -> Tensor:
    """Divergence from a teacher whose K most probable ids are known, with a bin for the rest of the vocabulary.

    `add_tail` adds the bin. Without it the student could move all its probability to ids that the teacher does not
    name, at no cost.

    Args:
        student_logprobs: (..., K) the student's log-probabilities of the teacher's ids, as `tigon.linear_logprobs`
            gives for ids (..., K).
        teacher_topk_logprobs: (..., K) the teacher's, over its whole vocabulary.
        kind, beta: as in `divergence`.

    Returns:
        (...,) divergence of each token, in nats.

    Raises:
        OptionError: an option is unknown or out of range.
        ShapeError: the shapes differ, or are ().
        DtypeError: a tensor is not floating-point.
    """
    if student_logprobs.shape != teacher_topk_logprobs.shape:
        raise ShapeError(
            f"student_logprobs is {tuple(student_logprobs.shape)}; it must be {tuple(teacher_topk_logprobs.shape)}, "
            "as teacher_topk_logprobs is."
        )
    return divergence(add_tail(student_logprobs), add_tail(teacher_topk_logprobs), kind=kind, beta=beta)


def distillation(
    divergences: Tensor,
    mask: Tensor | None = None,
    *,
    nll: Tensor | None = None,
    weight_soft_loss: float = 1.0,
    weight_hard_loss: float = 0.0,
    temperature: float = 1.0,
    num_items: Tensor | float | None = None,
) -> DistillationLoss:
    """Mean over tokens of the divergence from the teacher, and of the loss on the labels if wanted.

    w_soft t² D + w_hard NLL (Hinton et al. 2015, arXiv 1503.02531). GKD (arXiv 2306.13649) is the default weights with
    divergences of the student's own samples.

    Args:
        divergences: D of each token, of any shape, as `divergence`, `topk_divergence` or `tigon.linear_kl` gives.
        mask: of the same shape, bool or numbers: False or 0 leaves a token out, whatever its values are.
        nll: of the same shape, the negative log-likelihood of each label.
        weight_soft_loss, weight_hard_loss: w_soft and w_hard, at least 0.
        temperature: t, by which the logits of D were divided; t² keeps the size of the gradient. GKD's trainers do not
            multiply: leave it at 1 for their loss.
        num_items: the denominator: the tokens of all micro-batches of the step. None: this batch's tokens. Values below
            1 count as 1.

    Returns:
        `DistillationLoss`: loss, soft and hard, scalars. A batch without tokens gives 0.

    Raises:
        OptionError: an option is out of range, or weight_hard_loss lacks nll.
        ShapeError: the shapes do not match.
        DtypeError: a tensor is not floating-point.
    """
    _check_distillation_options(weight_soft_loss, weight_hard_loss, temperature)
    if weight_hard_loss and nll is None:
        raise OptionError(f"weight_hard_loss={weight_hard_loss} requires nll.")
    soft_tokens = as_float("divergences", divergences)
    same_shape(soft_tokens.shape, nll=nll)
    soft_tokens = soft_tokens.reshape(-1)
    tokens = Tokens.of(soft_tokens, None if mask is None else _flat("mask", mask, divergences))
    denominator = tokens.items_of_step(num_items, soft_tokens.dtype)
    soft = tokens.masked(soft_tokens).sum() / denominator
    loss = (weight_soft_loss * temperature**2) * soft
    hard = None
    if nll is not None:
        hard = tokens.masked(as_float("nll", nll).reshape(-1)).sum() / denominator
        if weight_hard_loss:
            loss = loss + weight_hard_loss * hard
        hard = hard.detach()
    return DistillationLoss(loss, soft.detach(), hard)


def _flat(name: str, value: Tensor, like: Tensor) -> Tensor:
    same_shape(like.shape, **{name: value})
    return value.reshape(-1)


def _check_distillation_options(weight_soft_loss: float, weight_hard_loss: float, temperature: float) -> None:
    check_number("weight_soft_loss", weight_soft_loss, at_least=0)
    check_number("weight_hard_loss", weight_hard_loss, at_least=0)
    check_number("temperature", temperature, above=0)
