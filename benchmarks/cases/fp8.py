"""Measure FP8: errors of the products, times of casts and products, and of a layer's linear modules.

    python -m benchmarks fp8 --json RECORD                 # on the GPU: about 2 minutes
    python -m benchmarks fp8 --part linears --json RECORD  # one part
    python -m benchmarks fp8 --tiny                        # small shapes, also on the CPU, to see that it runs

errors    `fp8_linear` against fp64 products of the same rounded factors, and against the unrounded formula.
kernels   amax, the casts in GB/s, and one product in bf16 and in FP8 with each scaling and both ways to sum.
linears   forward and backward of each linear module of a layer, bf16 and FP8 in turns, and torchao's if installed.

`python -m benchmarks train` measures steps, e.g. `--variant tigon:none --variant tigon-fp8-tensorwise:none`. The proof
that training converges alike is two runs of `tigon train`, whose eval losses the reports hold:

    tigon train recipes/quickstart.yaml --set train.steps=1000 --set train.precision=bf16 --set output.name=bf16
    tigon train recipes/quickstart.yaml --set train.steps=1000 --set train.precision=fp8 --set output.name=fp8
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from benchmarks.harness import Bench, Case, times_ms
from tigon.bench.numerical_errors import relative_error
from tigon.ops import OPS
from tigon.ops.linear.fp8 import SCALINGS, fp8_amax, fp8_cast, fp8_product, operand

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# name -> (input width, output width) of Llama-3.1-8B's layer, and of a small one.
SHAPES = {"qo": (4096, 4096), "kv": (4096, 1024), "gate-up": (4096, 14336), "down": (14336, 4096)}
TINY_SHAPES = {"qo": (64, 64), "down": (128, 64)}


def factors(tokens: int, H: int, F_: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and dy in bf16."""
    torch.manual_seed(0)
    x = torch.randn(tokens, H, device=DEVICE).bfloat16()
    weight = (torch.randn(F_, H, device=DEVICE) * H**-0.5).bfloat16()
    return x, weight, torch.randn(tokens, F_, device=DEVICE).bfloat16()


