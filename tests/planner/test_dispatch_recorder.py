"""The recording against bytes counted by hand, and against a real step."""

from __future__ import annotations

import pytest
import torch
from planner_helpers import H200, config_of, request_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import tigon
from tigon.ops.gradient_sums import add_rows_
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.playback import GradientRules, replay, replay_evaluation
from tigon.planner.trace import trace as tracing
from tigon.planner.trace.dispatch_recorder import TraceRecorder
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import trace, weight_dtype
from tigon.profiler.recording.peak import PeakMeter, training_state
from tigon.techniques.checkpointing.layer_checkpointing import apply, is_by_layer, states_of
from tigon.techniques.keys.settings import Settings


def _live_peak(tape: Tape) -> int:
    ledger = Ledger()
    replay(ledger, tape, GradientRules(keep=True))
    return max(ledger.phases.values())


def test_storages_are_followed_from_allocation_to_release() -> None:
    recorder = TraceRecorder({}, {})
    with FakeTensorMode(), recorder:
        a = torch.empty(256, dtype=torch.float32)  # 1024 bytes
        b = a * 2  # 1024 more
        view = b.view(16, 16).t()
        del a, b
        c = torch.cat([view, view])  # 2048; b's storage lives on in the view
        del view
        del c
    assert recorder.tape.sizes == [1024, 1024, 2048]
    assert recorder.tape.segments[0].events == [0, 1, ~0, 2, ~1, ~2]


def test_allocation_is_rounded_to_512_bytes() -> None:
    recorder = TraceRecorder({}, {})
    with FakeTensorMode(), recorder:
        kept = [torch.empty(n, dtype=torch.uint8) for n in (1, 512, 513)]
    assert recorder.tape.sizes == [512, 512, 1024]
    assert len(kept) == 3


def test_flops_bytes_and_launches_are_counted() -> None:
    recorder = TraceRecorder({}, {})
    with FakeTensorMode(), recorder:
        x, w = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, 32, dtype=torch.bfloat16)
        (x @ w).add_(1)
    cost = recorder.tape.segments[0].cost
    assert cost.flops == 2 * 8 * 16 * 32
    assert cost.moved_bytes == 2 * (8 * 32 * 2)
    assert cost.launches == 2


def test_rows_of_an_embedding_are_counted_and_not_its_table() -> None:
    recorder = TraceRecorder({}, {})
    with FakeTensorMode(), recorder:
        grad, dy = torch.empty(1000, 16, dtype=torch.bfloat16), torch.empty(6, 16, dtype=torch.bfloat16)
        ids = torch.empty(6, dtype=torch.int64)
        add_rows_(grad, dy, ids, -1)
    rows = 6 * 16 * 2
    keys = 6 * (8 + 4) + 6 * (4 + 4 + 8)  # cast to 32 bits, and sorted with their places
    assert recorder.tape.segments[0].cost.moved_bytes == 3 * rows + keys


