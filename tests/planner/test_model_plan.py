"""`tigon.plan` describes the model that it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_helpers import config_of, small_gpu
from transformers import AutoModelForCausalLM

import tigon
from tigon.errors import UsageError
from tigon.planner import model_plan
from tigon.planner.gpus import find_gpu
from tigon.planner.search import checkpointing
from tigon.planner.search.option import estimate_option

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
    roomy = tigon.plan(model, batch=32, seq=256, memory="1GiB", cuda_graphs=False)
    assert (roomy.checkpointing, roomy.batch, roomy.accumulate, roomy.fits) == ("none", 32, 1, True)
    on_small_gpu(0.9 * roomy.device_bytes / 2**20)
    tight = tigon.plan(model, batch=32, seq=256, memory="1GiB", accumulate=1, cuda_graphs=False)
    assert tight.fits and ":" in tight.checkpointing and tight.device_bytes < roomy.device_bytes
    assert tight.step_s > roomy.step_s
    text = str(tight)
    assert f"train.checkpointing {tight.checkpointing}" in text and "layers 0 to" in text and "too large" in text
    assert any(one.request.settings.train.checkpointing == tight.checkpointing for one in tight.compared)


def test_plan_of_long_samples_keeps_attention_on_the_host_and_says_so(on_small_gpu, monkeypatch) -> None:
    shape = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 65536}
    model = AutoModelForCausalLM.from_config(config_of("llama", **shape)).to(torch.bfloat16)
    tigon.patch(model)
    on_small_gpu(8000)
    roomy = tigon.plan(model, batch=1, seq=65536, memory="8GiB", optimizer="sgd")
    assert (roomy.checkpointing, roomy.host_bytes) == ("none", 0)
    on_small_gpu(0.4 * roomy.device_bytes / 2**20)
    tight = tigon.plan(model, batch=1, seq=65536, memory="8GiB", optimizer="sgd")
    assert tight.checkpointing == "offload-attention" and tight.fits and tight.host_bytes > 2**20, str(tight)
    text = str(tight)
    assert "layers 0 to 5: recompute all but attention; its results" in text and "GiB in host memory" in text


def test_plan_with_graphs_recomputes_all_layers_or_none_and_a_model_on_a_cpu_runs_without(on_small_gpu) -> None:
    model = model_of()
    on_small_gpu(400)
    roomy = tigon.plan(model, batch=32, seq=256, memory="1GiB", accumulate=1, cuda_graphs=True)
    assert (roomy.checkpointing, roomy.cuda_graphs) == ("none", True) and "launched as CUDA graphs" in str(roomy)
    on_small_gpu(0.8 * roomy.device_bytes / 2**20)
    tight = tigon.plan(model, batch=32, seq=256, memory="1GiB", accumulate=1, cuda_graphs=True)
    assert (tight.checkpointing, tight.cuda_graphs) == ("full", True)
    with pytest.warns(UserWarning, match="plan has CUDA graphs, and the model is on cpu: its layers run without"):
        applied = tigon.checkpoint(model, tight)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    applied.undo()


def test_plan_chooses_graphs_where_the_cpu_would_be_slower_than_the_gpu(monkeypatch) -> None:
    model = model_of()

    def chosen(host_s: float, **how: Any) -> model_plan.CheckpointPlan:
        row = replace(find_gpu("h100"), host_s=host_s)
        monkeypatch.setattr(checkpointing, "SLOW_HOST_S", 0.0)
        monkeypatch.setattr(model_plan, "find_gpu", lambda name: replace(row, memory_bytes=2**30))
        return tigon.plan(model, batch=8, seq=256, memory="1GiB", **how)

    slow, fast, never = chosen(1e-4), chosen(0.0), chosen(1e-4, cuda_graphs=False)
    assert (slow.cuda_graphs, fast.cuda_graphs, never.cuda_graphs) == (True, False, False)
    assert slow.step_s < never.step_s / 2 and slow.device_bytes > 0
    assert "layers: launched as CUDA graphs, in micro-batches of this shape" in str(slow)


def test_plan_chooses_graphs_where_only_a_slower_host_would_wait(monkeypatch) -> None:
    """Tiny layers wait for every host, but for one that takes no time. Long rows wait for none."""
    row = replace(find_gpu("h200"), host_s=0.0, memory_bytes=2**34)
    monkeypatch.setattr(model_plan, "find_gpu", lambda name: row)
    assert tigon.plan(model_of(), batch=8, seq=256, memory="1GiB").cuda_graphs
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 256, "max_position_embeddings": 8192}
    with torch.device("meta"):
        wide = AutoModelForCausalLM.from_config(config_of("llama", **shape), dtype=torch.bfloat16)
    assert not tigon.plan(wide, batch=2, seq=8192, memory="16GiB", accumulate=1).cuda_graphs


def test_plan_counts_the_weight_of_a_head_that_the_config_ties_and_the_model_does_not(on_small_gpu) -> None:
    on_small_gpu(400)
    tied, untied = (
        AutoModelForCausalLM.from_config(config_of("llama", **SHAPE, tie_word_embeddings=True)).to(torch.bfloat16)
        for _ in range(2)
    )
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    own, shared = (tigon.plan(model, batch=1, seq=8, memory="1GiB", optimizer="adamw") for model in (untied, tied))
    weight_bytes = 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    # The weight and two states. The peak comes before the second gradient exists.
    assert own.peak_allocated_bytes - shared.peak_allocated_bytes == pytest.approx(3 * weight_bytes, rel=0.05)
    assert "the head has a weight of its own" in str(own) and not shared.notes
    assert untied.config.tie_word_embeddings


def test_plan_puts_adapters_into_graphs_unless_they_drop_values() -> None:
    peft = pytest.importorskip("peft")

    def planned(**options: Any) -> model_plan.CheckpointPlan:
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
        adapted = peft.get_peft_model(model_of(), lora)
        return tigon.plan(adapted, batch=2, seq=64, memory="4GiB", cuda_graphs=True)

    assert planned().cuda_graphs
    with pytest.raises(UsageError, match="CUDA graphs have not been tried with it"):
        planned(lora_dropout=0.1)


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
        return tigon.plan(model, batch=4, seq=256, memory="4GiB", accumulate=1, cuda_graphs=False)

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
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM")
    made = tigon.plan(peft.get_peft_model(model_of(torch.float32), lora), batch=2, seq=64, memory="4GiB")
    assert "PEFT computes" not in str(made)


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
    with pytest.raises(UsageError, match="Linear is not a transformers model"):
        tigon.plan(torch.nn.Linear(2, 2), batch=1, seq=8, memory="4GiB")