def results(call: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dW."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = call(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy.to(y.dtype))
    return y.detach(), dx, dw


# --- errors -----------------------------------------------------------------------------------------------------------


def errors(shapes: dict[str, tuple[int, int]], tokens: int) -> Iterator[dict[str, Any]]:
    for name, (H, F_) in shapes.items():
        x, weight, dy = factors(tokens, H, F_)
        unrounded = results(F.linear, x.double(), weight.double(), dy.double())
        plain = results(F.linear, x, weight, dy)
        for scaling in SCALINGS:

            def rounded(a: Tensor, b: Tensor, scaling: str = scaling) -> Tensor:
                return OPS["fp8_linear"].oracle(a, b, scaling=scaling)  # type: ignore[no-any-return]

            def fused(a: Tensor, b: Tensor, scaling: str = scaling) -> Tensor:
                return tigon.fp8_linear(a, b, scaling=scaling)

            truth = results(rounded, x.double(), weight.double(), dy.double())
            baseline, got = results(rounded, x, weight, dy), results(fused, x, weight, dy)
            for kind, number in (("y", 0), ("dx", 1), ("dw", 2)):
                own, of_baseline = (relative_error(r[number], truth[number]) for r in (got, baseline))
                yield {
                    "shape": name,
                    "tokens": tokens,
                    "scaling": scaling,
                    "result": kind,
                    "error": own,
                    "baseline_error": of_baseline,
                    "within_the_rule": own <= 2 * of_baseline,
                    "error_with_rounding": relative_error(got[number], unrounded[number]),
                    "error_of_bf16": relative_error(plain[number], unrounded[number]),
                }


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(shapes: dict[str, tuple[int, int]], tokens: int) -> Iterator[dict[str, Any]]:
    for name, (H, F_) in shapes.items():
        x, weight, _ = factors(tokens, H, F_)
        flops, out = 2 * tokens * H * F_, torch.empty(tokens, F_, dtype=torch.bfloat16, device=DEVICE)
        calls: dict[str, Callable[[], Any]] = {"product bf16": lambda x=x, w=weight, o=out: torch.mm(x, w.t(), out=o)}  # type: ignore[misc]
        moved_bytes: dict[str, int] = {}
        for scaling in SCALINGS:
            rowwise = scaling == "rowwise"
            amax = fp8_amax(x, rowwise)
            calls[f"amax {scaling}"] = lambda x=x, rowwise=rowwise: fp8_amax(x, rowwise)  # type: ignore[misc]
            moved_bytes[f"amax {scaling}"] = x.nbytes
            for rows, columns in ((True, False), (False, True), (True, True)):
                what = f"cast {scaling} " + "+".join(
                    word for word, on in (("rows", rows), ("transposed", columns)) if on
                )
                calls[what] = lambda x=x, amax=amax, r=rowwise, a=rows, b=columns: fp8_cast(x, amax, r, a, b, False)  # type: ignore[misc]
                moved_bytes[what] = x.nbytes + (rows + columns) * x.numel()
            a, b = (operand(t, scaling, rows=True, columns=False) for t in (x, weight))
            for fast, word in ((True, "fast"), (False, "fp32")):
                calls[f"product {scaling} {word}"] = lambda a=a, b=b, fast=fast: fp8_product(  # type: ignore[misc]
                    a.rows, b.rows, a.row_scales, b.row_scales, None, [a.rows.shape[0]], torch.bfloat16, fast
                )
        for kernel, ms in times_ms(calls, DEVICE).items():
            moved = moved_bytes.get(kernel)
            rate = {"tflops": flops / ms / 1e9} if moved is None else {"gb_s": moved / ms / 1e6}
            yield {"shape": name, "kernel": kernel, "ms": ms, **rate}


# --- linear modules ---------------------------------------------------------------------------------------------------


def torchao_linear(H: int, F_: int, weight: Tensor, recipe: str) -> Callable[[Tensor], Tensor]:
    """torchao's module, compiled as torchao recommends."""
    float8 = importlib.import_module("torchao.float8")
    holder = nn.Sequential(nn.Linear(H, F_, bias=False, device=DEVICE, dtype=torch.bfloat16))
    holder[0].weight = nn.Parameter(weight)
    float8.convert_to_float8_training(holder, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    compiled: Callable[[Tensor], Tensor] = torch.compile(holder)
    return compiled


def linears(shapes: dict[str, tuple[int, int]], tokens: int) -> Iterator[dict[str, Any]]:
    for name, (H, F_) in shapes.items():
        x, weight, dy = factors(tokens, H, F_)
        x.requires_grad_()
        own = nn.Parameter(weight.clone())
        layers: dict[str, Callable[[Tensor], Tensor]] = {"bf16": lambda a, w=own: F.linear(a, w)}  # type: ignore[misc]
        for scaling in SCALINGS:
            layers[f"fp8 {scaling}"] = lambda a, w=own, s=scaling: tigon.fp8_linear(a, w, scaling=s)  # type: ignore[misc]
        if importlib.util.find_spec("torchao") is not None and DEVICE.type == "cuda":
            for scaling in SCALINGS:
                layers[f"torchao {scaling}"] = torchao_linear(H, F_, weight.clone(), scaling)
        calls = {what: lambda call=call, x=x, dy=dy: call(x).backward(dy) for what, call in layers.items()}
        for what, ms in times_ms(calls, DEVICE).items():
            yield {"shape": name, "tokens": tokens, "linear": what, "ms": ms}


PARTS = {"errors": errors, "kernels": kernels, "linears": linears}


def measure(bench: Bench) -> None:
    shapes, tokens = (TINY_SHAPES, 48) if bench.tiny else (SHAPES, 8192)
    for part in bench.given.part or PARTS:
        # fp64 products of 8192 tokens take a minute.
        for line in PARTS[part](shapes, min(tokens, 1024) if part == "errors" else tokens):
            bench.add(part, line)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")


CASE = Case(measure=measure, options=options, packages=("torchao",))
