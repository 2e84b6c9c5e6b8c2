"""Gradient accumulation fusion: a backward writes to `.grad` only where autograd would, and adds the same gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from helpers import relative_error
from tigon.ops.accumulation_fusion import LeafGradient, accumulation_fusion

N, H, V = 84, 24, 100
# Mode -> options of the loss that choose it (ops/head/chunks.py).
MODES: dict[str, dict[str, Any]] = {
    "keep": {"chunk_bytes": 1 << 20},
    "stream": {"chunk_bytes": 22 * V * 2},
    "stream, 16-bit sum": {"chunk_bytes": 22 * V * 2, "fp32_accumulate": False},
    "recompute": {"chunk_bytes": 22 * V * 2, "reduction": "none"},
}


def micro_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, H, generator=generator), torch.randint(0, V, (N,), generator=generator)


def head(dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(0)) / H**0.5
    return weight.to(dtype).requires_grad_()


def accumulated(weight: Tensor, dtype: torch.dtype, options: dict[str, Any], fused: bool) -> Tensor:
    """The weight's gradient after three micro-batches; each has a loss scale of its own."""
    for seed in range(3):
        hidden, target = micro_batch(seed)
        with accumulation_fusion() if fused else torch.enable_grad():
            loss = tigon.linear_cross_entropy(hidden.to(dtype).requires_grad_(), weight, target, **options)
            ((seed + 1) * loss.mean()).backward()
    assert weight.grad is not None
    return weight.grad


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each backward that could add to `.grad` did."""
    found: list[bool] = []
    plain = LeafGradient.to_add_to

    def watched(self: LeafGradient) -> Tensor | None:
        grad = plain(self)
        found.append(grad is not None)
        return grad

    monkeypatch.setattr(LeafGradient, "to_add_to", watched)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_adds_the_gradient_of_its_weight_within_twice_the_usual_error(dtype, mode, written):
    options = MODES[mode]
    if dtype == torch.float16 and "fp32_accumulate" in options:
        pytest.skip("sums of fp16 gradients are always fp32")
    double = {**options, "chunk_bytes": 4 * options["chunk_bytes"]}
    want = accumulated(head(dtype).detach().double().requires_grad_(), torch.float64, double, fused=False)
    usual = accumulated(head(dtype), dtype, options, fused=False)
    assert not written
    got = accumulated(head(dtype), dtype, options, fused=True)
    assert written == [False, True, True]
    assert relative_error(got, want) <= 2 * relative_error(usual, want) + 1e-7


def test_autocast_adds_the_16_bit_product_to_the_fp32_gradient(written):
    def step(fused: bool) -> Tensor:
        weight = head()
        with torch.autocast("cpu", torch.bfloat16):
            return accumulated(weight, torch.float32, {}, fused)

    want = accumulated(head().detach().double().requires_grad_(), torch.float64, {}, fused=False)
    usual, got = step(False), step(True)
    assert got.dtype == torch.float32 and written == [False, True, True]
    assert relative_error(got, want) <= 2 * relative_error(usual, want)


def loss_of(weight: Tensor) -> Tensor:
    hidden, target = micro_batch(1)
    loss = tigon.linear_cross_entropy(hidden.requires_grad_(), weight, target)
    assert isinstance(loss, Tensor)
    return loss


def weight_with_gradient() -> Tensor:
    weight = head()
    weight.grad = torch.ones_like(weight)
    return weight


def test_gradient_is_written_into_the_tensor_that_exists(written):
    weight = weight_with_gradient()
    before = weight.grad
    with accumulation_fusion():
        loss_of(weight).backward()
    assert written == [True] and weight.grad is before
    (alone,) = torch.autograd.grad(loss_of(weight), [weight])
    torch.testing.assert_close(before, 1 + alone)


def test_autograd_grad_returns_the_gradient_and_writes_nothing():
    weight = weight_with_gradient()
    with accumulation_fusion():
        (got,) = torch.autograd.grad(loss_of(weight), [weight])
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones_like(weight))
    (want,) = torch.autograd.grad(loss_of(weight), [weight])
    assert torch.equal(got, want)


def test_backward_for_other_inputs_writes_nothing():
    weight = weight_with_gradient()
    hidden, target = micro_batch(1)
    hidden.requires_grad_()
    with accumulation_fusion():
        tigon.linear_cross_entropy(hidden, weight, target).backward(inputs=[hidden])  # type: ignore[union-attr]
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones_like(weight))
    assert hidden.grad is not None


def test_second_backward_of_a_retained_graph_adds_again():
    weight = weight_with_gradient()
    with accumulation_fusion():
        loss = loss_of(weight)
        loss.backward(retain_graph=True)
        loss.backward()
    (alone,) = torch.autograd.grad(loss_of(weight), [weight])
    torch.testing.assert_close(weight.grad, 1 + 2 * alone)


def test_hooks_of_the_weight_see_the_gradient_of_one_micro_batch():
    weight, seen = weight_with_gradient(), []
    handle = weight.register_hook(lambda grad: seen.append(grad.clone()))
    with accumulation_fusion():
        loss_of(weight).backward()
    handle.remove()
    (alone,) = torch.autograd.grad(loss_of(weight), [weight])
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], alone)
    torch.testing.assert_close(weight.grad, 1 + alone)


def test_hook_after_accumulation_sees_the_sum():
    weight, seen = weight_with_gradient(), []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    with accumulation_fusion():
        loss_of(weight).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("kind", ["transposed", "sparse"])
def test_gradient_of_another_layout_is_accumulated_by_autograd(kind, written):
    weight = head()
    weight.grad = torch.ones(H, V).t() if kind == "transposed" else torch.ones(V, H).to_sparse()
    with accumulation_fusion():
        loss_of(weight).backward()
    (alone,) = torch.autograd.grad(loss_of(weight), [weight])
    assert written == [False]
    torch.testing.assert_close(weight.grad.to_dense() if kind == "sparse" else weight.grad, 1 + alone)


def test_nothing_is_fused_outside_a_step(written):
    weight = weight_with_gradient()
    loss = loss_of(weight)  # the forward was outside
    with accumulation_fusion():
        loss.backward()
        later = loss_of(weight)
    later.backward()  # the backward is outside
    assert written == [False]


def test_frozen_weights_and_views_of_weights_are_left_to_autograd():
    with accumulation_fusion():
        assert LeafGradient.of(head().detach()) is None
        assert LeafGradient.of(head().view(V, H)) is None
        assert LeafGradient.of(head()) is not None
        with torch.no_grad():
            assert LeafGradient.of(head()) is None
