"""Unrolling: what a deep model does, from the recording of a shallow one."""

from __future__ import annotations

from typing import Any

import pytest
from planner_helpers import H200, request_of

from tigon.models import MODELS
from tigon.models.verification.tiny import SIZES, tiny_config
from tigon.planner.request import Request
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.playback import GradientRules, offloaded, replay
from tigon.planner.trace.layer_pattern import Pattern, layer_pattern
from tigon.planner.trace.tape import BACKWARD, FORWARD, NotPeriodic, Tape, TapeSegment, Where, unrollable, unrolled
from tigon.planner.trace.trace import trace
from tigon.techniques.checkpointing.layer_checkpointing import groups_of
from tigon.techniques.keys.settings import Settings


def _played(tape: Tape) -> tuple[dict[str, int], dict[str, dict[str, int]], int]:
    ledger = Ledger()
    replay(ledger, tape, GradientRules(keep=True))
    return ledger.phases, ledger.peaks, ledger.allocator.peak_reserved_bytes


@pytest.mark.parametrize(
    ("kernels", "checkpointing", "precision"),
    [
        ("none", "none", "amp-bf16"), ("none", "every-2", "bf16"), ("tigon", "full", "amp-bf16"),
        ("tigon", "selective", "bf16"), ("liger", "full", "bf16"), ("no-flce", "none", "fp32"),
        ("tigon", "none", "fp8"), ("none", "full", "fp8"), ("tigon", "elementwise:7", "amp-bf16"),
        ("tigon", "mlp:1,none:6", "bf16"), ("tigon", "offload-attention", "bf16"),
        ("none", "offload-attention", "amp-bf16"),
    ],
)  # fmt: skip
def test_trace_of_few_layers_stands_for_all(kernels: str, checkpointing: str, precision: str) -> None:
    request = request_of(
        precision=precision, kernels=kernels, checkpointing=checkpointing, shape={"num_hidden_layers": 7}
    )
    few, all_layers = trace(request, H200), trace(request, H200, whole=True)
    assert _played(few.tape) == _played(all_layers.tape)
    for flops in ("flops", "fp8_flops"):
        assert sum(getattr(s.cost, flops) for s in few.tape.segments) == sum(
            getattr(s.cost, flops) for s in all_layers.tape.segments
        )


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("llama", "full:4,mlp:4,elementwise:3,none:5"), ("gemma3_text", "mlp:14,none:4")],
    ids=["llama", "gemma3_text"],
)
def test_groups_of_layers_are_unrolled_each_by_itself(name: str, checkpointing: str) -> None:
    layers = sum(count for _, count in groups_of(checkpointing))
    request = request_of(
        name, precision="bf16", kernels="tigon", checkpointing=checkpointing, shape={"num_hidden_layers": layers}
    )
    few, all_layers = trace(request, H200), trace(request, H200, whole=True)
    assert _played(few.tape) == _played(all_layers.tape)
    assert sum(s.cost.flops for s in few.tape.segments) == sum(s.cost.flops for s in all_layers.tape.segments)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_layers_of_several_kinds_are_unrolled_in_their_order(name: str) -> None:
    request = request_of(name, precision="amp-bf16", kernels="tigon", checkpointing="full")
    assert _played(trace(request, H200).tape) == _played(trace(request, H200, whole=True).tape)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "start", "period"),
    [
        ({"model_type": "qwen3_moe", "num_hidden_layers": 9, "mlp_only_layers": [0, 1], **_EXPERTS}, 2, 1),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 9, "decoder_sparse_step": 2, **_EXPERTS}, 0, 2),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 9, "first_k_dense_replace": 3, **_LATENT}, 3, 1),
        ({"model_type": "gemma2", "num_hidden_layers": 8, "head_dim": 16, "sliding_window": 32}, 0, 2),
    ],
    ids=["dense first layers", "every second layer has experts", "latent attention", "sliding windows"],
)  # fmt: skip
def test_layers_with_other_modules_are_traced_once_of_each_kind(shape: dict[str, Any], start: int, period: int) -> None:
    request = request_of(precision="bf16", kernels="none", attention="eager", shape=shape)
    layers = shape["num_hidden_layers"]
    assert (pattern := layer_pattern(request.model, request.config)) == Pattern(start, period)
    assert pattern.depth(layers) < layers
    few, all_layers = trace(request, H200), trace(request, H200, whole=True)
    for one, other in ((few.tape, all_layers.tape), (few.eval_tape, all_layers.eval_tape)):
        assert [(s.where, s.events, vars(s.cost)) for s in one.segments] == [
            (s.where, s.events, vars(s.cost)) for s in other.segments
        ]
        assert (one.sizes, one.components) == (other.sizes, other.components)


def test_layers_are_those_of_the_language_model_beside_a_deeper_vision_tower() -> None:
    config = tiny_config("llava", MODELS["llava"].tiny, SIZES)
    config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers = 5, 9
    request = Request(
        model="llava",
        config=config,
        batch=1,
        seq=32,
        settings=Settings.of({"train.precision": "bf16", "model.kernels": "none"}),
    )
    tape = trace(request, H200, evaluating=False).tape
    assert {one.where.layer for one in tape.segments if one.where.phase == FORWARD} == {None, *range(5)}


def test_layers_without_a_pattern_are_all_traced() -> None:
    shape = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [0, 3, 4], **_EXPERTS}
    request = request_of(shape=shape)
    assert layer_pattern(request.model, request.config).depth(6) == 6


def test_traced_depth_keeps_the_pattern_and_one_layer_on_either_side() -> None:
    for layers in range(4, 40):
        for period in range(1, 7):
            depth = unrollable(layers, period)
            assert depth % period == layers % period
            assert depth >= period + 2


def test_layers_that_differ_are_not_unrolled() -> None:
    def layer(number: int, size: int, base: int) -> list[TapeSegment]:
        return [TapeSegment(Where(FORWARD, number), [base, ~(base - 1)] if base else [base])]

    tape = Tape(
        segments=[*layer(0, 1, 0), *layer(1, 1, 1), *layer(2, 1, 2), TapeSegment(Where(BACKWARD, 0), [~2])],
        sizes=[512, 1024, 512],
        components=["activations"] * 3,
    )
    with pytest.raises(NotPeriodic):
        unrolled(tape, period=1, traced=3, layers=6)


@pytest.mark.parametrize("first_stays", [False, True])
def test_offloaded_inputs_leave_the_device_and_come_back(first_stays: bool) -> None:
    request = request_of(precision="bf16", kernels="tigon", checkpointing="full", shape={"num_hidden_layers": 12})
    tape = trace(request, H200).tape
    here, _, _ = _played(tape)
    away, peaks, _ = _played(offloaded(tape, leaving=2, first_stays=first_stays))
    one = 2 * 64 * 64 * 2  # batch x seq x hidden x bf16
    there = 2 + first_stays
    assert away["loss"] <= here["loss"] - (12 - there) * one
    assert peaks["loss"]["checkpoints"] == there * one
    # everything that left came back, and was freed
    ledger = Ledger()
    ledger.free_all(replay(ledger, offloaded(tape, leaving=2, first_stays=first_stays), GradientRules(keep=True)))
    assert ledger.live_bytes == 0
