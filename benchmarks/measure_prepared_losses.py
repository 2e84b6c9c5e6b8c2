"""Time losses beside their matrix products: as called, with prepared labels, and their kernels alone.

    python -m benchmarks.measure_prepared_losses --json RECORD      # on a GPU: about 30 s
    python -m benchmarks.measure_prepared_losses --tiny             # small shapes, also on the CPU

Forward and backward in bf16, eager, 8192 tokens of a product at a time. A call of `linear_cross_entropy` waits for the
number of labels that are not ignored, and the GPU then waits for the next launch. `prepare_targets` counts earlier, as
the trainer does. The time of the kernels is that in which the GPU ran at least one of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tigon
from benchmarks import step_record

SHAPES = ((8192, 4096, 128256), (4096, 2048, 128256), (16384, 3584, 152064), (32768, 2048, 128256))
TINY_SHAPES = ((64, 32, 128),)
HEADS = (2, 2048, 2048, 32000)
"""Samples, tokens of each, hidden size, vocabulary; three heads that look 1 to 3 tokens ahead."""
TINY_HEADS = (2, 16, 32, 64)
PRODUCT_TOKENS = 8192
TURNS, CALLS = 3, 6


def products(hidden: Tensor, weight: Tensor) -> None:
    """Logits, dX and dW."""
    for start in range(0, len(hidden), PRODUCT_TOKENS):
        x = hidden[start : start + PRODUCT_TOKENS]
        logits = x @ weight.t()
        logits @ weight
        logits.t() @ x


def with_backward(loss: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], None]:
    def run() -> None:
        loss().backward()
        for leaf in leaves:
            leaf.grad = None

    return run


def linear_calls(tokens: int, hidden: int, vocab: int, device: torch.device) -> dict[str, Callable[[], None]]:
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device=device)
    prepared = tigon.prepare_targets(target)
    return {
        "tigon": with_backward(lambda: tigon.linear_cross_entropy(x, weight, target), [x, weight]),
        "prepared": with_backward(lambda: tigon.linear_cross_entropy(x, weight, prepared), [x, weight]),
        "products": lambda: products(x.detach(), weight.detach()),
    }


def heads_calls(batch: int, tokens: int, width: int, vocab: int, device: torch.device) -> dict[str, Callable[[], None]]:
    shifts = (1, 2, 3)
    hiddens = [torch.randn(batch, tokens, width, device=device, dtype=torch.bfloat16) for _ in shifts]
    weights = [torch.randn(vocab, width, device=device, dtype=torch.bfloat16) / width**0.5 for _ in shifts]
    leaves = [one.requires_grad_() for one in (*hiddens, *weights)]
    target = torch.randint(0, vocab, (batch, tokens), device=device)
    prepared = tigon.prepare_targets(target, shifts=shifts)

    def unfused() -> Tensor:
        total = torch.zeros((), device=device)
        for hidden, weight, shift in zip(hiddens, weights, shifts, strict=True):
            logits = (hidden[:, :-shift] @ weight.t()).float()
            total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, shift:].flatten())
        return total

    def ours(labels: Any) -> Callable[[], Any]:
        return lambda: tigon.multi_head_linear_cross_entropy(hiddens, weights, labels, shifts=shifts)

    def alone() -> None:
        for hidden, weight in zip(hiddens, weights, strict=True):
            products(hidden.detach().flatten(0, 1), weight.detach())

    calls = {
        "tigon": with_backward(ours(target), leaves), "prepared": with_backward(ours(prepared), leaves),
        "products": alone,
    }  # fmt: skip
    if device.type == "cuda":
        calls["torch.compile"] = with_backward(torch.compile(unfused), leaves)
    return calls


def measured(calls: dict[str, Callable[[], None]], device: torch.device) -> dict[str, Any]:
    """Name -> milliseconds per call, the median of TURNS, and the milliseconds of its kernels."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):  # the first compiles
        for name, call in calls.items():
            call()
            wait()
            begin_s = time.perf_counter()
            for _ in range(CALLS):
                call()
            wait()
            if turn:
                times[name].append(1000 * (time.perf_counter() - begin_s) / CALLS)
    found: dict[str, Any] = {name: {"ms": statistics.median(values)} for name, values in times.items()}
    if device.type == "cuda":
        for name, call in calls.items():
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                call()
                wait()
            kernels = step_record.device_kernels(recorded.events())
            found[name]["kernels_ms"] = step_record.busy_ms(kernels)
    return found


def main() -> None:
    given = step_record.options(__doc__)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not given.tiny:
        sys.exit("add --tiny to measure small shapes on the CPU")
    torch.manual_seed(0)
    record = step_record.StepRecord("measure_prepared_losses", device)
    rows: list[dict[str, Any]] = []

    def add(op: str, shape: tuple[int, ...], calls: dict[str, Callable[[], None]]) -> None:
        rows.append({"op": op, "shape": shape, **measured(calls, device)})
        ours = {name: value for name, value in rows[-1].items() if isinstance(value, dict)}
        alone = ours["products"]["ms"]
        print(op, "x".join(map(str, shape)), flush=True)
        for name, value in ours.items():
            kernels = f"  kernels {value['kernels_ms']:.3f}" if "kernels_ms" in value else ""
            print(f"  {name:<14} {value['ms']:.3f} ms  {value['ms'] / alone:.3f} x products{kernels}", flush=True)
        record.write(given.json, rows=rows)

    for shape in TINY_SHAPES if given.tiny else SHAPES:
        add("linear_cross_entropy", shape, linear_calls(*shape, device))
    heads = TINY_HEADS if given.tiny else HEADS
    add("multi_head_linear_cross_entropy", heads, heads_calls(*heads, device))


if __name__ == "__main__":
    main()
