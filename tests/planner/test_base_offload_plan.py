"""Plans of runs whose frozen layers wait on the host: memory against the model itself, traffic, time, the search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planner_helpers import BARE, H200, request_of, small_gpu

from benchmarks.cases import base_offload as cases
from benchmarks.pages import base_offload as pages
from tigon.planner.engines.base_offload import layers_on_host
from tigon.planner.engines.choose import engine_of
from tigon.planner.engines.deepspeed_host_memory import pinned
from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, build
from tigon.planner.search import space
from tigon.planner.search.recommend import recommendations
from tigon.planner.search.space import SearchProblem
from tigon.planner.simulate.model_states import model_weights
from tigon.techniques import SEARCHES, TECHNIQUES
from tigon.techniques.base_offload.streamed_layers import StreamedLayers
from tigon.techniques.technique import RunInfo

peft = pytest.importorskip("peft")
from tigon._trunk import decoder_layers  # noqa: E402

SLOW_LINK = replace(BARE, link_bytes_s=1e6)
SHAPES = {"equal layers": ("qwen3", {}), "layers of two kinds": ("gemma3_text", {"hidden_size": 96})}


def pair(gpu: Gpu = BARE, **settings: object) -> tuple[Estimate, Estimate]:
    """The estimates of a run without and with its frozen layers on the host."""
    request = request_of(name="qwen3", seq=256, lora_rank=4, **settings)  # type: ignore[arg-type]
    return estimate(request, gpu=gpu), estimate(streamed(request), gpu=gpu)


def streamed(request: Request) -> Request:
    return replace(request, settings=request.settings.having({"lora.base_offload": True}))


@pytest.mark.parametrize("row", ["llama-3.1-8b-offload", "8gb-tiles", "24gb"])
def test_plan_is_that_of_a_measured_row(row):
    """Over frozen embeddings the input of the first layer stays on the GPU, which is 3.5 % of `24gb`."""
    (line,) = [line for line in pages.load()["steps"] if line["row"] == row]
    case = cases.ROWS[row]
    config = cases.config_of(case.model, False)
    settings = cases.settings_of(case, config, **{cases.KEY: True})
    request = Request(model=case.model, config=config, batch=1, seq=line["seq"], settings=settings)
    found = estimate(request, gpu=H200, evaluation=False)
    assert found.peak_allocated_bytes == pytest.approx(line["on_host"]["peak_bytes"], rel=0.005)
    taken = line["on_host"]["reserved_bytes"] + line["on_host"]["non_allocator_bytes"]
    assert found.device_bytes == pytest.approx(taken, rel=0.03)


@pytest.mark.parametrize("kind", SHAPES)
def test_planned_blocks_are_those_of_the_model(kind):
    name, shape = SHAPES[kind]
    request = request_of(name, shape=shape, lora_rank=4)
    planned = layers_on_host(model_weights(request))
    model = build(request.model, request.config).to_empty(device="cpu").bfloat16()
    model = TECHNIQUES["lora"].model(model, request.settings, RunInfo(device="cpu"))
    held = StreamedLayers(model, decoder_layers(model), torch.device("cpu"))
    assert planned.layer_bytes == tuple(layer.nbytes for layer in held.layers)
    assert planned.buffers == tuple(buffer.nbytes for buffer in held.buffers)


def test_the_gpu_holds_the_buffers_instead_of_the_layers():
    request = request_of("qwen3", lora_rank=4)
    model = model_weights(request)
    moved = layers_on_host(model)
    whole, parts = pair()
    left = moved.moved_bytes - sum(moved.buffers)
    assert left > 0
    assert whole.components["weights"] - parts.components["weights"] == pytest.approx(left, abs=2048)
    assert whole.peak_allocated_bytes - parts.peak_allocated_bytes == pytest.approx(left, abs=2048)
    assert parts.host_bytes == sum(map(pinned, moved.layer_bytes)) and whole.host_bytes == 0
    placed = engine_of(streamed(request).settings).placement(streamed(request), model)
    assert placed.traffic.each_pass == sum(moved.layer_bytes) - sum(moved.buffers)


def test_copies_cost_time_only_if_they_take_longer_than_a_pass():
    whole, parts = pair()
    assert parts.step_s == pytest.approx(whole.step_s, rel=0.02)
    request = streamed(request_of("qwen3", lora_rank=4))
    copied = 2 * engine_of(request.settings).placement(request, model_weights(request)).traffic.each_pass
    whole, parts = pair(SLOW_LINK, accumulate=3)
    assert parts.step_s == pytest.approx(3 * copied / SLOW_LINK.link_bytes_s, rel=0.02)
    assert parts.step_s > whole.step_s


def test_the_note_names_the_host_memory_and_the_traffic():
    request = streamed(request_of("qwen3", lora_rank=4))
    notes = estimate(request, gpu=BARE, evaluation=False).notes
    assert any("5 layers wait in host memory" in note and "Each micro-batch copies" in note for note in notes)


@pytest.mark.parametrize("host_bytes", [None, 2**30])
def test_layers_go_to_the_host_only_if_nothing_else_fits(host_bytes):
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 40}
    request = request_of("qwen3", batch=1, seq=32, lora_rank=4, precision="bf16", shape=shape)
    fallback = space.layers_on_host(request.settings)
    assert fallback is not None
    free = frozenset(SEARCHES) - {"train.precision"}
    chosen = {}
    for memory_mib in (2000, 400):  # 208 of it are held outside the allocator if layers wait on the host
        problem = SearchProblem(
            request=request, free=free, gpu=small_gpu(memory_mib), fallbacks=(fallback,), host_bytes=host_bytes
        )
        found, _, used = recommendations(problem)
        assert found, memory_mib
        chosen[memory_mib] = found[0].option.request.settings.lora.base_offload, used
    assert chosen == {2000: (False, ""), 400: (True, fallback.name)}


@pytest.mark.parametrize("changed", [{}, {"lora_rank": 4, "gpus": 2}, {"lora_rank": 4, "precision": "fp8"}], ids=str)
def test_search_never_proposes_what_is_refused(changed):
    assert space.layers_on_host(request_of("qwen3", **changed).settings) is None
