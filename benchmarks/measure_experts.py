"""Measure the experts of one layer, forward and backward: tigon against transformers' grouped_mm and eager loop.

    python -m benchmarks.measure_experts --json experts.json
    python -m benchmarks.measure_experts --sonicmoe         transformers' "sonicmoe" too, if its kernels can be loaded
    python -m benchmarks.measure_experts --tiny             a check of the script on a CPU

Each result is compared with the fp64 formula first, on a small layer in bf16. Then the implementations take turns, so
that a slow phase of the machine reaches all of them. transformers' eager loop waits for the host to read which experts
are chosen. Its times include that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks import step_record
from tigon.integrations import experts

IMPLEMENTATIONS = ["tigon", "grouped_mm", "eager"]


@dataclass(frozen=True)
class Shape:
    """One layer of experts."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = (Shape("qwen3-30b-a3b", 128, 8, 2048, 768), Shape("mixtral-8x7b", 8, 2, 4096, 14336))
TINY = (Shape("tiny", 4, 2, 32, 24),)


def layer(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """transformers' module with random weights; Mixtral's experts have the same layout as Qwen3's."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden, moe_intermediate_size=shape.inner, num_experts=shape.experts
    )
    with torch.device(device):
        module = Qwen3MoeExperts(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def routed(shape: Shape, tokens: int, skewed: bool, device: str) -> tuple[Tensor, Tensor]:
    """(indices, weights); skewed: the probability of expert e falls as 1 / (e + 1)."""
    scores = torch.rand(tokens, shape.experts, device=device).log().neg().log().neg()
    if skewed:
        scores -= torch.arange(1, shape.experts + 1, device=device).log()
    values, index = scores.topk(shape.top_k, dim=-1)
    return index, values.softmax(-1)


def step(module: Any, name: str, inputs: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    """The output and all gradients of one forward and backward."""
    hidden, index, weights = inputs
    module.config._experts_implementation = name
    leaves = [hidden, weights, *module.parameters()]
    out = module(hidden, index, weights)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def errors(device: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Relative Frobenius errors against fp64: output, then gradients of hidden, weights, gate_up and down."""
    shape = Shape("check", 16, 4, 256, 192)
    torch.manual_seed(0)
    module = layer(shape, dtype, device)
    index, weights = routed(shape, 500, True, device)
    hidden = torch.randn(500, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    inputs = (hidden, index, weights.to(dtype).requires_grad_())
    dy = torch.randn(500, shape.hidden, device=device, dtype=dtype)
    got = {name: step(module, name, inputs, dy) for name in IMPLEMENTATIONS}
    exact = (hidden.detach().double().requires_grad_(), index, inputs[2].detach().double().requires_grad_())
    truth = step(module.double(), "eager", exact, dy.double())
    return {
        name: [float((a.double() - b).norm() / b.norm()) for a, b in zip(tensors, truth, strict=True)]
        for name, tensors in got.items()
    }


def timed_ms(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def measure(shape: Shape, tokens: int, skewed: bool, device: str, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """One row: median milliseconds and peak bytes above what was allocated, for each implementation."""
    torch.manual_seed(0)
    module = layer(shape, dtype, device)
    index, weights = routed(shape, tokens, skewed, device)
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    inputs = (hidden, index, weights.to(dtype).requires_grad_())
    dy = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    peaks: dict[str, int] = {}
    for turn in range(turns + 2):
        for name in IMPLEMENTATIONS:
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            ms = timed_ms(partial(step, module, name, inputs, dy), device)
            if device != "cpu":
                peaks[name] = torch.cuda.max_memory_allocated() - before
            if turn >= 2:  # the first two compile and warm up
                times[name].append(ms)
    medians = {name: statistics.median(values) for name, values in times.items()}
    flops = 18 * tokens * shape.top_k * shape.hidden * shape.inner
    tflops = {name: flops / ms / 1e9 for name, ms in medians.items()}
    row = {"shape": asdict(shape), "tokens": tokens, "skewed": skewed, "turns": turns}
    return {**row, "median_ms": medians, "tflops": tflops, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small layer, for a CPU")
    parser.add_argument("--sonicmoe", action="store_true", help="measure transformers' implementation of SonicMoE too")
    args = parser.parse_args()
    if args.sonicmoe:
        IMPLEMENTATIONS.append("sonicmoe")
    experts.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    record = step_record.StepRecord("measure_experts", torch.device(device))
    found, rows = errors(device, dtype), []
    print(json.dumps(found))
    for shape in TINY if args.tiny else SHAPES:
        for tokens in (64,) if args.tiny else (4096, 32768):
            for skewed in (False, True):
                row = measure(shape, tokens, skewed, device, dtype, args.turns)
                rows.append(row)
                print(json.dumps(row), flush=True)
                record.write(args.json, errors=found, rows=rows)


if __name__ == "__main__":
    main()
