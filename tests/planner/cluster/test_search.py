"""Which divisions are tried, and their order."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.pages.published_clusters import llama
from tigon.errors import UsageError
from tigon.models.loading.config import load_config
from tigon.planner.cluster.compute import Workload
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.search import configurations, plan_cluster
from tigon.planner.cluster.shape import shape_of
from tigon.planner.cluster.topology import Cluster
from tigon.planner.gpus import GIB, GPUS
from tigon.planner.request import Request
from tigon.techniques.records.choices import Choices


def cluster(nodes):
    return Cluster(gpu=GPUS["h100"], gpus_per_node=8, nodes=nodes, link_bytes_s=50e9)


def request(model):
    return Request(
        model=model, config=load_config(model), batch=1, seq=64, choices=Choices(precision="bf16"), masked=False
    )


@pytest.mark.parametrize(("model", "nodes"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 4), ("llama-3.1-405b", 64)])
def test_every_configuration_uses_all_gpus_and_all_samples(model, nodes):
    work = Workload(shape=llama(model), seq=4096, samples=16 * nodes)
    found = list(configurations(work, cluster(nodes)))
    assert all(one.gpus == 8 * nodes for one in found)
    assert all(one.data * one.micro_batch * one.accumulate == work.samples for one in found)
    families = {one.family for one in found}
    assert {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "FSDP2 + TP 8", "FSDP2 + SP 8", "ZeRO-1 + PP 4"} <= families
    assert ("FSDP2 within nodes" in families) == (nodes > 1)


def test_those_that_fit_come_first_and_the_fastest_of_them_first():
    plan = plan_cluster(Workload(shape=llama("llama-3.1-70b"), seq=8192, samples=32), cluster(4))
    fits = [one.fits for one in plan.divisions]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    times = [round(one.time.seconds, 3) for one in plan.divisions if one.fits]
    assert times == sorted(times)
    limit = 0.98 * GPUS["h100"].memory_bytes
    assert all((one.memory.device <= limit) == one.fits for one in plan.divisions)
    for one in plan.divisions:
        assert sum(one.memory.components.values()) == one.memory.device
        assert sum(one.time.parts.values()) == one.time.seconds > 0


def test_host_memory_limits_loading_and_offload():
    work = Workload(shape=llama("llama-3.1-70b"), seq=8192, samples=32)
    free, limited = (
        {one.division.family: one.fits for one in plan_cluster(work, cluster(4), host_bytes=limit).divisions}
        for limit in (None, 1500 * GIB)
    )
    assert free["FSDP2"] and not limited["FSDP2"], "eight processes read 70 B parameters in fp32"
    assert limited["ZeRO-3"], "in 16 bits they fit"


def test_divisions_of_data_and_of_rows_run():
    assert Division(sharding="weights", data=8).runs and Division(data=8).runs
    assert Division(sharding="weights", data=4, sequence=2).runs
    assert Division(sharding="weights", data=16, within_node=True).runs
    assert Division(sharding="weights", data=4, tensor=2).runs
    weights: dict[str, Any] = {"sharding": "weights", "tensor": 2}
    alone, copies, rows = {**weights, "data": 1}, {**weights, "data": 4, "within_node": True}, {**weights, "data": 4}
    for changes in ({"tensor": 2}, {"pipeline": 2}, alone, copies, {**rows, "sequence": 2}, {**rows, "offload": True}):
        assert not Division(**changes).runs


@pytest.mark.parametrize(
    "model", ["llama-3.2-1b", "qwen3-0.6b", "phi-4-mini", "gemma-2-2b", "qwen2-7b", "olmo-2-1b", "llama-3.1-70b"]
)
def test_shape_has_the_parameters_of_the_model(model):
    shape = shape_of(request(model))
    assert shape.gated and shape.name == model
    if model.startswith("llama-3.1"):
        assert shape == llama(model)


def test_shape_of_the_largest_preset_has_the_published_count():
    assert shape_of(request("llama-3.1-405b")).numel == llama("llama-3.1-405b").numel == 405_853_388_800


@pytest.mark.parametrize("model", ["gpt-oss-20b", "google/gemma-3-4b-it"])
def test_experts_and_towers_are_refused(model):
    with pytest.raises(UsageError, match=f"{model}.* plan one node without --nodes") as caught:
        shape_of(request(model))
    assert "\n" not in str(caught.value)
