"""GaLore: what it projects, what a step does, and that it can be saved and resumed."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from tigon.techniques.optimizers import galore
from tigon.techniques.optimizers.galore import GaLoreAdamW, basis, build, projected_names


def gradient_of_rank(rank: int, m: int, n: int, noise: float = 1e-3) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(m, rank) @ torch.randn(rank, n) + noise * torch.randn(m, n)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64)])
def test_basis_spans_the_leading_directions(shape):
    gradient = gradient_of_rank(8, *shape)
    found = basis(gradient, 8, seed=3)
    u, _, vh = torch.linalg.svd(gradient)
    leading = u[:, :8] if shape[0] <= shape[1] else vh[:8].T
    torch.testing.assert_close(found.T @ found, torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(found @ (found.T @ leading), leading, atol=1e-4, rtol=0)


def test_basis_of_a_zero_gradient_is_finite():
    assert torch.isfinite(basis(torch.zeros(20, 30), 4, seed=1)).all()


def test_parameters_without_projection_are_updated_as_by_adamw():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(7, 5)) for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    optimizers = GaLoreAdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        ours.grad = torch.randn(7, 5)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_update_stays_in_its_subspace(shape):
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 4}], lr=0.1, gap=3)
    for step in range(3):
        before = weight.detach().clone()
        weight.grad = gradient_of_rank(4, *shape) * (step + 1)
        optimizer.step()
        moved, projection = weight.detach() - before, optimizer.state[weight]["projection"]
        inside = projection @ projection.T @ moved if shape[0] <= shape[1] else moved @ projection @ projection.T
        torch.testing.assert_close(inside, moved, atol=1e-6, rtol=1e-4)
        assert float(moved.abs().max()) > 1e-3


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("rank", [0, 4])
def test_update_in_chunks_equals_the_whole_one(shape, rank, monkeypatch):
    """Covers a transposed view, whose rows are not contiguous, and a scalar."""
    torch.manual_seed(1)
    start, gradients = torch.randn(shape), torch.randn(3, *shape)
    moved = []
    for elements in (1 << 23, 7 * shape[1], 1):
        monkeypatch.setattr(galore, "ELEMENTS", elements)
        for view in (start.clone(), start.t().contiguous().t()):
            weight, scale = nn.Parameter(view), nn.Parameter(torch.ones(()))
            groups = [{"params": [weight], "rank": rank}, {"params": [scale]}]
            optimizer = GaLoreAdamW(groups, lr=0.1, weight_decay=0.1, gap=2)
            for gradient in gradients:
                weight.grad, scale.grad = gradient.clone(), gradient.sum()
                optimizer.step()
            moved.append((weight.detach().clone(), scale.detach().clone()))
    for weight, scale in moved[1:]:
        torch.testing.assert_close(weight, moved[0][0], atol=1e-6, rtol=1e-6)
        assert torch.equal(scale, moved[0][1]) and float(scale) != 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradient_that_is_not_finite_moves_no_weight_in_the_backward_pass(bad, dtype):
    for place in (0, 500, 999):
        weight = nn.Parameter(torch.ones(1000, dtype=dtype))
        optimizer = GaLoreAdamW([weight], lr=0.1, layerwise=True)
        factors = torch.full((1000,), 1e4, dtype=dtype)  # its sum is not finite in fp16
        (weight * factors).sum().backward()
        assert not optimizer.take_refused() and not torch.equal(weight, torch.ones_like(weight))
        before = weight.detach().clone()
        factors[place] = bad
        (weight * factors).sum().backward()
        assert optimizer.take_refused() and torch.equal(weight, before)


def test_subspace_changes_after_every_gap():
    weight = nn.Parameter(torch.zeros(24, 40))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 4}], lr=0.1, gap=3)
    seen = []
    for step in range(7):
        torch.manual_seed(step)
        weight.grad = torch.randn(24, 40)
        optimizer.step()
        seen.append(optimizer.state[weight]["projection"].clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, True]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 24, bias=False), nn.Tanh(), nn.Linear(24, 2))


def made(model: nn.Module, **options: object) -> GaLoreAdamW:
    names = [name for name, p in model.named_parameters() if p.ndim == 2]
    settings = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "rank": 4, "gap": 2, "layerwise": False}
    return build(model, names, **{**settings, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        loss = (model(torch.randn(16, 20, generator=draw)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_layerwise_updates_equal_a_step_and_keep_no_gradients():
    one, two = small(), small()
    by_layer = made(two, layerwise=True)
    assert train(one, made(one), range(6)) == train(two, by_layer, range(6))
    two(torch.ones(1, 20)).sum().backward()
    assert all(parameter.grad is None for parameter in two.parameters())


@pytest.mark.parametrize("layerwise", [False, True])
def test_resumed_galore_equals_the_uninterrupted_one(tmp_path, layerwise):
    model = small()
    optimizer = made(model, layerwise=layerwise)
    train(model, optimizer, range(3))  # in the middle of a gap
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = small()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    second = made(resumed, layerwise=layerwise)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert train(resumed, second, range(3, 9)) == train(model, optimizer, range(3, 9))


def test_only_matrices_of_the_layers_are_projected():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    names = projected_names(model, 8)
    assert len(names) == 7 and all(name.startswith("model.layers.0.") for name in names)
    assert projected_names(model, 16) == set()
