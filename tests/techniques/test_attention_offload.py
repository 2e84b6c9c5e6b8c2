"""Layers whose input and whose attention's results wait on the host: equal gradients, and one forward of attention."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from small_llama import loss_and_gradients, small_llama
from torch import Tensor
from torch.nn.attention import SDPBackend

from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques.checkpointing import host_offload
from tigon.techniques.checkpointing.host_offload import HostOffload, Waiting
from tigon.techniques.head_groups import _KERNELS

transformers = pytest.importorskip("transformers")


def llama(checkpointing: str = "none", **more: Any) -> Any:
    options = {name: more.pop(name) for name in ("device", "dtype", "width") if name in more}
    return small_llama({"train.checkpointing": checkpointing, **more}, num_hidden_layers=3, **options)


class CopiesOnCpu(HostOffload):
    """Copies tensors of the CPU too."""

    fetches = 0

    def has_streams(self, device: torch.device) -> bool:
        return True

    def copied_out(self, tensor: Tensor) -> tuple[Tensor, None]:
        return tensor.detach().clone(), None

    def copied_back(self, sent: Waiting) -> tuple[Tensor, None]:
        CopiesOnCpu.fetches += 1
        return sent.host.clone(), None

    def wait_for(self, event: Any, tensor: Tensor) -> None:
        pass


@pytest.fixture(params=["on the device", "held", "fetched again"])
def copies(request: Any, monkeypatch: Any) -> str:
    """What happens to the tensors: nothing, as on a CPU; copies that stay until they are used; copies that do not."""
    if request.param != "on the device":
        monkeypatch.setattr("tigon.techniques.checkpointing.attention_offload.HostOffload", CopiesOnCpu)
        monkeypatch.setattr(host_offload, "MIN_BYTES", 1)
    if request.param == "fetched again":
        monkeypatch.setattr(host_offload, "LARGE_BYTES", 1)
    monkeypatch.setattr(CopiesOnCpu, "fetches", 0)
    return request.param


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "block-mask"])
@pytest.mark.parametrize("more", [{}, {"attention_groups": 2, "mlp_tile_tokens": 24}], ids=["whole", "pieces"])
def test_gradients_equal_those_of_full_recomputation_bit_for_bit(more, documents, backwards, copies):
    want = loss_and_gradients(llama("full", **more), documents=documents, backwards=backwards)
    got = loss_and_gradients(llama("offload-attention", **more), documents=documents, backwards=backwards)
    assert (CopiesOnCpu.fetches > 0) == (copies != "on the device")
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, msg=lambda text, name=name: f"{name}: {text}")
        if more or documents:  # otherwise PyTorch's own function computes attention in `full`
            assert torch.equal(got[name], expected), name


def test_attention_runs_forward_once_per_layer(copies, monkeypatch):
    on_cpu, calls = ("cpu", SDPBackend.FLASH_ATTENTION), []
    kernel = _KERNELS[on_cpu]
    monkeypatch.setitem(
        _KERNELS, on_cpu, kernel._replace(forward=lambda *args: calls.append(1) or kernel.forward(*args))
    )
    loss_and_gradients(llama("offload-attention"))
    assert len(calls) == 3
    calls.clear()
    loss_and_gradients(llama("full", attention_groups=2))
    assert len(calls) == 6


def test_tiles_are_not_computed_in_the_recomputation(monkeypatch):
    """Two micro-batches of 80 tokens have four tiles: one forward and one backward pass of each."""
    model, calls = llama("full", mlp_tile_tokens=20), []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    loss_and_gradients(model)
    assert len(calls) == 3 * 4 * 2


def test_large_tensors_are_dropped_between_their_uses(monkeypatch):
    """At the end of a recomputation neither the layer's input nor its first norm's output nor attention's output is
    on the device. PyTorch's allocator on the CPU is watched."""
    monkeypatch.setattr("tigon.techniques.checkpointing.attention_offload.HostOffload", CopiesOnCpu)
    monkeypatch.setattr(host_offload, "MIN_BYTES", 1)
    held = {}
    for name, large in (("held", 2**40), ("dropped", 1)):
        monkeypatch.setattr(host_offload, "LARGE_BYTES", large)
        model = llama("offload-attention", width=64, mlp_tile_tokens=24)
        found: list[int] = []

        def count(*_: Any, found: list[int] = found) -> None:
            gc.collect()
            tensors = {
                t.untyped_storage()._cdata for t in gc.get_objects() if type(t) is Tensor and t.shape[-1:] == (64,)
            }
            found.append(len(tensors))

        handle = model.model.layers[1].mlp.down_proj.register_forward_hook(count)
        loss_and_gradients(model)
        handle.remove()
        held[name] = found[-1]
    assert held["dropped"] <= held["held"] - 2


@pytest.mark.gpu
@pytest.mark.parametrize("large", [2**20, 2**30], ids=["fetched again", "held"])
def test_gradients_and_memory_on_a_gpu(large, monkeypatch):
    monkeypatch.setattr(host_offload, "LARGE_BYTES", large)
    device = torch.device("cuda")
    peaks, found = {}, {}
    for kind in ("full", "offload-attention"):
        model = llama(kind, device="cuda", dtype=torch.bfloat16, width=256, attention_groups=2, mlp_tile_tokens=1024)
        meter = PeakMeter(device)
        meter.start(())
        found[kind] = loss_and_gradients(model, 8192)
        peaks[kind] = meter.stop().peak_bytes
    for name, expected in found["full"].items():
        error = (found["offload-attention"][name].double() - expected.double()).norm() / expected.double().norm()
        assert error <= 1e-2, f"{name}: {float(error):.1e}"
    if large == 2**20:
        assert peaks["offload-attention"] < peaks["full"]
