"""Memory per GPU and host: by hand, and beside the traced plans of one node."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.pages.published_clusters import llama
from tigon.models.loading.config import load_config
from tigon.planner.cluster.compute import Workload
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.memory import in_flight, memory_of, stage_numel
from tigon.planner.cluster.search import planned_division
from tigon.planner.cluster.shape import shape_of
from tigon.planner.cluster.topology import Cluster
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB, GPUS
from tigon.planner.request import Request
from tigon.techniques.records.choices import Choices

NODE = Cluster(gpu=GPUS["h100"], gpus_per_node=8)
SHAPE = llama("llama-3.1-70b")
WORK = Workload(shape=SHAPE, seq=4096, samples=16)


def components(division, work=WORK):
    return memory_of(work, division, NODE).components


def test_sharded_states_take_16_bytes_per_parameter_of_a_rank():
    division = Division(sharding="weights", data=8, micro_batch=2, checkpointing="none")
    rank = SHAPE.numel / 8
    found = components(division)
    assert found["optimizer"] == int(8 * rank)
    assert found["weights"] - 4 * rank == pytest.approx(2 * SHAPE.head_numel + 3 * 2 * SHAPE.layer_numel, rel=0.01)


def test_zero_stages_divide_states_then_gradients_then_weights():
    whole = 2 * SHAPE.numel
    stages = [
        components(Division(sharding=sharding, engine="DeepSpeed", data=8, accumulate=2))
        for sharding in ("optimizer", "gradients", "weights")
    ]
    assert [stage["gradients"] for stage in stages] == [whole, int(whole / 8), int(whole / 8)]
    assert [stage["weights"] >= whole for stage in stages] == [True, True, False]
    assert {stage["optimizer"] for stage in stages} == {int(12 * SHAPE.numel / 8)}


def test_fsdp2_keeps_whole_gradients_between_micro_batches():
    """Accelerate reduces after the last micro-batch (planner/engines/fsdp.py)."""
    assert components(Division(sharding="weights", data=8, accumulate=2))["gradients"] == 2 * SHAPE.numel
    each = Workload(shape=SHAPE, seq=4096, samples=16, reduces_each=True)
    assert components(Division(sharding="weights", data=8, accumulate=2), each)["gradients"] == int(SHAPE.numel / 2)


def test_tensor_and_sequence_parallelism_divide_activations():
    plain = components(Division(sharding="weights", data=8, micro_batch=2))["activations"]
    for sizes in ({"tensor": 2}, {"sequence": 2}):
        assert components(Division(sharding="weights", data=4, micro_batch=4, **sizes))["activations"] == plain


def test_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    assert in_flight(Division(pipeline=4, accumulate=16)) == 4
    assert in_flight(Division(pipeline=4, accumulate=2)) == 2
    assert in_flight(Division(pipeline=4, chunks=2, accumulate=16)) > 4
    assert in_flight(Division(accumulate=16)) == 1


def test_stage_has_its_layers_and_one_of_embeddings_and_head():
    division = Division(sharding="optimizer", tensor=2, pipeline=4)
    assert stage_numel(WORK, division) == (20 * SHAPE.layer_numel + SHAPE.head_numel) / 2


def test_host_holds_what_each_process_reads_or_offloads():
    plain = memory_of(WORK, Division(sharding="weights", data=8), NODE)
    assert plain.host_loading == 8 * 4 * SHAPE.numel and plain.host_training == 0
    offloaded = memory_of(WORK, Division(sharding="weights", data=8, offload=True), NODE)
    assert offloaded.host_training == pytest.approx(16 * SHAPE.numel)
    assert offloaded.components["optimizer"] == 0 and offloaded.device < plain.device


BESIDE_TRACES = {
    "DDP": ("llama-3.2-1b", {"precision": "bf16"}, {"sharding": "none"}),
    "DDP under autocast": ("llama-3.2-1b", {}, {"sharding": "none"}),
    "ZeRO-1": ("llama-3.2-1b", {"zero": 1}, {"sharding": "optimizer", "engine": "DeepSpeed"}),
    "ZeRO-2": ("llama-3.2-1b", {"zero": 2}, {"sharding": "gradients", "engine": "DeepSpeed"}),
    "FSDP2": ("llama-3.1-8b", {"fsdp": True}, {"sharding": "weights"}),
    "FSDP2 offload": ("llama-3.1-8b", {"fsdp": True, "offload": "cpu"}, {"sharding": "weights", "offload": True}),
    "ZeRO-3": ("llama-3.1-8b", {"zero": 3}, {"sharding": "weights", "engine": "DeepSpeed"}),
}


@pytest.mark.parametrize(("model", "choices", "division"), BESIDE_TRACES.values(), ids=BESIDE_TRACES)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_one_node_agrees_with_its_traced_plan(model, choices, division, checkpointing):
    """Within 20 %. The name of a checkpoint: a preset's random weights are whole on the GPU while they are drawn."""
    batch = 1 if checkpointing == "none" else 4
    request = Request(
        model=f"checkpoint/{model}", config=load_config(model), batch=batch, seq=4096, masked=False,
        choices=Choices(**({"gpus": 8, "checkpointing": checkpointing} | choices)),
    )  # fmt: skip
    traced = estimate(request, gpu=NODE.gpu, evaluation=False)
    work = Workload(shape=shape_of(request), seq=4096, samples=8 * batch, states=choices.get("precision", "amp-bf16"))
    found = planned_division(
        work, Division(data=8, checkpointing=checkpointing, micro_batch=batch, **division), NODE
    )  # fmt: skip
    assert found.memory.device == pytest.approx(traced.device_bytes, rel=0.20)
    assert found.time.seconds == pytest.approx(traced.step_s, rel=0.20)
    assert found.memory.host_training / 8 == pytest.approx(traced.host_bytes, rel=0.02, abs=GIB / 100)
