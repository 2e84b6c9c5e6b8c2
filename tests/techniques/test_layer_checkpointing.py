"""Layers that recompute different parts: the gradients of full checkpointing bit for bit, and no other work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch as replaced

import pytest
import torch
from small_llama import small_llama
from torch import nn

from helpers import Count
from tigon import add_rms_norm, patch
from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.models.verification.tiny import tiny_model
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques import TECHNIQUES, matrix
from tigon.techniques.checkpointing import dropped_inputs
from tigon.techniques.checkpointing.layer_checkpointing import apply, groups_of, states_of, written
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.train import STATES
from tigon.techniques.technique import RunInfo

transformers = pytest.importorskip("transformers")

FAMILIES = ("llama", "gemma3_text", "phi3", "qwen3_moe", "gpt2")
CPU = torch.device("cpu")
ALL_FOUR = ("full", "mlp", "elementwise", "none")


def llama(layers: int = 4, **more: Any) -> Any:
    shape = {"intermediate_size": 96, "num_key_value_heads": 2, "vocab_size": 128}
    return small_llama(num_hidden_layers=layers, **shape, **more)


def batch(tokens: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradients(model: Any, states: tuple[str, ...], **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    apply(model, states)
    torch.manual_seed(7)
    loss = model(**(inputs or batch())).loss
    torch.rand(3)  # the generators go on
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found
    return {"loss": loss.detach(), **found}


def check_equal(make: Callable[[], Any], *settings: tuple[str, ...], **inputs: torch.Tensor) -> None:
    want = gradients(make(), ("full",) * len(settings[0]), **inputs)
    for states in settings:
        got = gradients(make(), states, **inputs)
        assert got.keys() == want.keys()
        different = [name for name in want if not torch.equal(got[name], want[name])]
        assert not different, (states, different)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_gradients_of_full_checkpointing_bit_for_bit(family):
    def make() -> Any:
        torch.manual_seed(0)
        model = tiny_model(family).train()
        patch(model)
        return model

    layers = len(decoder_layers(make()))
    check_equal(make, *((state,) * layers for state in STATES[1:]), ("full", "elementwise", "mlp", "none")[-layers:])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
def test_dropout_and_precision_keep_the_gradients(precision):
    def make() -> Any:
        model = llama(attention_dropout=0.3)
        return model.to(torch.bfloat16) if precision == "bf16" else model

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
        check_equal(make, ALL_FOUR, ("elementwise",) * 4, ("mlp",) * 4)


def test_packed_rows_keep_the_gradients():
    inputs = batch(32)
    inputs["position_ids"] = torch.cat([torch.arange(12), torch.arange(20)]).expand(2, 32)
    check_equal(llama, ALL_FOUR, **inputs)


def test_frozen_parts_keep_the_gradients():
    def make() -> Any:
        model = llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[2].mlp.requires_grad_(False)
        model.model.layers[3].input_layernorm.requires_grad_(False)
        return model

    check_equal(make, ALL_FOUR, ("elementwise",) * 4, ("mlp",) * 4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_attached_before_or_after_keep_the_gradients(when):
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
        config = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config).train()

    found = []
    for states in (("full",) * 4, ALL_FOUR, ("elementwise",) * 4):
        model = llama()
        if when == "before":
            model = adapted(model)
            found.append(gradients(model, states))
            continue
        apply(model, states)
        model = adapted(model)
        torch.manual_seed(7)
        model(**batch()).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for got in found[1:]:
        assert found[0].keys() == got.keys() and len(got) >= 16
        assert all(torch.equal(got[name], want) for name, want in found[0].items())


def test_adapters_in_one_op_keep_the_gradients_and_stay_one_op(monkeypatch):
    peft = pytest.importorskip("peft")
    from tigon.models.seams import lora

    calls: list[Any] = []
    real = lora.ops.lora_linear
    monkeypatch.setattr(lora.ops, "lora_linear", lambda *a, **k: calls.append(k) or real(*a, **k))

    def adapted() -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(llama(), config).train()
        patch(model)
        return model

    check_equal(adapted, ALL_FOUR, ("elementwise",) * 4, ("mlp",) * 4)
    calls.clear()
    gradients(adapted(), ("elementwise",) * 4)
    assert len(calls) == 4 * 7, "once for each layer: no product is repeated"


def backward_counts(states: tuple[str, ...]) -> Counter[str]:
    model = llama()
    apply(model, states)
    loss = model(**batch()).loss
    with Count() as count:
        loss.backward()
    return count.n


def test_each_state_repeats_only_its_own_work():
    none, elementwise, mlp, full = (backward_counts((state,) * 4) for state in reversed(STATES))
    attention = next(name for name in full if "attention" in name and "backward" not in name)
    assert elementwise["aten::mm"] == none["aten::mm"]
    assert mlp["aten::mm"] == none["aten::mm"] + 4 * 2, "gate and up of each MLP"
    assert full["aten::mm"] == none["aten::mm"] + 4 * 6, "and q, k, v and o; never down, whose output nobody needs"
    assert full[attention] == 4 and not elementwise[attention] and not mlp[attention]


def test_inputs_shared_by_linear_layers_are_computed_once():
    """q, k and v share a norm's output, as do gate and up: two norms and one gated unit in each layer."""
    runs: Counter[str] = Counter()
    counting = {
        kind: lambda node, kind=kind, run=run: runs.update([kind.__name__]) or run(node)
        for kind, run in dropped_inputs._COMPUTE.items()
    }
    with replaced.object(dropped_inputs, "_COMPUTE", counting):
        gradients(llama(), ("elementwise",) * 4)
    assert runs == {"RMSNorm": 8, "GLU": 4}


