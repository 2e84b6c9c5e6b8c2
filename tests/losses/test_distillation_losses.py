"""Divergences and their mean against loops over the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_checks import check, check_finite, draw
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses import add_tail, distillation, divergence, topk_divergence

V, K = 7, 3
STUDENT, TEACHER = draw(2, 3, V, seed=1), draw(2, 3, V, seed=2)


def kl(p: list[Tensor], q: list[Tensor]) -> Tensor:
    return sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True))


def by_loop(student: list[Tensor], teacher: list[Tensor], kind: str, beta: float) -> Tensor:
    if kind == "jsd":
        mixed = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
        return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)
    return kl(teacher, student) if kind == "forward" else kl(student, teacher)


KINDS = [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]


def probabilities(logits: Tensor) -> list[Tensor]:
    e = [torch.exp(x) for x in logits]
    return [x / sum(e) for x in e]


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_divergence_and_gradients_are_the_formula(kind: Any, beta: float) -> None:
    def formula(student: Tensor, teacher: Tensor) -> Tensor:
        rows = zip(student.reshape(-1, V), teacher.reshape(-1, V), strict=True)
        return torch.stack([by_loop(probabilities(s), probabilities(t), kind, beta) for s, t in rows]).reshape(2, 3)

    def ours(student: Tensor, teacher: Tensor) -> Tensor:
        return divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind=kind, beta=beta)

    check(ours, formula, {"student": STUDENT, "teacher": TEACHER})


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_topk_divergence_and_gradients_are_the_formula(kind: Any, beta: float) -> None:
    ids = TEACHER.topk(K, -1).indices

    def bins(logits: Tensor, chosen: Tensor) -> list[Tensor]:
        p = probabilities(logits)
        return [*(p[i] for i in chosen.tolist()), sum(p[i] for i in range(V) if i not in chosen.tolist())]

    def formula(student: Tensor, teacher: Tensor) -> Tensor:
        rows = zip(student.reshape(-1, V), teacher.reshape(-1, V), ids.reshape(-1, K), strict=True)
        return torch.stack([by_loop(bins(s, i), bins(t, i), kind, beta) for s, t, i in rows]).reshape(2, 3)

    def ours(student: Tensor, teacher: Tensor) -> Tensor:
        return topk_divergence(
            student.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), kind=kind, beta=beta
        )

    check(ours, formula, {"student": STUDENT, "teacher": TEACHER})


def test_beta_0_and_1_of_jsd_are_the_forward_and_the_reverse_kl() -> None:
    student, teacher = STUDENT.log_softmax(-1), TEACHER.log_softmax(-1)
    for beta, kind in ((0, "forward"), (1, "reverse"), (0.0, "forward"), (1.0, "reverse")):
        assert torch.equal(divergence(student, teacher, kind="jsd", beta=beta), divergence(student, teacher, kind=kind))


def test_all_ids_in_the_top_k_give_the_full_divergence() -> None:
    student, teacher = STUDENT.log_softmax(-1), TEACHER.log_softmax(-1)
    for kind in ("forward", "reverse", "jsd"):
        # The tail of a whole vocabulary is rounding alone, and costs no more than that.
        torch.testing.assert_close(
            topk_divergence(student, teacher, kind=kind), divergence(student, teacher, kind=kind), rtol=0, atol=1e-12
        )


def test_the_tail_completes_the_sum_to_1() -> None:
    x = TEACHER.log_softmax(-1)[..., :K]
    full = add_tail(x)
    assert torch.equal(full[..., :K], x)
    torch.testing.assert_close(full.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_extreme_log_probabilities_give_finite_divergences_and_gradients(kind: Any) -> None:
    peaks = [torch.tensor([[0.0, -500.0, -500.0]]), torch.tensor([[-500.0, 0.0, -1e4]]), torch.full((1, 3), -500.0)]
    peaks.append(torch.tensor([[1e-6, -20.0, -500.0]]))
    for student in peaks:
        for teacher in peaks:
            check_finite(lambda s, t: topk_divergence(s, t, kind=kind), {"s": student, "t": teacher})
            check_finite(lambda s, t: divergence(s, t, kind=kind), {"s": student, "t": teacher})


def test_entries_that_both_sides_exclude_add_nothing() -> None:
    mask = torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0, -math.inf, 0.0])
    for kind in ("forward", "reverse", "jsd"):
        student = (STUDENT + mask).requires_grad_()
        teacher = (TEACHER + mask).requires_grad_()
        found = divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind=kind)
        keep = mask == 0
        smaller = divergence(STUDENT[..., keep].log_softmax(-1), TEACHER[..., keep].log_softmax(-1), kind=kind)
        torch.testing.assert_close(found, smaller)
        found.sum().backward()
        assert student.grad.isfinite().all() and teacher.grad.isfinite().all()


def test_a_teacher_without_probability_for_an_entry_ignores_the_students_there() -> None:
    teacher = torch.tensor([[0.0, -math.inf]])
    student = torch.tensor([[-0.5, -1.0]]).requires_grad_()
    for kind in ("forward", "jsd"):
        divergence(student, teacher, kind=kind).sum().backward()
    assert student.grad.isfinite().all()


# --- the mean over tokens --------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 0, 1], [0, 0, 1]])
SOFT, NLL = draw(2, 3, seed=3).abs(), draw(2, 3, seed=4).abs()


@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(11.0)])
def test_distillation_weights_both_means(num_items: Any) -> None:
    def formula(divergences: Tensor, nll: Tensor) -> Tensor:
        total = torch.zeros((), dtype=nll.dtype)
        for b, t in MASK.nonzero().tolist():
            total = total + 0.7 * 2.0**2 * divergences[b, t] + 0.3 * nll[b, t]
        return total / (3 if num_items is None else 11)

    def ours(divergences: Tensor, nll: Tensor) -> Tensor:
        return distillation(
            divergences, MASK, nll=nll, weight_soft_loss=0.7, weight_hard_loss=0.3, temperature=2.0, num_items=num_items
        ).loss

    check(ours, formula, {"divergences": SOFT, "nll": NLL})


def test_distillation_returns_what_trainers_log_and_leaves_masked_tokens_out() -> None:
    bad = SOFT.masked_fill(MASK == 0, math.nan).requires_grad_()
    result = distillation(bad, MASK, nll=NLL)
    torch.testing.assert_close(result.soft, SOFT[MASK == 1].mean())
    torch.testing.assert_close(result.hard, NLL[MASK == 1].mean())
    result.loss.backward()
    assert bad.grad.isfinite().all() and not result.soft.requires_grad
    assert distillation(SOFT, torch.zeros(2, 3)).loss.item() == 0.0
    assert distillation(SOFT.sum()).hard is None


def test_invalid_options_and_tensors_are_refused() -> None:
    for call, words in (
        (
            lambda: divergence(STUDENT, TEACHER, kind="kl"),
            "kind='kl' is not known; choose one of forward",
        ),
        (lambda: topk_divergence(STUDENT, TEACHER, kind="jsd", beta=1.5), "beta=1.5 must be at least 0 and at most 1"),
        (lambda: distillation(SOFT, weight_hard_loss=0.5), "weight_hard_loss=0.5 requires nll"),
        (lambda: distillation(SOFT, temperature=0.0), "temperature=0.0 must be above 0"),
        (lambda: distillation(SOFT, num_items=-1), "num_items=-1"),
    ):
        with pytest.raises(OptionError) as caught:
            call()
        assert words in str(caught.value)
    for call in (
        lambda: divergence(STUDENT, TEACHER[0]),
        lambda: divergence(torch.tensor(0.0), torch.tensor(0.0)),
        lambda: topk_divergence(STUDENT, TEACHER[..., :2]),
        lambda: add_tail(torch.tensor(0.0)),
        lambda: distillation(SOFT, MASK[0]),
        lambda: distillation(SOFT, nll=NLL[0]),
        lambda: distillation(SOFT, num_items=torch.ones(2)),
    ):
        with pytest.raises(ShapeError):
            call()
