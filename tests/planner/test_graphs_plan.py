"""Plans of runs with CUDA graphs of the layers: what the graphs hold, and the peaks that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner_helpers import BARE, request_of

from tigon.bench.training import planned
from tigon.bench.training.cases import Case
from tigon.models.loading.config import load_config
from tigon.planner.estimate import estimate
from tigon.planner.gpus import find_gpu
from tigon.planner.simulate.model_states import model_weights
from tigon.planner.simulate.playback import in_graphs
from tigon.planner.trace.cache.step_tapes import step_tapes

RECORD = Path(__file__).parents[2] / "benchmarks/results/nvidia-h100/training/llama-3.2-1b-h100.json"
# Workspaces of cuBLAS, 32 MiB each, that earlier turns of the benchmark had left: docs/training-benchmarks.md.
LEFT_WORKSPACES = {"full": 12, "none": 14}
# When it was measured, each layer that is not recomputed kept a copy of its input: 16 of 4 x 1024 x 2048 in 16 bits.
COPIED_INPUTS = {"full": 0, "none": 16 * 4 * 1024 * 2048 * 2}


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_peaks_with_graphs_are_those_measured_on_an_h100(checkpointing: str) -> None:
    (case,) = json.loads(RECORD.read_text(encoding="utf-8"))["cases"]
    measured = {row["variant"]: row["peak_bytes"] for row in case["measurements"]}
    known = Case(model=case["model"], batch=case["batch"], seq=case["seq"], precision=case["precision"], memory=None)
    request = planned._request(known, load_config(known.model), "tigon")
    settings = request.settings.having({"train.checkpointing": checkpointing, "train.cuda_graphs": True})
    plan = estimate(replace(request, settings=settings), gpu=find_gpu("h100"), evaluation=False)
    want = measured[f"tigon-graphs:{checkpointing}"] - (LEFT_WORKSPACES[checkpointing] << 25)
    want -= COPIED_INPUTS[checkpointing]
    assert plan.peak_allocated_bytes == pytest.approx(want, rel=0.01)
    assert sum(plan.components.values()) == plan.peak_allocated_bytes < plan.peak_reserved_bytes


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_graphs_hold_each_layers_gradients_and_without_recomputation_its_activations(checkpointing: str) -> None:
    request = request_of("llama", precision="bf16", checkpointing=checkpointing)
    (tape,) = step_tapes(request, BARE, evaluating=False).micro_batches
    rest, memory = in_graphs(tape, recomputes=checkpointing == "full")
    layers = [weight for weight in model_weights(request).weights if weight.layer is not None]
    assert memory.gradients == sum(weight.grad_bytes for weight in layers)
    assert (memory.activations > 0) == (checkpointing == "none")
    assert memory.pool > 0 and memory.buffers > 0
    live: set[int] = set()
    for event in (event for segment in rest.segments for event in segment.events):
        assert event >= 0 or ~event in live, "a block is freed that was not allocated"
        (live.add if event >= 0 else live.discard)(event if event >= 0 else ~event)
    assert {rest.components[block] for block in live} <= {"gradients"}


def test_micro_batches_add_to_the_gradients_that_the_graphs_hold() -> None:
    one = request_of("llama", precision="bf16", checkpointing="full", cuda_graphs=True)
    two = replace(one, settings=one.settings.having({"train.gradient_accumulation": 2}))
    gradients = [estimate(request, gpu=BARE).components["gradients"] for request in (one, two)]
    layers = sum(weight.grad_bytes for weight in model_weights(one).weights if weight.layer is not None)
    assert gradients[0] >= layers and gradients[1] - gradients[0] < layers


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_fused_products_leave_the_graphs_memory_without_the_linear_layers_gradients(checkpointing: str) -> None:
    plain = request_of("llama", precision="bf16", checkpointing=checkpointing, cuda_graphs=True, accumulate=2)
    fused = replace(plain, settings=plain.settings.having({"train.gradient_accumulation_fusion": True}))
    gpu = replace(BARE, host_s=0.0)  # products and copies, not the CPU's time, which is all of so small a step
    before, after = (estimate(request, gpu=gpu) for request in (plain, fused))
    assert after.components["gradients"] == before.components["gradients"]
    assert after.peak_allocated_bytes <= before.peak_allocated_bytes
    assert after.peak_reserved_bytes <= before.peak_reserved_bytes
    assert after.step_s < before.step_s
    first, later = (
        in_graphs(tape, recomputes=checkpointing == "full")[1].pool
        for tape in step_tapes(fused, BARE, evaluating=False).micro_batches
    )
    assert later < first, "without a graph, the first micro-batch makes the gradients of linear layers"