def test_input_of_a_linear_layer_after_an_added_norm_is_dropped_and_recomputed():
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    weight, linear = torch.rand(8, requires_grad=True), nn.Linear(8, 4, bias=False)

    def run(dropped: dropped_inputs.DroppedInputs | None) -> list[torch.Tensor]:
        normed, total = add_rms_norm(x, residual, weight)
        if dropped is None:
            out = linear(normed)
        else:
            assert isinstance(dropped._pack(normed), dropped_inputs._Dropped) and dropped._pack(total) is total
            with dropped.saving():
                out = linear(normed)
        return list(torch.autograd.grad(out.square().sum() + total.sum(), [x, residual, weight, linear.weight]))

    got, want = run(dropped_inputs.DroppedInputs()), run(None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def peak_bytes(states: tuple[str, ...]) -> int:
    model = llama()
    apply(model, states)
    meter = PeakMeter(CPU)
    meter.start(list(model.parameters()))
    model(**batch(256)).loss.backward()
    return meter.stop().step_bytes


def test_memory_falls_with_what_is_recomputed():
    full, mlp, elementwise, none = (peak_bytes((state,) * 4) for state in STATES)
    assert full < mlp < elementwise < none
    tokens, itemsize = 2 * 256, 4
    # per layer: the outputs of two norms (32 wide), and of the gated unit (96 wide)
    assert none - elementwise >= 3 * tokens * itemsize * (2 * 32 + 96)


def test_layers_that_keep_more_come_last_because_they_are_freed_first():
    assert peak_bytes(("full", "full", "none", "none")) < peak_bytes(("none", "none", "full", "full"))


def test_a_kept_graph_can_be_walked_again():
    model = llama()
    apply(model, ALL_FOUR)
    loss = model(**batch()).loss
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_evaluation_is_untouched_and_undo_restores_every_forward():
    model = llama()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    want = model.eval()(**batch()).loss
    undo = apply(model.train(), ALL_FOUR)
    model(**batch()).loss.backward()
    assert any("forward" in vars(m) for m in model.modules())
    assert torch.equal(model.eval()(**batch()).loss, want)
    undo()
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    for name, module in model.train().named_modules():
        assert vars(module).get("forward") is before[name].get("forward")


def test_value_of_the_recipe_names_a_state_for_each_layer():
    assert states_of("full:2,none:1", 3) == ["full", "full", "none"]
    assert written(["full", "mlp", "mlp"]) == "full:1,mlp:2"
    assert written(["none"] * 3) == "none" and written(["full"] * 3) == "full" and written(["mlp"] * 3) == "mlp:3"
    assert groups_of("full:7,none:9") == [("full", 7), ("none", 9)]
    with pytest.raises(RecipeError, match="full:2,none:1 is for 3 layers, but the model has 4"):
        states_of("full:2,none:1", 4)


@pytest.mark.parametrize("value", ["full:0", "half:3", "full:3,", "full:3 none:2", "full"])
def test_malformed_value_is_refused(value):
    with pytest.raises(RecipeError, match="it must be one of auto, none, full"):
        Settings.of({"train.checkpointing": f"{value},none:1"})


def test_technique_of_a_recipe_applies_it():
    model = llama()
    settings = Settings.of({"train.checkpointing": "full:2,none:2"})
    (technique,) = (t for t in TECHNIQUES.values() if t.name.startswith("checkpointing") and t.used_by(settings))
    technique.model(model, settings, RunInfo())
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, True, False, False]
    with pytest.raises(RecipeError, match="is for 3 layers, but the model has 4"):
        technique.model(llama(), Settings.of({"train.checkpointing": "full:2,none:1"}), RunInfo())


def test_layer_without_an_mlp_is_refused_for_the_state_mlp():
    model = llama()
    for layer in model.model.layers:
        layer.perceptron = layer.mlp
        del layer.mlp
    with pytest.raises(RecipeError, match=r"LlamaDecoderLayer has no module mlp, .*use full, elementwise or none"):
        apply(model, ("mlp",) * 4)


@pytest.mark.parametrize("state", ["mlp", "elementwise"])
def test_zero_3_is_refused_where_a_norm_runs_again_outside_of_its_module(state):
    (reason,) = matrix.refusals(Settings.of({"train.checkpointing": f"{state}:2,none:2", "sharding.zero": 3}))
    assert "ZeRO-3 gathers the weight of a norm" in reason and "use train.checkpointing: auto" in reason
    assert not matrix.refusals(Settings.of({"train.checkpointing": "full:2,none:2", "sharding.zero": 3}))
