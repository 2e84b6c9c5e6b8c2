"""`tigon.plan` describes the model that it is given, and `tigon.checkpoint` applies its choice and undoes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_helpers import config_of, small_gpu
from transformers import AutoModelForCausalLM

import tigon
from tigon.errors import UsageError
from tigon.ops import recomputation
from tigon.planner import model_plan
from tigon.planner.search.option import estimate_option
from tigon.techniques.checkpointing import host_offload

SHAPE = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 256}


def model_of(dtype: torch.dtype = torch.bfloat16, *, patched: bool = True) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of("llama", **SHAPE)).to(dtype).train()
    if patched:
        tigon.patch(made)
    return made


@pytest.fixture
def on_small_gpu(monkeypatch):
    """Sets the GPU that a plan is for; a small model needs less than the least size that `memory` takes."""

    def use(memory_mib: float) -> None:
        monkeypatch.setattr(model_plan, "find_gpu", lambda text: small_gpu(memory_mib))

    return use


def test_plan_fits_less_memory_by_recomputing_and_names_what_it_compared(on_small_gpu) -> None:
    model = model_of()
    on_small_gpu(400)
    roomy = tigon.plan(model, batch=32, seq=256, memory="1GiB")
    assert (roomy.checkpointing, roomy.batch, roomy.accumulate, roomy.fits) == ("none", 32, 1, True)
    on_small_gpu(0.9 * roomy.device_bytes / 2**20)
    tight = tigon.plan(model, batch=32, seq=256, memory="1GiB", accumulate=1)
    assert tight.fits and ":" in tight.checkpointing and tight.device_bytes < roomy.device_bytes
    assert tight.step_s > roomy.step_s
    text = str(tight)
    assert f"train.checkpointing {tight.checkpointing}" in text and "layers 0 to" in text and "too large" in text
    assert any(one.request.settings.train.checkpointing == tight.checkpointing for one in tight.compared)


def test_plan_is_the_estimate_of_the_same_run(on_small_gpu) -> None:
    on_small_gpu(400)
    made = tigon.plan(model_of(), batch=8, seq=256, memory="1GiB", optimizer="sgd")
    (option,) = made.compared
    settings = option.request.settings
    assert (settings.train.precision, settings.train.optimizer, settings.model.kernels) == ("bf16", "sgd", "tigon")
    again = estimate_option(replace(option.request, model="another name"), small_gpu(400 * 0.98))
    assert again.estimate.peak_allocated_bytes == made.peak_allocated_bytes


def test_plan_reads_dtype_optimizer_and_kernels_from_the_objects() -> None:
    model = model_of(torch.float32, patched=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    (option,) = tigon.plan(model, batch=2, seq=64, memory="4GiB", optimizer=optimizer).compared
    settings = option.request.settings
    assert (settings.train.precision, settings.train.optimizer, settings.model.kernels) == ("amp-bf16", "adamw", "none")
    (option,) = tigon.plan(
        model, batch=2, seq=64, memory=4 << 30, optimizer=torch.optim.AdamW(model.parameters()), precision="fp32"
    ).compared
    assert (option.request.settings.train.precision, option.request.settings.train.optimizer) == (
        "fp32",
        "adamw-foreach",
    )


def test_plan_counts_only_the_adapters_of_peft_as_trained() -> None:
    peft = pytest.importorskip("peft")
    whole = tigon.plan(model_of(), batch=2, seq=64, memory="4GiB")
    adapted = peft.get_peft_model(model_of(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    made = tigon.plan(adapted, batch=2, seq=64, memory="4GiB")
    (option,) = made.compared
    assert option.request.settings.lora.rank == 4 and set(option.request.settings.lora.targets) == {"q_proj", "v_proj"}
    assert made.peak_allocated_bytes < whole.peak_allocated_bytes


def test_plan_describes_adapters_that_were_added_after_the_patch_and_says_how_to_fuse_them() -> None:
    """PEFT then computes them, and keeps a 16-bit input of each: 1.5 GiB of Llama-3.2-1B with 6,144 tokens."""
    peft = pytest.importorskip("peft")

    def with_adapters(model: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"]))

    def plan_of(model: Any) -> model_plan.CheckpointPlan:
        return tigon.plan(model, batch=4, seq=256, memory="4GiB", accumulate=1)

    model = with_adapters(model_of(torch.float32))
    before = plan_of(model)
    assert not before.compared[0].request.adapters_fused
    assert "PEFT computes 6 layers with adapters" in str(before) and "tigon.patch(model) again" in str(before)

    tigon.patch(model)
    fused = plan_of(model)
    assert "PEFT computes" not in str(fused) and fused.peak_allocated_bytes < before.peak_allocated_bytes
    in_order = with_adapters(model_of(torch.float32, patched=False))
    tigon.patch(in_order)
    assert plan_of(in_order).peak_allocated_bytes == fused.peak_allocated_bytes


def test_plan_does_not_ask_to_patch_adapters_that_cannot_be_fused() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    made = tigon.plan(peft.get_peft_model(model_of(torch.float32), lora), batch=2, seq=64, memory="4GiB")
    assert "PEFT computes" not in str(made)


def test_checkpoint_keeps_loss_and_gradients_and_undo_restores_the_model() -> None:
    model = model_of(torch.float32)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    before = {name: vars(module).copy() for name, module in model.named_modules()}

    def gradients() -> list[torch.Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    want = gradients()
    for value in ("full", "full:1,mlp:1,elementwise:1", "offload", "none"):
        with tigon.checkpoint(model, value) as applied:
            assert all(torch.equal(a, b) for a, b in zip(gradients(), want, strict=True))
        applied.undo()  # a second time does nothing
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        assert all(
            vars(m).get("forward") is before[name].get("forward") and model.config.use_cache
            for name, m in model.named_modules()
        )
    assert all(torch.equal(a, b) for a, b in zip(gradients(), want, strict=True))


def test_checkpoint_sends_the_input_of_each_layer_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.float32)
    sent: list[torch.Size] = []
    send = host_offload.HostOffload.send
    monkeypatch.setattr(host_offload.HostOffload, "send", lambda self, x: sent.append(x.shape) or send(self, x))
    ids = torch.zeros(2, 32, dtype=torch.long)
    with tigon.checkpoint(model, "offload"):
        model(input_ids=ids, labels=ids).loss.backward()
    inputs = [shape for shape in sent if shape == (2, 32, model.config.hidden_size)]
    assert len(inputs) == model.config.num_hidden_layers


def test_checkpoint_keeps_attentions_results_on_the_host_and_undo_restores_attention(monkeypatch) -> None:
    model = model_of(torch.float32)
    kept, once = [], recomputation.compute_once
    monkeypatch.setattr(recomputation, "compute_once", lambda compute: kept.append(1) or once(compute))
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    want = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(model.parameters()))
    with tigon.checkpoint(model, "offload-attention"):
        got = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(model.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    shares = model.config.num_attention_heads != model.config.num_key_value_heads
    assert bool(kept) != shares, "the CPU's kernel takes no shared key heads, so attention is then computed twice"
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with pytest.raises(UsageError, match=r"keeps the results of sdpa, and the model has 'eager'"):
        tigon.checkpoint(model, "offload-attention")
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_checkpoint_twice_is_refused() -> None:
    model = model_of()
    tigon.checkpoint(model, "full")
    with pytest.raises(UsageError, match=r"activation checkpointing on already; call undo\(\)"):
        tigon.checkpoint(model, "full")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("full:2", "full:2 is for 2 layers, but the model has 3"),
        ("every-2", "tigon.checkpoint applies none, full, offload, offload-attention, or layers"),
        ("half", "it must be one of auto, none, full"),
    ],
)
def test_wrong_plan_is_refused(value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tigon.checkpoint(model_of(), value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch": 0}, "batch is 0; it must be a whole number"),
        ({"seq": True}, "seq is True"),
        ({"accumulate": 3}, "batch is 8, which accumulate 3 does not divide"),
        ({"memory": "half"}, "gpu 'half' is not known"),
        ({"optimizer": "rmsprop"}, "optimizer is 'rmsprop'; choose one of adamw"),
        ({"precision": "int8"}, "precision is 'int8'; choose one of"),
        ({"seq": 4096}, "max_position_embeddings 512"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_wrong_argument_of_a_plan_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tigon.plan(model_of(), **{"batch": 8, "seq": 64, "memory": "4GiB", **wrong})


def test_model_that_is_not_of_transformers_is_refused() -> None:
    for call in (lambda m: tigon.plan(m, batch=1, seq=8, memory="4GiB"), lambda m: tigon.checkpoint(m, "full")):
        with pytest.raises(UsageError, match="Linear is not a transformers model"):
            call(torch.nn.Linear(2, 2))
