"""What only a GPU can get wrong: size, devices, streams, graphs, synchronisation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import (
    assert_same,
    differentiable,
    first_cases,
    make,
    relative_error,
    run,
    tensors_of,
    upstream_for,
    with_leaves,
)
from tigon.ops import OPS, Case, Op, prepare_targets

pytestmark = pytest.mark.gpu

# More than 2^31 elements in the first tensor: shape, options, the tensors that have the rows, their dimension.
HUGE: dict[str, tuple[str, tuple[int, ...], dict[str, Any], tuple[str, ...], int]] = {
    "rms_norm": ("rms_norm", (65540, 32768), {}, ("x",), 0),
    "rms_norm short rows": ("rms_norm", ((1 << 24) + 5, 128), {}, ("x",), 0),
    "add_rms_norm": ("add_rms_norm", (131080, 16384), {}, ("x", "residual"), 0),
    "layer_norm": ("layer_norm", (65540, 32768), {}, ("x",), 0),
    "swiglu": ("swiglu", ((1 << 18) + 5, 8192), {}, ("gate", "up"), 0),
    "swiglu packed": ("swiglu", ((1 << 17) + 5, 16384), {"packed": True}, ("gate",), 0),
    "geglu": ("geglu", (5, (1 << 29) // 4, 4), {}, ("gate", "up"), 1),
    "rope": ("rope", (1, 32, (1 << 19) + 5, 128), {"kv_heads": 8}, ("q", "k", "cos", "sin"), -2),
    "cross_entropy": ("cross_entropy", (16390, 131072), {"reduction": "none"}, ("logits", "target"), 0),
    "linear_cross_entropy": ("linear_cross_entropy", ((1 << 20) + 5, 2048, 16), {"reduction": "none"},
                             ("hidden", "target"), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_more_than_2_to_the_31_elements_are_addressed_right(name: str) -> None:
    """The last rows of a huge tensor, outputs and gradients, equal those rows alone."""
    op_name, shape, options, rows, dim = HUGE[name]
    op = OPS[op_name]
    need = 8 * 2 * max(torch.Size(shape).numel(), 1 << 31)
    if torch.cuda.mem_get_info()[1] < need:
        pytest.skip(f"needs a GPU of {need / 2**30:.0f} GiB")
    last = 4
    # The vendor's product sums four rows in another order than a million.
    allowed = 2 * torch.finfo(torch.bfloat16).eps if op.name == "linear_cross_entropy" else 0.0
    inputs = make(op, Case(id="huge", shape=shape, options=options), torch.bfloat16, "cuda")
    assert inputs[rows[0]].numel() >= 1 << 31
    names = [n for n in rows if n in op.grads]
    leaves = with_leaves(op, inputs, lambda t: t, names=names)
    tail = {n: t.narrow(dim, t.shape[dim] - last, last).clone() if n in rows else t for n, t in inputs.items()}
    outputs = tensors_of(op.call(**leaves))
    alone = run(op.call, op, with_leaves(op, tail, names=names))
    upstream = upstream_for(alone.outputs)
    for got, wanted in zip(outputs, alone.outputs, strict=True):
        error = relative_error(got.narrow(dim if got.ndim > 1 else 0, got.shape[dim] - last, last), wanted)
        assert error <= allowed, (name, error)
    # Zero but for the last rows: enough to see whose gradient they get.
    whole = [torch.zeros_like(t) for t in outputs]
    for g, t in zip(upstream, whole, strict=True):
        t.narrow(dim if t.ndim > 1 else 0, t.shape[dim] - last, last).copy_(g)
    grads = torch.autograd.grad(outputs, [leaves[n] for n in names], whole)
    for n, grad in zip(names, grads, strict=True):
        error = relative_error(grad.narrow(dim, grad.shape[dim] - last, last), alone.grads[n])
        assert error <= allowed, (name, n, error)
        assert not grad.narrow(dim, 0, grad.shape[dim] - last).any(), (name, n)


@pytest.mark.parametrize(("op", "case"), first_cases())
def test_tensor_on_another_than_the_current_device_gives_the_same_result(op: Op, case: Case) -> None:
    """Triton launches on the current device, which need not be the tensor's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = run(op.call, op, with_leaves(op, make(op, case, torch.float32, "cuda:0")))
    with torch.cuda.device(0):
        got = run(op.call, op, with_leaves(op, _to(make(op, case, torch.float32, "cuda:0"), "cuda:1")))
    for name, t in got.named().items():
        assert t.device == torch.device("cuda:1")
        torch.testing.assert_close(t.to("cuda:0"), expected.named()[name], rtol=1e-5, atol=1e-6)


