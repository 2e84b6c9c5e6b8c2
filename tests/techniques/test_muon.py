"""Muon for linear layers and AdamW for the rest: which weights, which updates, and an exact resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from tigon.errors import RecipeError
from tigon.techniques.optimizers import muon

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def small_model(kind: type[PreTrainedModel] = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    return kind(config).train()


def step(model: Any, optimizer: Any, seed: int) -> None:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def decayed(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.ndim > 1]


@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaForSequenceClassification])
def test_linear_layers_get_muon_and_all_others_adamw(kind: type[PreTrainedModel]) -> None:
    model = small_model(kind)
    optimizer = muon.build(model, decayed(model), **OPTIONS)
    by_muon = {id(p) for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in by_muon}
    assert names == {name for name, _ in model.named_parameters() if "_proj" in name}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    assert {group["weight_decay"] for group in optimizer.param_groups if group["muon"]} == {0.1}


def test_heads_outside_the_trunk_get_adamw() -> None:
    model = small_model()
    model.draft_heads = nn.ModuleDict({"lm_heads": nn.ModuleList(nn.Linear(32, 64) for _ in range(3))})
    assert all(name.startswith("model.layers.") for name in muon.matrix_names(model))


@pytest.mark.parametrize("trained", ["_proj", "norm"])
def test_model_that_trains_weights_of_one_kind_only_steps(trained: str) -> None:
    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = trained in name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, muon.build(model, decayed(model), **OPTIONS), seed=1)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if trained in name}


def test_model_without_linear_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
    with pytest.raises(RecipeError, match=r"GPT2LMHeadModel has none; use train\.optimizer: adamw"):
        muon.build(model, [], **OPTIONS)


def test_updates_are_orthogonal_with_the_rms_of_adamws_and_others_equal_adamw() -> None:
    model = small_model()
    other = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, muon.build(model, [], **{**OPTIONS, "weight_decay": 0.0}), seed=1)
    step(other, torch.optim.AdamW(other.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True), seed=1)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if "_proj" not in name:
            assert torch.equal(p, q), name
            continue
        update = (p.detach() - before[name]).double() / (-1e-2 * 0.2 * max(p.shape) ** 0.5)
        values = torch.linalg.svdvals(update)
        assert values.max() < 1.3 and values.median() > 0.6, name
        assert 0.05 < float(update.square().mean().sqrt() * 0.2 * max(p.shape) ** 0.5) < 0.4, name


def test_resume_is_exact() -> None:
    model = small_model()
    optimizer = muon.build(model, decayed(model), **OPTIONS)
    step(model, optimizer, seed=1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer, seed=2)
    again = small_model()
    resumed = muon.build(again, decayed(again), **OPTIONS)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    step(again, resumed, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_scheduler_changes_the_rate_of_both_parts() -> None:
    model = small_model()
    optimizer = muon.build(model, decayed(model), **OPTIONS)
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    step(model, optimizer, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_pytorch_without_muon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RecipeError, match=r"muon needs PyTorch 2.9 or newer, and this is .*; upgrade it, or use adamw"):
        muon.check()
