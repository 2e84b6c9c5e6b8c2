"""Shifts, sharing and logs of the multi-head loss; its values are checked with every op's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import relative_error
from tigon.errors import OptionError, ShapeError
from tigon.ops import linear_cross_entropy, multi_head_linear_cross_entropy

B, T, H, V = 2, 11, 8, 29


def heads(device: torch.device, count: int = 3) -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(12)
    hiddens = [torch.randn(B, T, H).to(device).requires_grad_() for _ in range(count)]
    weights = [torch.randn(V, H).to(device).requires_grad_() for _ in range(count)]
    target = torch.randint(0, V, (B, T)).to(device)
    target[0, 4] = -100
    return hiddens, weights, target


def test_head_is_scored_on_another_position(backend: Any) -> None:
    """Head k at t against label[t + s_k]: equal to slicing hidden and labels by hand, per head."""
    hiddens, weights, target = heads(backend.device)
    shifts, factors = (1, 2, 4), (1.0, 0.8, 0.5)
    got = multi_head_linear_cross_entropy(
        hiddens, weights, target, shifts=shifts, head_weights=factors, outputs=("losses", "accuracy")
    )
    by_hand = []
    for x, w, s in zip(hiddens, weights, shifts, strict=True):
        by_hand.append(linear_cross_entropy(x[:, :-s], w, target[:, s:], outputs=("accuracy",)))
    torch.testing.assert_close(got.losses, torch.stack([o.loss for o in by_hand]).detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.accuracy, torch.stack([o.accuracy for o in by_hand]))
    total = sum(c * o.loss for c, o in zip(factors, by_hand, strict=True))
    torch.testing.assert_close(got.loss, total, rtol=1e-6, atol=0)
    leaves = [*hiddens, *weights]
    for a, b in zip(torch.autograd.grad(got.loss * 3, leaves), torch.autograd.grad(total * 3, leaves), strict=True):
        assert relative_error(a, b) < 1e-6


def test_shared_tensor_gets_one_heads_gradient(backend: Any) -> None:
    hiddens, weights, target = heads(backend.device)
    trunk, lm_head = hiddens[0], weights[0]
    got = multi_head_linear_cross_entropy(trunk, lm_head, target, shifts=(0, 1, 2))
    apart = sum(multi_head_linear_cross_entropy([trunk], [lm_head], target, shifts=(s,)) for s in (0, 1, 2))
    torch.testing.assert_close(got, apart, rtol=1e-6, atol=0)
    for a, b in zip(
        torch.autograd.grad(got, (trunk, lm_head)), torch.autograd.grad(apart, (trunk, lm_head)), strict=True
    ):
        assert relative_error(a, b) < 1e-6


def test_frozen_trunk_or_head_changes_the_others_gradient(backend: Any) -> None:
    """Stage 1 of Medusa: the trunk is frozen and the heads learn."""
    hiddens, weights, target = heads(backend.device)
    everything = torch.autograd.grad(
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3)), [*hiddens, *weights]
    )
    frozen = multi_head_linear_cross_entropy([h.detach() for h in hiddens], weights, target, shifts=(1, 2, 3))
    for a, b in zip(torch.autograd.grad(frozen, weights), everything[3:], strict=True):
        assert torch.equal(a, b)
    only = multi_head_linear_cross_entropy(hiddens, [w.detach() for w in weights], target, shifts=(1, 2, 3))
    for a, b in zip(torch.autograd.grad(only, hiddens), everything[:3], strict=True):
        assert torch.equal(a, b)


def test_shift_past_the_end_divides_by_zero(backend: Any) -> None:
    hiddens, weights, target = heads(backend.device, 2)
    got = multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, T + 3), outputs=("losses",))
    got.loss.backward()
    assert float(got.losses[1]) == 0.0
    assert torch.equal(hiddens[1].grad, torch.zeros_like(hiddens[1]))
    assert torch.equal(weights[1].grad, torch.zeros_like(weights[1]))
    assert bool((weights[0].grad != 0).any())


def test_counts_or_options_without_meaning_pass(backend: Any) -> None:
    hiddens, weights, target = heads(backend.device)
    with pytest.raises(ShapeError, match="one a head"):
        multi_head_linear_cross_entropy(hiddens, weights[:2], target, shifts=(1, 2, 3))
    with pytest.raises(ShapeError, match="one a head"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=())
    with pytest.raises(OptionError, match="past"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, -1, 2))
    with pytest.raises(OptionError, match="none"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), reduction="none")
    with pytest.raises(OptionError, match="outputs"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), outputs=("entropy",))
    with pytest.raises(ShapeError, match="must agree"):
        multi_head_linear_cross_entropy(hiddens, weights, target[:, 1:], shifts=(1, 2, 3))
