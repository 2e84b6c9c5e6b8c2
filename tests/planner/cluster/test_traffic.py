"""What the collectives of a division move, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pages.published_clusters import llama
from tigon.planner.cluster.compute import Workload, model_flops
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.search import planned_division
from tigon.planner.cluster.step import step_time
from tigon.planner.cluster.topology import Cluster
from tigon.planner.gpus import GPUS

SHAPE = llama("llama-3.1-8b")
CLUSTER = Cluster(gpu=GPUS["h100"], gpus_per_node=8, nodes=4, link_bytes_s=50e9)
WORK = Workload(shape=SHAPE, seq=4096, samples=32, states="bf16")
FP32_STATES = replace(WORK, states="amp-bf16")
BYTES = 2 * SHAPE.numel
"""The weights in 16 bits."""


def received(division, work=WORK, cluster=CLUSTER):
    """Bytes that a GPU receives in a step, by collective and what it moves."""
    return {(one.collective, one.what): one.received(cluster) for one in step_time(work, division, cluster).transfers}


def test_fsdp2_moves_three_times_the_weights():
    """Gathered for both passes, and the gradients once: 3 x bytes x (n - 1) / n."""
    found = received(Division(sharding="weights", data=32))
    assert sum(found.values()) == pytest.approx(3 * BYTES * 31 / 32)
    assert found["all-gather", "weights"] == pytest.approx(2 * BYTES * 31 / 32)


def test_gradients_are_reduced_in_the_format_of_each_engine():
    """With fp32 weights DDP and FSDP2 sum in fp32; DeepSpeed reduces 16 bits."""
    divisions = {
        "DDP": (Division(data=32), 4), "FSDP2": (Division(sharding="weights", data=32), 4),
        "ZeRO-2": (Division(sharding="gradients", engine="DeepSpeed", data=32), 2),
        "ZeRO-3": (Division(sharding="weights", engine="DeepSpeed", data=32), 3),
    }  # fmt: skip
    for name, (division, times) in divisions.items():
        assert sum(received(division, FP32_STATES).values()) == pytest.approx(times * BYTES * 31 / 32), name


@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients"])
def test_ddp_zero_1_and_zero_2_move_twice_the_gradients(sharding):
    engine = "PyTorch" if sharding == "none" else "DeepSpeed"
    found = received(Division(sharding=sharding, engine=engine, data=32))
    assert sum(found.values()) == pytest.approx(2 * BYTES * 31 / 32)


def test_micro_batches_gather_again_and_only_deepspeed_reduces_again():
    work = replace(WORK, samples=128)
    for engine, reductions in (("PyTorch", 1), ("DeepSpeed", 4)):
        division = Division(sharding="weights", engine=engine, data=32, accumulate=4)
        found = received(division, work)
        assert found["all-gather", "weights"] == pytest.approx(2 * 4 * BYTES * 31 / 32)
        assert found["reduce-scatter", "gradients"] == pytest.approx(reductions * BYTES * 31 / 32)


def test_hybrid_sharding_sends_only_the_gradients_of_a_shard_between_nodes():
    division = Division(sharding="weights", data=32, within_node=True)
    found = received(division)
    assert found["all-gather", "weights"] == pytest.approx(2 * BYTES * 7 / 8)
    assert found["all-reduce", "gradients between nodes"] == pytest.approx(2 * BYTES / 8 * 3 / 4)
    crossing = sum(one.over_link(CLUSTER) for one in step_time(WORK, division, CLUSTER).transfers)
    plain = step_time(WORK, Division(sharding="weights", data=32), CLUSTER).transfers
    assert crossing == pytest.approx(2 * BYTES / 8 * 3 / 4)
    assert sum(one.over_link(CLUSTER) for one in plain) == pytest.approx(3 * BYTES / 8 * 3 / 4)


def test_tensor_parallelism_moves_each_layers_activations_eight_times():
    """Two gathers and two reduce-scatters per layer in each pass, of all tokens; full checkpointing adds a pass."""
    one = WORK.seq * SHAPE.hidden * 2 * SHAPE.layers
    for checkpointing, times in (("none", 8), ("full", 12)):
        found = received(Division(sharding="weights", data=4, tensor=8, checkpointing=checkpointing, accumulate=8))
        moved = sum(size for (_, what), size in found.items() if what == "activations (TP)")
        assert moved == pytest.approx(times * one * 7 / 8 * 8)


def test_ulysses_exchanges_queries_keys_values_and_outputs_in_each_pass():
    found = received(Division(sharding="weights", data=8, sequence=4, micro_batch=4))
    width = 2 * SHAPE.attention_width + 2 * SHAPE.kv_width
    assert found["all-to-all", "activations (SP)"] == pytest.approx(2 * WORK.seq * width * 2 * SHAPE.layers * 3 / 4)


def test_pipeline_sends_a_stages_input_forward_and_its_gradient_back():
    found = received(Division(sharding="optimizer", data=8, pipeline=4, accumulate=4))
    assert found["send", "activations (PP)"] == 2 * 4 * WORK.seq * SHAPE.hidden * 2


def test_bubble_is_the_share_of_stages_in_micro_batches():
    division = Division(sharding="optimizer", data=8, pipeline=4, accumulate=4)
    parts = step_time(WORK, division, CLUSTER).parts
    busy = parts["compute"] + parts["host"] + parts["activations"]
    assert parts["bubble"] == pytest.approx(busy * 3 / 4)
    chunked = step_time(WORK, replace(division, chunks=2), CLUSTER).parts
    assert chunked["bubble"] < parts["bubble"]


def test_collectives_cost_time_only_where_they_take_longer_than_the_layers():
    fast = step_time(WORK, Division(sharding="weights", data=32), CLUSTER)
    total = sum(one.seconds(CLUSTER) for one in fast.transfers)
    assert 0 < fast.parts["weights and gradients"] < total / 4
    slow_cluster = replace(CLUSTER, link_bytes_s=1e9)
    slow = step_time(WORK, Division(sharding="weights", data=32), slow_cluster)
    slow_total = sum(one.seconds(slow_cluster) for one in slow.transfers)
    assert slow_total > 10 * total and slow.seconds > 0.95 * slow_total
    assert slow.parts["compute"] == fast.parts["compute"]


def test_division_of_the_work_divides_the_computation():
    whole = step_time(WORK, Division(sharding="weights", data=32), CLUSTER).parts["compute"]
    for sizes in ({"tensor": 4, "micro_batch": 4}, {"sequence": 4, "micro_batch": 4}):
        divided = step_time(WORK, Division(sharding="weights", data=8, **sizes), CLUSTER).parts["compute"]
        assert divided == pytest.approx(whole)


def test_model_flops_are_six_per_parameter_and_half_of_attention():
    layers = 6 * SHAPE.layers * SHAPE.layer_matrix_numel + 6 * SHAPE.head_numel
    attention = SHAPE.layers * 12 * SHAPE.attention_width * WORK.seq / 2
    assert model_flops(WORK) == WORK.tokens * (layers + attention)
    assert planned_division(WORK, Division(sharding="weights", data=32), CLUSTER).mfu < 1
