"""Measure a head divided by vocabulary against the whole head, forward and backward, on the GPUs of one host.

    torchrun --nproc-per-node 2 -m benchmarks divided-heads --json divided.json
    torchrun --nproc-per-node 2 -m benchmarks divided-heads --tiny      a check of the script on a CPU

Three ways to the same loss take turns on every process, so that a slow phase of the machine reaches all of them:

    whole       Each process has the whole head, and calls tigon.linear_cross_entropy.
    divided     Each process has some rows of a DTensor, and calls tigon.linear_cross_entropy.
    gathered    The logits of such a DTensor are gathered for tigon.cross_entropy, as in a patched model before.

Before that, each way's loss and gradients in bf16 are compared with fp64 on a small head. A prediction stands beside
each time: the products at the rate that this GPU reaches in one product of the head, plus the bytes on the link.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tigon
from benchmarks.harness import Bench, Case, kernels_of, peaks_bytes, times_ms
from tigon.bench.numerical_errors import relative_error


@dataclass(frozen=True)
class Shape:
    """A head and its tokens."""

    name: str
    tokens: int
    hidden: int
    vocab: int


SHAPES = (
    Shape("llama-3-8b", 4096, 4096, 128256),
    Shape("llama-3-8b", 16384, 4096, 128256),
    Shape("gemma-3-4b", 8192, 2560, 262208),
    Shape("qwen3-8b", 8192, 4096, 151936),
)
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
        found[name] = [relative_error(a, b) for a, b in zip(tensors, exact, strict=True)]
    return found


def product_flops(shape: Shape, dtype: torch.dtype, device: str) -> float:
    """Operations per second of the head's product."""
    x, w = (torch.randn(n, shape.hidden, device=device).to(dtype) for n in (shape.tokens, shape.vocab))
    ms = times_ms({"product": lambda: x @ w.t()}, torch.device(device), turns=5)["product"]
    return 2 * shape.tokens * shape.hidden * shape.vocab / ms * 1e3


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


def together(run: Callable[[], Any]) -> Callable[[], Any]:
    """The step, begun by all processes at a time."""

    def waits() -> Any:
        dist.barrier()
        return run()

    return waits


def measured(shape: Shape, device: str, dtype: torch.dtype, link: float) -> dict[str, Any]:
    """Each way's median milliseconds, predicted milliseconds, and peak bytes above what was allocated."""
    ways = {name: together(run) for name, run in steps(shape, dtype, device)}
    return {
        "shape": asdict(shape),
        "median_ms": times_ms(ways, torch.device(device)),
        "predicted_ms": predicted_ms(shape, product_flops(shape, dtype, device), link),
        "peak_bytes": peaks_bytes(ways, torch.device(device)),
    }


def profiled(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels of one step of `whole` and of `divided`."""
    tables: dict[str, Any] = {"shape": asdict(shape)}
    for name, run in steps(shape, dtype, device):
        if name != "gathered":
            for _ in range(3):
                run()
            tables[name] = kernels_of(together(run), torch.device(device))
    return tables


def measure(bench: Bench) -> None:
    device, given = "cpu" if bench.tiny else "cuda", bench.given
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    bench.writes, dtype = dist.get_rank() == 0, torch.bfloat16
    bench.fields |= {"processes": dist.get_world_size(), "link_bytes_s": given.link}
    bench.add("errors", errors(device, dtype))
    for shape in TINY if bench.tiny else SHAPES:
        row = profiled(shape, device, dtype) if given.profile else measured(shape, device, dtype, given.link)
        bench.add("rows", row)
    dist.destroy_process_group()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", type=float, default=200e9, help="bytes per second between two GPUs, one direction")
    parser.add_argument("--profile", action="store_true", help="record the kernels of one step instead of times")


CASE = Case(measure=measure, options=options)
