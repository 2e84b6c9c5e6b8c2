"""Embeddings with gradient accumulation fusion: PyTorch's gradients, without a gradient of the whole table."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from helpers import relative_error
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques.accumulation.fused_embedding import FusedEmbedding, fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears

pytest.importorskip("transformers")

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 1, 7], [2, 3, 3, 1]])


def model_of(family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    model = tiny_model(family, config).train().to(dtype)
    tigon.patch(model)
    return model


def gradients(model: Any, *, fused: bool, autocast: bool = False) -> dict[str, Tensor]:
    """Gradients of three micro-batches, as fp64."""
    if fused:
        fuse_linears(model)
        assert fuse_embeddings(model)
    batch = tiny_batch(CPU)
    for number in range(3):
        rolled = {name: batch[name].roll(number, dims=1) for name in ("input_ids", "labels")}
        with accumulation_fusion() if fused else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**rolled).loss
            loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


CASES: dict[str, dict[str, Any]] = {
    "untied in bf16": {"tie_word_embeddings": False, "dtype": torch.bfloat16},
    "tied": {"tie_word_embeddings": True},
    "tied in bf16": {"tie_word_embeddings": True, "dtype": torch.bfloat16},
    "autocast": {"tie_word_embeddings": True, "autocast": True},
    "padding and positions": {"family": "gpt2"},
    "scaled": {"family": "gemma3_text", "dtype": torch.bfloat16, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_err_at_most_twice_the_usual_error(case: str, written: list[tuple[int, ...]]) -> None:
    options = dict(CASES[case])
    autocast = options.pop("autocast", False)
    reference = model_of(**{**options, "dtype": torch.float64})
    # the weights of the exact model are those that the others have rounded
    reference.load_state_dict(model_of(**options).state_dict())
    want = gradients(reference, fused=False)
    usual = gradients(model_of(**options), fused=False, autocast=autocast)
    assert not written
    model = model_of(**options)
    got = gradients(model, fused=True, autocast=autocast)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    linears = sum(type(m).__name__ == "Linear" for m in model.modules())
    assert len(written) == 2 * (linears + len(tables))
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error, before = relative_error(got[name], expected), relative_error(usual[name], expected)
        assert error <= 2 * before + 1e-7, f"{name}: {error:.2e}, usually {before:.2e}"


def test_padding_token_gets_no_gradient() -> None:
    def gradient(fused: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(9, 4, padding_idx=3)
        table.weight.grad = torch.ones_like(table.weight)
        if fused:
            assert fuse_embeddings(nn.ModuleList([table])) == 1
        with accumulation_fusion():
            table(IDS).square().sum().backward()
        return table.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))
    assert torch.equal(gradient(True)[3], torch.ones(4))


def test_embeddings_that_pytorch_treats_in_its_own_way_are_left_alone() -> None:
    class Doubled(nn.Embedding):
        def forward(self, input_ids: Tensor) -> Tensor:
            return 2 * super().forward(input_ids)

    frozen = nn.Embedding(9, 4).requires_grad_(False)
    others = [
        nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4, scale_grad_by_freq=True),
    ]  # fmt: skip
    assert fuse_embeddings(nn.ModuleList([frozen, *others, Doubled(9, 4)])) == 0


def test_second_derivatives_are_pytorchs() -> None:
    def penalty(fused: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(9, 4).double()
        table.weight.grad = torch.zeros_like(table.weight)
        if fused:
            fuse_embeddings(nn.ModuleList([table]))
        with accumulation_fusion():
            (slope,) = torch.autograd.grad(table(IDS).tanh().sum(), [table.weight], create_graph=True)
            slope.square().sum().backward()
        return table.weight.grad

    torch.testing.assert_close(penalty(True), penalty(False))


def test_hooks_of_the_table_see_the_gradient_of_one_micro_batch() -> None:
    table = nn.Embedding(9, 4)
    fuse_embeddings(nn.ModuleList([table]))
    table.weight.grad = torch.ones_like(table.weight)
    seen: list[Tensor] = []
    table.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with accumulation_fusion():
        table(IDS).sum().backward()
    assert len(seen) == 1 and seen[0].sum() == 4 * IDS.numel()
    assert torch.equal(table.weight.grad, 1 + seen[0])


def test_second_micro_batch_makes_no_gradient_of_the_table() -> None:
    def step_bytes(fused: bool) -> int:
        table = nn.Embedding(4096, 64)
        if fused:
            fuse_embeddings(nn.ModuleList([table]))
        table.weight.grad = torch.zeros_like(table.weight)
        meter = PeakMeter(CPU)
        with accumulation_fusion():
            meter.start([table.weight, table.weight.grad])
            table(IDS).sum().backward()
            return meter.stop().step_bytes

    assert step_bytes(False) >= 4 * 4096 * 64 > 8 * step_bytes(True)


def test_copies_and_pickles_use_their_own_table() -> None:
    model = nn.Sequential(nn.Embedding(9, 4))
    fuse_embeddings(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(vars(other[0])["forward"], FusedEmbedding)
        with torch.no_grad():
            other[0].weight.zero_()
        with accumulation_fusion():
            assert not other(IDS).any()
    assert model[0].weight.any()