def _to(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    return {n: t.to(device) if isinstance(t, Tensor) else t for n, t in inputs.items()}


@pytest.mark.parametrize(("op", "case"), first_cases())
def test_side_stream_and_worker_thread_get_the_same_result(op: Op, case: Case) -> None:
    """Forward and backward on a side stream, and in a thread that has not used CUDA before."""
    inputs = make(op, case, torch.float32, "cuda")
    expected = run(op.call, op, with_leaves(op, inputs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run(op.call, op, with_leaves(op, inputs), upstream_for(expected.outputs))
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(aside, expected)
    results = []
    thread = threading.Thread(target=lambda: results.append(run(op.call, op, with_leaves(op, inputs))))
    thread.start()
    thread.join()
    assert_same(results[0], expected)


# The count of the rows that are not ignored; `prepare_targets` starts it before the model's forward.
# Their count of ignored rows waits, once, unless the targets were prepared.
WAITS = {"linear_cross_entropy", "multi_head_linear_cross_entropy"}


@pytest.mark.parametrize(("op", "case"), first_cases())
def test_training_step_does_not_wait_for_the_device(op: Op, case: Case) -> None:
    """`.item()`, `bool(tensor)` or a blocking copy stalls the queue in every layer."""
    inputs = make(op, case, torch.float32, "cuda")
    leaves = with_leaves(op, inputs)
    upstream = upstream_for(run(op.call, op, leaves).outputs)
    if op.name in WAITS:
        leaves["target"] = prepare_targets(leaves["target"], shifts=case.options.get("shifts", (0,)))
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op.call, op, leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("op", "case"), first_cases())
def test_captured_graph_replays_the_eager_result_on_new_inputs(op: Op, case: Case) -> None:
    """Forward and backward captured once, replayed on new inputs and new labels."""
    static = with_leaves(op, make(op, case, torch.float32, "cuda"))
    upstream = upstream_for(tensors_of(op.call(**static)))
    step: Callable[[], Any] = lambda: run(op.call, op, static, upstream)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    torch.manual_seed(99)
    fresh = op.make(case, torch.float32, torch.device("cuda"))
    with torch.no_grad():
        for n, t in fresh.items():
            if isinstance(t, Tensor):
                static[n].copy_(t)
    graph.replay()
    # Compiled and captured losses keep ignored rows, which adds their zeros in another order.
    assert_same(captured, run(op.call, op, with_leaves(op, fresh), upstream), ulps=8.0)
    assert differentiable(op, static)


@pytest.mark.parametrize(("op", "case"), first_cases())
def test_repeated_runs_are_equal_while_the_device_is_busy(op: Op, case: Case) -> None:
    """Two hundred repeats, bit for bit, with another stream competing for the SMs."""
    larger = replace(case, shape=(case.shape[0] * 8, *case.shape[1:]))
    inputs = make(op, larger, torch.bfloat16, "cuda")
    expected = run(op.call, op, with_leaves(op, inputs))
    upstream = upstream_for(expected.outputs)
    noise, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    leaves = with_leaves(op, inputs)
    for _ in range(200):
        with torch.cuda.stream(noise):
            torch.mm(a, a)
        assert_same(run(op.call, op, leaves, upstream), expected)
