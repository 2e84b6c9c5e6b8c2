"""Unrolling: what a deep model does, from the recording of a shallow one."""

from __future__ import annotations

import pytest
from planner_helpers import H200, request_of

from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.playback import GradientRules, offloaded, replay
from tigon.planner.trace.tape import BACKWARD, FORWARD, NotPeriodic, Tape, TapeSegment, Where, unrollable, unrolled
from tigon.planner.trace.trace import trace
from tigon.techniques.layer_checkpointing import groups_of


def _played(tape: Tape) -> tuple[dict[str, int], dict[str, dict[str, int]], int]:
    ledger = Ledger()
    replay(ledger, tape, GradientRules(keep=True))
    return ledger.phases, ledger.peaks, ledger.allocator.peak_reserved_bytes


@pytest.mark.parametrize(
    ("kernels", "checkpointing", "precision"),
    [
        ("none", "none", "amp-bf16"), ("none", "every-2", "bf16"), ("tigon", "full", "amp-bf16"),
        ("tigon", "selective", "bf16"), ("liger", "full", "bf16"), ("no-flce", "none", "fp32"),
        ("tigon", "elementwise:7", "amp-bf16"), ("tigon", "mlp:1,none:6", "bf16"),
    ],
)  # fmt: skip
def test_trace_of_few_layers_stands_for_all(kernels: str, checkpointing: str, precision: str) -> None:
    request = request_of(
        precision=precision, kernels=kernels, checkpointing=checkpointing, shape={"num_hidden_layers": 7}
    )
    few, all_layers = trace(request, H200), trace(request, H200, whole=True)
    assert _played(few.tape) == _played(all_layers.tape)
    assert sum(s.cost.flops for s in few.tape.segments) == sum(s.cost.flops for s in all_layers.tape.segments)


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


def test_offloaded_inputs_leave_the_device_and_come_back() -> None:
    request = request_of(precision="bf16", kernels="tigon", checkpointing="full", shape={"num_hidden_layers": 12})
    tape = trace(request, H200).tape
    here, _, _ = _played(tape)
    away, peaks, _ = _played(offloaded(tape, leaving=2))
    one = 2 * 64 * 64 * 2  # batch x seq x hidden x bf16
    assert away["loss"] <= here["loss"] - (12 - 2) * one
    assert peaks["loss"]["checkpoints"] == 2 * one
    # everything that left came back, and was freed
    ledger = Ledger()
    ledger.free_all(replay(ledger, offloaded(tape, leaving=2), GradientRules(keep=True)))
    assert ledger.live_bytes == 0
