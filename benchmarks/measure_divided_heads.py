"""Measure a head divided by vocabulary against the whole head, forward and backward, on the GPUs of one host.

    torchrun --nproc-per-node 2 -m benchmarks.measure_divided_heads --json divided.json
    torchrun --nproc-per-node 2 -m benchmarks.measure_divided_heads --tiny      a check of the script on a CPU

Three ways to the same loss take turns on every process, so that a slow phase of the machine reaches all of them:

    whole       Each process has the whole head, and calls tigon.linear_cross_entropy.
    divided     Each process has some rows of a DTensor, and calls tigon.linear_cross_entropy.
    gathered    The logits of such a DTensor are gathered for tigon.cross_entropy, as in a patched model before.

Before that, each way's loss and gradients in bf16 are compared with fp64 on a small head. A prediction stands beside
each time: the products at the rate that this GPU reaches in one product of the head, plus the bytes on the link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import tigon
from benchmarks import step_record
from benchmarks.step_record import busy_ms, by_name, device_kernels

WAYS = ("whole", "divided", "gathered")


@dataclass(frozen=True)
class Shape:
    """A head and its tokens."""

    name: str
    tokens: int
    hidden: int
    vocab: int


SHAPES = (
    Shape("llama-3-8b", 4096, 4096, 128256), Shape("llama-3-8b", 16384, 4096, 128256),
    Shape("gemma-3-4b", 8192, 2560, 262208), Shape("qwen3-8b", 8192, 4096, 151936),
)  # fmt: skip
CHECK = Shape("check", 96, 64, 1001)
TINY = (Shape("tiny", 64, 32, 515),)


def drawn(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, the same on every process."""
    torch.manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device).to(dtype)
    weight = (torch.randn(shape.vocab, shape.hidden, device=device) * shape.hidden**-0.5).to(dtype)
    return hidden, weight, torch.randint(shape.vocab, (shape.tokens,), device=device)


def steps(shape: Shape, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Each way's name and its step, which gives the loss and the gradients of hidden and of the weight."""
    hidden, weight, target = drawn(shape, dtype, device)
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    hidden.requires_grad_()
    weight.requires_grad_()

    def stepped(loss: Any, of: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, of))]

    def replicated() -> Any:
        return DTensor.from_local(hidden, mesh, [Replicate()])

    def gathered() -> list[Tensor]:
        logits: Any = F.linear(replicated(), rows)
        logits = logits.redistribute(mesh, [Replicate()])
        return stepped(tigon.cross_entropy(logits.to_local(), target), rows)

    yield "whole", lambda: stepped(tigon.linear_cross_entropy(hidden, weight, target), weight)
    yield "divided", lambda: stepped(tigon.linear_cross_entropy(replicated(), rows, target), rows)
    yield "gathered", gathered


def errors(device: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Relative Frobenius errors of the loss and both gradients against fp64."""
    hidden, weight, target = drawn(CHECK, dtype, device)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.t(), target)
    exact = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
    found = {}
    for name, run in steps(CHECK, dtype, device):
        tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in run()]
        found[name] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(tensors, exact, strict=True)]
    return found


def timed_ms(run: Callable[[], Any], device: str) -> float:
    dist.barrier()
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


def product_flops(shape: Shape, dtype: torch.dtype, device: str) -> float:
    """Operations per second of the head's product."""
    x, w = (torch.randn(n, shape.hidden, device=device).to(dtype) for n in (shape.tokens, shape.vocab))
    times = [timed_ms(lambda: x @ w.t(), device) for _ in range(5)]
    return 2 * shape.tokens * shape.hidden * shape.vocab / statistics.median(times) * 1e3


def predicted_ms(shape: Shape, flops: float, link: float) -> dict[str, float]:
    """By the products and the link; link: bytes per second of one direction."""
    ranks = dist.get_world_size()
    product = 2 * shape.tokens * shape.hidden * shape.vocab / flops * 1e3
    share = (ranks - 1) / ranks / link * 1e3  # ms per byte that an all-gather leaves on every process
    hidden, logits = shape.tokens * shape.hidden, shape.tokens * shape.vocab
    return {
        "whole": 3 * product,
        "divided": 3 * product / ranks + 2 * 4 * hidden * share,
        "gathered": 3 * product / ranks + (2 * logits + 2 * 2 * hidden) * share,
    }


def measure(shape: Shape, device: str, dtype: torch.dtype, turns: int, link: float) -> dict[str, Any]:
    """One row: each way's median milliseconds, predicted milliseconds, and peak bytes above what was allocated."""
    ways = dict(steps(shape, dtype, device))
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks: dict[str, int] = {}
    for turn in range(turns + 2):
        for name in WAYS:
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            ms = timed_ms(ways[name], device)
            if device != "cpu":
                peaks[name] = torch.cuda.max_memory_allocated() - before
            if turn >= 2:  # the first two compile and warm up
                times[name].append(ms)
    medians = {name: statistics.median(values) for name, values in times.items()}
    predicted = predicted_ms(shape, product_flops(shape, dtype, device), link)
    return {"shape": asdict(shape), "median_ms": medians, "predicted_ms": predicted, "peak_bytes": peaks}


def profiled(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels of one step of `whole` and of `divided`: name -> (calls, milliseconds), the longest first."""
    tables = {}
    for name, run in steps(shape, dtype, device):
        if name == "gathered":
            continue
        for _ in range(3):
            run()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            if device != "cpu":
                torch.cuda.synchronize()
        kernels = device_kernels(profiler.events())
        tables[name] = {"busy_ms": busy_ms(kernels), "kernels": by_name(kernels)}
    return {"shape": asdict(shape), **tables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--link", type=float, default=200e9, help="bytes per second between two GPUs, one direction")
    parser.add_argument("--profile", action="store_true", help="record the kernels of one step instead of times")
    parser.add_argument("--tiny", action="store_true", help="a small head, for a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    first, dtype = dist.get_rank() == 0, torch.bfloat16
    record, rows = step_record.StepRecord("measure_divided_heads", torch.device(device)), []
    found = {"processes": dist.get_world_size(), "link_bytes_s": args.link, "errors": errors(device, dtype)}
    if first:
        print(json.dumps(found), flush=True)
    for shape in TINY if args.tiny else SHAPES:
        row = profiled(shape, device, dtype) if args.profile else measure(shape, device, dtype, args.turns, args.link)
        rows.append(row)
        if first:
            print(json.dumps(row), flush=True)
            record.write(args.json, **found, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
