"""Liger's tensor-parallel names on two processes: values and gradients of the formula for the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import two_ranks
from helpers import relative_error
from tigon.compat.liger.compositions.scaled_cross_entropy import (
    LigerFusedLinearScaledCrossEntropyTPFunction,
    liger_fused_linear_scaled_cross_entropy_tp,
)
from tigon.compat.liger.compositions.vocab_parallel import LigerMegatronCrossEntropy, LigerVocabParallelCrossEntropy
from tigon.errors import OptionError, ShapeError, ShardingError


def loss_and_entropy(rank: int, mesh: Any) -> float:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
    target = torch.tensor([3, -100, 0, 11, 7])
    keep = target != -100
    logp = torch.log_softmax(hidden @ head.T / 0.7, -1)
    want = [-logp.gather(1, target.clamp(min=0)[:, None])[:, 0] * keep, -(logp.exp() * logp).sum(-1) * keep]
    exact = torch.autograd.grad(sum(r.square().sum() for r in want), (hidden, head))
    rows = slice(6 * rank, 6 * rank + 6)
    mine = [hidden.detach().clone().requires_grad_(), head.detach()[rows].clone().requires_grad_()]
    group = mesh.get_group()
    got = liger_fused_linear_scaled_cross_entropy_tp(*mine, target, group, 0.7, return_entropy=True)
    grads = torch.autograd.grad(sum(r.square().sum() for r in got), mine)
    alone = LigerFusedLinearScaledCrossEntropyTPFunction.apply(*mine, target, None, 0.7)
    pairs = [*zip(got, want, strict=True), (alone, want[0]), (grads[0], exact[0]), (grads[1], exact[1][rows])]
    return max(relative_error(a, b) for a, b in pairs)


def smoothed(logits: Tensor, target: Tensor, smoothing: float, of: slice) -> Tensor:
    """(1 - α) · nll + α · mean of -log p over the columns `of`; 0 for ignored targets."""
    minus = -torch.log_softmax(logits, -1)
    nll = minus.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((1 - smoothing) * nll + smoothing * minus[..., of].mean(-1)) * (target != -100)


def label_smoothing(rank: int, mesh: Any) -> float:
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 12, requires_grad=True)
    target = torch.tensor([[3, -100], [0, 11], [7, 5]])
    mine, group, everything = slice(6 * rank, 6 * rank + 6), mesh.get_group(), slice(None)
    upstream, errors = torch.randn(3, 2), []
    for loss, share, of in (
        (LigerVocabParallelCrossEntropy(), 0.0, everything),
        (LigerVocabParallelCrossEntropy(label_smoothing=0.1), 0.1, everything),
        (LigerVocabParallelCrossEntropy(-100, 0.1, "none", "megatron"), 0.1 * 12 / 11, everything),
        (LigerMegatronCrossEntropy(label_smoothing=0.1), 0.1 * 6 / 5, mine),
    ):
        part = logits.detach()[..., mine].clone().requires_grad_()
        got, want = loss(part, target, group), smoothed(logits, target, share, of)
        (grad,) = torch.autograd.grad(got, part, upstream)
        (exact,) = torch.autograd.grad(want, logits, upstream)
        errors += [relative_error(got, want), relative_error(grad, exact[..., mine])]
    return max(errors)


SCENARIOS = {"loss_and_entropy": loss_and_entropy, "label_smoothing": label_smoothing}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_divided_loss_equals_log_softmax_of_the_whole(found: list[dict[str, Any]], scenario: str) -> None:
    two_ranks.assert_right(found, scenario)


def test_loss_without_a_group_is_that_of_whole_logits() -> None:
    logits, target = torch.randn(3, 2, 12), torch.tensor([[3, -100], [0, 11], [7, 5]])
    found = LigerVocabParallelCrossEntropy(label_smoothing=0.1)(logits, target)
    want = F.cross_entropy(logits.movedim(-1, 1), target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(found, want)


def test_printed_losses_show_their_options() -> None:
    assert repr(LigerVocabParallelCrossEntropy(-1, 0.1)) == (
        "LigerVocabParallelCrossEntropy(ignore_index=-1, label_smoothing=0.1, reduction='none', "
        "label_smoothing_formula='pytorch', label_smoothing_mode='global')"
    )
    shown = repr(LigerMegatronCrossEntropy())
    assert shown.startswith("LigerMegatronCrossEntropy(ignore_index=-100, ") and "'megatron'" in shown


def test_options_that_liger_refuses_are_refused() -> None:
    for options in ({"reduction": "mean"}, {"label_smoothing": 1.0}, {"label_smoothing_mode": "local"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            LigerVocabParallelCrossEntropy(**options)
    with pytest.raises(ShapeError, match="sequence, batch"):
        LigerVocabParallelCrossEntropy()(torch.randn(2, 3), torch.zeros(2).long())


def test_unknown_tiles_and_a_missing_group_are_refused() -> None:
    tensors = torch.randn(2, 4), torch.randn(3, 4), torch.zeros(2).long()
    with pytest.raises(OptionError, match="tiles_per_reduce"):
        LigerFusedLinearScaledCrossEntropyTPFunction.apply(*tensors, None, tiles_per_reduce=3)
    with pytest.raises(ShardingError, match="init_process_group"):
        LigerFusedLinearScaledCrossEntropyTPFunction.apply(*tensors, None)