def test_flash_attention_saves_what_cuda_saves() -> None:
    """q, k, v as the projections made them, out, the fp32 log-sum-exp and, of the layer, what eager code keeps."""
    from tigon.planner.trace.attention import attention

    recorder = TraceRecorder({}, {})
    B, h, k, T, D = 2, 4, 2, 128, 32
    with FakeTensorMode(), recorder:
        query = torch.empty(B, h, T, D, dtype=torch.bfloat16, requires_grad=True)
        keys = [torch.empty(B, k, T, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
        recorder.tape.segments[-1].events.clear()
        before = len(recorder.tape.sizes)
        out, _ = attention(recorder, H200.arch)(None, query, *keys, None)
        assert recorder.tape.sizes[before:] == [B * h * T * D * 2, B * h * T * 4]
        saved = len(recorder.tape.sizes)
        out.sum().backward()
    made = recorder.tape.sizes[saved:]
    assert B * T * h * D * 4 in made  # the fp32 accumulator of dQ
    assert made.count(B * T * h * D * 2) >= 3  # dQ, and one dK and dV for each query head
    assert made.count(B * T * k * D * 2) >= 2


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        ("fp32", "none"), ("fp32", "full"), ("amp-bf16", "none"), ("bf16", "full"), ("fp32", "full:2,mlp:1,none:2"),
        ("amp-bf16", "mlp:5"),
    ],
)  # fmt: skip
def test_traced_step_has_the_peak_of_a_real_one(precision: str, checkpointing: str) -> None:
    """Eager attention on the CPU runs the operators that are traced, so the peaks must agree."""
    batch, seq = 4, 128
    shape = {"hidden_size": 128, "intermediate_size": 352}
    request = request_of(
        batch=batch, seq=seq, kernels="none", attention="eager", checkpointing=checkpointing, precision=precision,
        shape=shape,
    )  # fmt: skip
    config = config_of("llama", **shape)
    config.use_cache = False
    dtype = weight_dtype(Settings.of({"train.precision": precision}), trained=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if is_by_layer(checkpointing):
        apply(model, states_of(checkpointing, 5))
    ids = torch.randint(0, 1024, (batch, seq))
    meter = PeakMeter(torch.device("cpu"))
    meter.start(training_state(model, torch.optim.SGD(model.parameters())))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp-bf16"):
        outputs = model(input_ids=ids, labels=ids.clone(), num_items_in_batch=torch.tensor(500))
    outputs.logits = outputs.logits.float()
    loss = outputs.loss
    del outputs
    loss.backward()
    measured = meter.stop().step_bytes
    predicted = _live_peak(trace(request, H200).tape)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("adapters_fused", [True, False], ids=["patched after PEFT", "patched before PEFT"])
def test_traced_step_with_adapters_has_the_peak_of_a_real_one(adapters_fused: bool) -> None:
    """fp32 weights under autocast. PEFT computes adapters that it adds to a patched model, and keeps an input of its
    own for each. The peak is at the logits, so that temporaries of the CPU's ops in the layers do not count."""
    peft = pytest.importorskip("peft")
    batch, seq, targets = 4, 128, ("q_proj", "v_proj", "up_proj", "down_proj")
    shape = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 4096}
    request = request_of(
        batch=batch, seq=seq, kernels="no-flce", attention="eager", shape=shape, lora_rank=8, lora_targets=targets,
        lora_base="fp32", adapters_fused=adapters_fused,
    )  # fmt: skip
    config = config_of("llama", **shape)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if not adapters_fused:
        tigon.patch(model, linear_cross_entropy=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(targets)))
    model.enable_input_require_grads()
    if adapters_fused:
        tigon.patch(adapted, linear_cross_entropy=False)
    ids = torch.randint(0, 4096, (batch, seq))
    meter = PeakMeter(torch.device("cpu"))
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    meter.start(training_state(adapted, torch.optim.SGD(trained)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = adapted(input_ids=ids, labels=ids.clone(), num_items_in_batch=torch.tensor(500)).loss
    loss.backward()
    measured = meter.stop().step_bytes
    predicted = _live_peak(trace(request, H200).tape)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_traced_evaluation_has_the_peak_of_a_real_one(precision: str) -> None:
    """Five layers, of which three are traced: autocast keeps 16-bit copies of the weights of all of them."""
    batch, seq, shape = 4, 128, {"hidden_size": 128, "intermediate_size": 352}
    request = request_of(batch=batch, seq=seq, kernels="none", attention="eager", precision=precision, shape=shape)
    config = config_of("llama", **shape)
    config.use_cache = False
    dtype = weight_dtype(Settings.of({"train.precision": precision}), trained=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    ids = torch.randint(0, 1024, (batch, seq))
    meter = PeakMeter(torch.device("cpu"))
    meter.start(model.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp-bf16"):
        outputs = model(input_ids=ids, labels=ids.clone(), num_items_in_batch=torch.tensor(1))
    outputs.logits = outputs.logits.float()
    measured = meter.stop().step_bytes
    ledger = Ledger()
    replay_evaluation(ledger, trace(request, H200).eval_tape)
    assert ledger.phases["eval"] == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("settings", [{}, {"checkpointing": "full"}, {"lora_rank": 2}], ids=["plain", "full", "lora"])
def test_three_tiles_of_an_mlp_count_for_all(settings, monkeypatch) -> None:
    """128 tokens in 19 tiles, the last of which is smaller: the same memory and work, from a shorter tape."""
    request = request_of(batch=2, seq=64, mlp_tile_tokens=7, precision="bf16", kernels="tigon", **settings)
    few = trace(request, H200)
    monkeypatch.setattr(tracing, "MAX_TILES", 1000)
    every = trace(request, H200)
    assert _live_peak(few.tape) == _live_peak(every.tape)
    assert sum(len(segment.events) for segment in few.tape.segments) < 0.6 * sum(
        len(segment.events) for segment in every.tape.segments
    )
    for one, other in zip(few.tape.segments, every.tape.segments, strict=True):
        assert one.where == other.where and vars(one.cost) == pytest.approx(vars(other.cost))
