"""Shifts, sharing and logs of the multi-head loss; its values are checked with every op's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import relative_error
from tigon.errors import LabelError, OptionError, ShapeError
from tigon.ops import linear_cross_entropy, multi_head_linear_cross_entropy, prepare_targets
from tigon.ops.losses import inputs

# The package's attributes of these names are the functions.
B, T, H, V = 2, 11, 8, 29
CPU = torch.device("cpu")


def heads(device: torch.device, count: int = 3) -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(12)
    hiddens = [torch.randn(B, T, H).to(device).requires_grad_() for _ in range(count)]
    weights = [torch.randn(V, H).to(device).requires_grad_() for _ in range(count)]
    target = torch.randint(0, V, (B, T)).to(device)
    target[0, 4] = -100
    return hiddens, weights, target


def test_each_head_is_scored_on_its_shifted_position(backend: Any) -> None:
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
    torch.testing.assert_close(got.accuracy[:, 0], torch.stack([o.accuracy for o in by_hand]))
    total = sum(c * o.loss for c, o in zip(factors, by_hand, strict=True))
    torch.testing.assert_close(got.loss, total, rtol=1e-6, atol=0)
    leaves = [*hiddens, *weights]
    for a, b in zip(torch.autograd.grad(got.loss * 3, leaves), torch.autograd.grad(total * 3, leaves), strict=True):
        assert relative_error(a, b) < 1e-6


def test_shared_tensor_gets_the_gradients_of_all_heads(backend: Any) -> None:
    hiddens, weights, target = heads(backend.device)
    trunk, lm_head = hiddens[0], weights[0]
    got = multi_head_linear_cross_entropy(trunk, lm_head, target, shifts=(0, 1, 2))
    apart = sum(multi_head_linear_cross_entropy([trunk], [lm_head], target, shifts=(s,)) for s in (0, 1, 2))
    torch.testing.assert_close(got, apart, rtol=1e-6, atol=0)
    for a, b in zip(
        torch.autograd.grad(got, (trunk, lm_head)), torch.autograd.grad(apart, (trunk, lm_head)), strict=True
    ):
        assert relative_error(a, b) < 1e-6


def test_frozen_trunk_or_head_leaves_the_other_gradient_unchanged(backend: Any) -> None:
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


@pytest.mark.parametrize("own_weights", [True, False])
def test_few_ignored_rows_give_the_same_gradient_gathered_or_not(
    backend: Any, monkeypatch: Any, own_weights: bool
) -> None:
    """One row of 9 is scored by no head: all are taken, in slices; the same as without it, chunk by chunk."""
    torch.manual_seed(3)
    trunk = torch.randn(1, 9, H).to(backend.device).requires_grad_()
    weights = [torch.randn(V, H).to(backend.device).requires_grad_() for _ in range(2 if own_weights else 1)]
    block = [torch.randn(H, H).to(backend.device).requires_grad_(), torch.randn(H).to(backend.device).requires_grad_()]
    target = torch.randint(0, V, (1, 9)).to(backend.device)
    leaves, found, taken = [trunk, *weights, *block], [], []

    worth_gathering = inputs.worth_gathering

    def rows_taken(index_N: torch.Tensor, rows: int) -> torch.Tensor | None:
        taken.append(worth_gathering(index_N, rows))
        return taken[-1]

    monkeypatch.setattr(inputs, "worth_gathering", rows_taken)
    for left_out in (1 / 8, 0.0):
        monkeypatch.setattr(inputs, "_LEFT_OUT", left_out)
        loss = multi_head_linear_cross_entropy(
            trunk, weights if own_weights else weights[0], target, shifts=(1, 2), blocks=[[block], []],
            chunk_bytes=5 * V * 4,
        )  # fmt: skip
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    everything, gathered = taken
    assert everything is None and gathered.tolist() == [*range(8)]
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 1e-6
    assert torch.equal(found[0][1][0, -1], torch.zeros(H).to(backend.device))


def test_shift_past_the_end_gives_zero_loss_and_gradient(backend: Any) -> None:
    hiddens, weights, target = heads(backend.device, 2)
    got = multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, T + 3), outputs=("losses",))
    got.loss.backward()
    assert float(got.losses[1]) == 0.0
    assert torch.equal(hiddens[1].grad, torch.zeros_like(hiddens[1]))
    assert torch.equal(weights[1].grad, torch.zeros_like(weights[1]))
    assert bool((weights[0].grad != 0).any())


def blocks_of(device: torch.device, count: int) -> list[list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(13)
    return [
        [((torch.randn(H, H) / H).to(device).requires_grad_(), torch.randn(H).to(device).requires_grad_())]
        for _ in range(count)
    ]


def test_gradient_of_the_blocks_does_not_depend_on_chunks() -> None:
    """The sums are equal for one chunk or many, and for shared or separate head weights."""
    for shared in (False, True):
        found = []
        for chunk_bytes in (1 << 20, 8 * V * 4):
            hiddens, weights, target = heads(CPU)
            blocks = blocks_of(CPU, 3)
            loss = multi_head_linear_cross_entropy(
                hiddens[0], weights[0] if shared else weights, target, shifts=(1, 2, 4), blocks=blocks,
                head_weights=(1.0, 0.5, 0.25), chunk_bytes=chunk_bytes,
            )  # fmt: skip
            leaves = [hiddens[0], *(weights[:1] if shared else weights), *(t for b in blocks for p in b for t in p)]
            found.append((loss.detach(), torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
        for a, b in zip(found[0][1], found[1][1], strict=True):
            assert relative_error(a, b) < 1e-6


def test_heads_are_not_scored_across_documents() -> None:
    """Two documents in a row, against the same with every label taken out that is in another document."""
    hiddens, weights, target = heads(CPU)
    positions = torch.cat([torch.arange(4), torch.arange(T - 4)]).expand(B, T).to(CPU)
    for k, shift in enumerate((1, 2, 4)):
        one = {"shifts": (shift,), "outputs": ("losses", "counts")}
        got = multi_head_linear_cross_entropy(hiddens[k], weights[k], target, positions=positions, **one)
        by_hand = target.clone()
        by_hand[:, 4 : 4 + shift] = -100  # the first tokens of the second document: their predictors are in the first
        want = multi_head_linear_cross_entropy(hiddens[k], weights[k], by_hand, **one)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
        assert int(got.counts[0]) == int(want.counts[0]) == int((by_hand[:, shift:] != -100).sum())
    with pytest.raises(ShapeError, match="positions"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), positions=positions[:, 1:])


def test_prepared_targets_give_the_same_loss_and_fit_their_own_heads_alone() -> None:
    hiddens, weights, target = heads(CPU, 2)
    positions = (torch.arange(T) % 6).expand(B, T)
    shifts = (1, 3)
    call = {"shifts": shifts, "positions": positions}
    prepared = prepare_targets(target, **call)
    rows = prepared.rows()
    assert rows is not None and 0 < rows.numel() < target.numel()
    want = multi_head_linear_cross_entropy(hiddens, weights, target, **call)
    got = multi_head_linear_cross_entropy(hiddens, weights, prepared, **call)
    leaves = [*hiddens, *weights]
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert torch.equal(a, b)
    same = {"shifts": shifts, "positions": (torch.arange(T) % 6).expand(B, T)[:]}
    assert torch.equal(
        multi_head_linear_cross_entropy(hiddens, weights, prepared, **{**same, "positions": positions[:]}), want
    )
    for other in (
        prepare_targets(target), prepare_targets(target, shifts=shifts), prepare_targets(target, **same),
        prepare_targets(target, ignore_index=5, **call),
    ):  # fmt: skip
        with pytest.raises(OptionError, match="was prepared for"):
            multi_head_linear_cross_entropy(hiddens, weights, other, **call)
    with pytest.raises(OptionError, match="was prepared for heads"):
        linear_cross_entropy(hiddens[0], weights[0], prepared)
    with pytest.raises(OptionError, match="ignore_index 5, the loss has -100"):
        linear_cross_entropy(hiddens[0], weights[0], prepare_targets(target, ignore_index=5))


def test_targets_without_meaning_are_refused() -> None:
    target = torch.zeros(B, T, dtype=torch.int64)
    with pytest.raises(OptionError, match="none negative"):
        prepare_targets(target, shifts=(1, -1))
    with pytest.raises(ShapeError, match=r"must be \(B, T\)"):
        prepare_targets(target[0], shifts=(1,))
    with pytest.raises(ShapeError, match="must agree"):
        prepare_targets(target, shifts=(1,), positions=torch.arange(T)[None])


def test_accuracy_counts_targets_among_the_top_five_as_topk_does() -> None:
    """The share of targets among the 1, 2, ... 5 largest logits, as topk finds them."""
    hiddens, weights, target = heads(CPU)
    shifts = (1, 2, 4)
    got = multi_head_linear_cross_entropy(
        hiddens, weights, target, shifts=shifts, outputs=("accuracy",), logit_scale=-2.0, chunk_bytes=8 * V * 4
    )
    for k, shift in enumerate(shifts):
        logits, labels = (-2.0 * hiddens[k] @ weights[k].t())[:, :-shift], target[:, shift:]
        hit = logits.topk(5).indices == labels.unsqueeze(-1)
        share = (hit.cumsum(-1) * (labels != -100).unsqueeze(-1)).sum((0, 1)) / (labels != -100).sum()
        torch.testing.assert_close(got.accuracy[k], share)


def test_head_weights_as_a_tensor_or_a_list_give_the_same_loss() -> None:
    hiddens, weights, target = heads(CPU)
    factors = torch.tensor([1.0, 0.5, 0.0], device=CPU)
    losses = [
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), head_weights=given)
        for given in (factors, factors.tolist())
    ]
    assert torch.equal(*losses)


def test_compiled_loss_equals_eager_and_is_one_graph_for_all_head_weights() -> None:
    """A schedule changes the heads' weights at every step; weights in a tensor do not cause another graph."""
    hiddens, weights, target = heads(CPU)
    blocks = blocks_of(CPU, 3)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def loss_of(factors: Tensor) -> Any:
        return multi_head_linear_cross_entropy(
            hiddens[0], weights, target, shifts=(1, 2, 4), blocks=blocks, head_weights=factors
        )

    compiled = torch.compile(loss_of, backend=backend, fullgraph=True)
    for last in (0.5, 0.25):
        factors = torch.tensor([1.0, 0.5, last])
        torch.testing.assert_close(compiled(factors), loss_of(factors), rtol=1e-6, atol=0)
    assert len(graphs) == 1


