"""Liger's tensor-parallel names on two processes: values and gradients of the formula for the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import two_ranks
from helpers import relative_error
from tigon.compat.liger.compositions.scaled_cross_entropy import (
    LigerFusedLinearScaledCrossEntropyTPFunction,
    liger_fused_linear_scaled_cross_entropy_tp,
)
from tigon.errors import OptionError, ShardingError


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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run({"loss_and_entropy": loss_and_entropy}, tmp_path_factory.mktemp("ranks"))


def test_scaled_loss_of_a_divided_head_equals_log_softmax_of_the_whole_one(found: list[dict[str, Any]]) -> None:
    two_ranks.assert_right(found, "loss_and_entropy")


def test_unknown_tiles_and_a_missing_group_are_refused() -> None:
    tensors = torch.randn(2, 4), torch.randn(3, 4), torch.zeros(2).long()
    with pytest.raises(OptionError, match="tiles_per_reduce"):
        LigerFusedLinearScaledCrossEntropyTPFunction.apply(*tensors, None, tiles_per_reduce=3)
    with pytest.raises(ShardingError, match="init_process_group"):
        LigerFusedLinearScaledCrossEntropyTPFunction.apply(*tensors, None)