def flops_of(**frozen: bool) -> float:
    """Operations of the products of a forward and a backward, by PyTorch's profiler."""
    torch.manual_seed(12)
    hidden = torch.randn(2, 64, 32, requires_grad=not frozen.get("hidden"))
    weights = [torch.randn(512, 32, requires_grad=not frozen.get("weight")) for _ in range(2)]
    target = torch.randint(0, 512, (2, 64))
    with torch.autograd.profiler.profile(with_flops=True) as found:
        loss = multi_head_linear_cross_entropy(hidden, weights, target, shifts=(1, 2))
        if loss.requires_grad:
            loss.backward()
    return sum(event.flops for event in found.function_events)


def test_frozen_part_costs_no_product() -> None:
    """Each head has three products: the logits, the hidden gradient and the weight gradient."""
    everything = flops_of()
    assert flops_of(hidden=True) == pytest.approx(everything * 2 / 3, rel=0.02)
    assert flops_of(weight=True) == pytest.approx(everything * 2 / 3, rel=0.02)
    assert flops_of(hidden=True, weight=True) == pytest.approx(everything / 3, rel=0.02)


def test_counts_and_options_without_meaning_are_refused(backend: Any) -> None:
    hiddens, weights, target = heads(backend.device)
    with pytest.raises(ShapeError, match="one of each per head"):
        multi_head_linear_cross_entropy(hiddens, weights[:2], target, shifts=(1, 2, 3))
    with pytest.raises(ShapeError, match="one of each per head"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=())
    with pytest.raises(OptionError, match="past"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, -1, 2))
    with pytest.raises(OptionError, match="none"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), reduction="none")
    with pytest.raises(OptionError, match="outputs"):
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), outputs=("entropy",))
    with pytest.raises(ShapeError, match=r"a block is \(8, 4\)"):
        block = (torch.randn(H, 4, device=backend.device), torch.randn(H, device=backend.device))
        multi_head_linear_cross_entropy(hiddens, weights, target, shifts=(1, 2, 3), blocks=[[], [], [block]])
    with pytest.raises(ShapeError, match="must agree"):
        multi_head_linear_cross_entropy(hiddens, weights, target[:, 1:], shifts=(1, 2, 3))


def test_label_out_of_range_is_refused_with_accuracy_requested() -> None:
    target = torch.randint(0, 20, (2, 8))
    target[0, 5] = 99
    with pytest.raises(LabelError, match="99"):
        multi_head_linear_cross_entropy(
            torch.randn(2, 8, 16), torch.randn(20, 16), target, shifts=(1, 2), outputs=("accuracy",)
        )


@pytest.mark.parametrize("weights", [torch.ones(2, requires_grad=True), torch.ones(2, 2), torch.tensor(1.0)])
def test_head_weights_that_require_gradients_or_have_a_wrong_shape_are_refused(weights: torch.Tensor) -> None:
    with pytest.raises((OptionError, ShapeError), match="head_weights"):
        multi_head_linear_cross_entropy(
            torch.randn(2, 8, 16), torch.randn(20, 16), torch.randint(0, 20, (2, 8)), shifts=(1, 2),
            head_weights=weights,
        )  # fmt: skip
