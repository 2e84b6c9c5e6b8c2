"""FP8 on the GPU: errors of the products, times of casts and products, of a layer's linear modules, and of a step.

    python -m benchmarks.measure_fp8 --json RECORD                # on the GPU: about 3 minutes
    python -m benchmarks.measure_fp8 --part steps --json RECORD   # one part
    python -m benchmarks.measure_fp8 --tiny                       # small shapes, also on the CPU, to see that it runs

Parts:

errors    `fp8_linear` against fp64 products of the same rounded factors, and against the unrounded formula.
kernels   amax, the casts in GB/s, and one product in bf16 and in FP8 with each scaling and both ways to sum.
casts     each cast of a layer right after its input was written, with several tiles, with and without masks, and from
          the first tile or from the last; times are those of many calls, less the writing.
linears   forward and backward of each linear module of a layer, bf16 and FP8 in turns, and torchao's if installed.
steps     a training step in bf16 and FP8 in turns, with its peak memory and the planner's prediction; on a GPU also
          with CUDA graphs of the layers (`train.cuda_graphs`).

The record is written after each part.

The proof that training converges alike is two runs of `tigon train`, whose eval losses the reports hold:

    tigon train recipes/quickstart.yaml --set train.steps=1000 --set train.precision=bf16 --set output.name=bf16
    tigon train recipes/quickstart.yaml --set train.steps=1000 --set train.precision=fp8 --set output.name=fp8
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from benchmarks import step_record
from tigon.kernels import fp8 as fp8_kernels
from tigon.ops import OPS, known_amax
from tigon.ops.linear.fp8 import SCALINGS, fp8_amax, fp8_cast, fp8_product, operand
from tigon.planner.estimate import estimate
from tigon.planner.gpus import find_gpu
from tigon.planner.request import Request
from tigon.techniques import cuda_graphs
from tigon.techniques.checkpointing import enable, replace_function
from tigon.techniques.keys.settings import Settings
from tigon.techniques.mechanisms.recompute import recomputed

transformers = importlib.import_module("transformers")  # its types are incomplete, and mypy checks this file

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS, STEPS, WARM_UP_STEPS = 2, 5, 2
SEARCHING = "fp8 tensorwise searching"
"""As `fp8 tensorwise`, but every FP8 layer looks for the largest magnitudes of its factors, and casts use masks and
begin with the first tile."""
# (precision, with CUDA graphs)
VARIANTS = (
    ("bf16", False), *((f"fp8 {scaling}", False) for scaling in SCALINGS), (SEARCHING, False), ("bf16", True),
    ("fp8 tensorwise", True),
)  # fmt: skip
# name -> (input width, output width) of Llama-3.1-8B's layer, and of a small one.
SHAPES = {"qo": (4096, 4096), "kv": (4096, 1024), "gate-up": (4096, 14336), "down": (14336, 4096)}
TINY_SHAPES = {"qo": (64, 64), "down": (128, 64)}
# name -> (preset, batch, sequence length, activation checkpointing)
RUNS = {"1b": ("llama-3.2-1b", 16, 1024, "none"), "8b": ("llama-3.1-8b", 16, 512, "full")}


# name -> (rows, columns, by rows, by columns): casts of Llama-3.2-1B and Llama-3.1-8B
CASTS = {
    "1b input": (16384, 2048, True, True), "1b gated": (16384, 8192, True, True),
    "1b weight": (8192, 2048, True, False), "1b weight, backward": (8192, 2048, False, True),
    "8b input, first run": (8192, 4096, True, False), "8b gradient": (8192, 14336, True, True),
    "8b weight": (14336, 4096, True, True),
}  # fmt: skip
TINY_CASTS = {"tiny": (256, 256, True, True)}
TILES = ((64, 128, 8), (128, 128, 8), (128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 4))
CASTS_IN_A_ROW = 20

PARTS = ("errors", "kernels", "casts", "linears", "steps", "predictions")


def median_ms(call: Callable[[], Any], repeats: int = 15) -> float:
    """The median time of a call, with the GPU's own clock."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        if DEVICE == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin_s = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin_s) * 1e3)
    return float(round(sorted(times)[repeats // 2], 4))


def factors(tokens: int, H: int, F_: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and dy in bf16."""
    torch.manual_seed(0)
    x = torch.randn(tokens, H, device=DEVICE).bfloat16()
    weight = (torch.randn(F_, H, device=DEVICE) * H**-0.5).bfloat16()
    return x, weight, torch.randn(tokens, F_, device=DEVICE).bfloat16()


def relative_error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


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
                    "shape": name, "tokens": tokens, "scaling": scaling, "result": kind, "error": own,
                    "baseline_error": of_baseline, "within_the_rule": own <= 2 * of_baseline,
                    "error_with_rounding": relative_error(got[number], unrounded[number]),
                    "error_of_bf16": relative_error(plain[number], unrounded[number]),
                }  # fmt: skip


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(shapes: dict[str, tuple[int, int]], tokens: int) -> Iterator[dict[str, Any]]:
    for name, (H, F_) in shapes.items():
        x, weight, _ = factors(tokens, H, F_)
        flops = 2 * tokens * H * F_
        out = torch.empty(tokens, F_, dtype=torch.bfloat16, device=DEVICE)
        ms = median_ms(lambda x=x, weight=weight, out=out: torch.mm(x, weight.t(), out=out))  # type: ignore[misc]
        yield {"shape": name, "kernel": "product bf16", "ms": ms, "tflops": flops / ms / 1e9}
        for scaling in SCALINGS:
            rowwise = scaling == "rowwise"
            amax = fp8_amax(x, rowwise)
            ms = median_ms(lambda x=x, rowwise=rowwise: fp8_amax(x, rowwise))  # type: ignore[misc]
            yield {"shape": name, "kernel": f"amax {scaling}", "ms": ms, "gb_s": x.nbytes / ms / 1e6}
            for rows, columns in ((True, False), (False, True), (True, True)):
                what = "+".join(word for word, on in (("rows", rows), ("transposed", columns)) if on)
                ms = median_ms(
                    lambda x=x, amax=amax, r=rowwise, a=rows, b=columns: fp8_cast(x, amax, r, a, b, False)  # type: ignore[misc]
                )
                moved_bytes = x.nbytes + (rows + columns) * x.numel()
                yield {"shape": name, "kernel": f"cast {scaling} {what}", "ms": ms, "gb_s": moved_bytes / ms / 1e6}
            a, b = (operand(t, scaling, rows=True, columns=False) for t in (x, weight))
            for fast in (True, False):
                ms = median_ms(
                    lambda a=a, b=b, fast=fast: fp8_product(  # type: ignore[misc]
                        a.rows, b.rows, a.row_scales, b.row_scales, None, [a.rows.shape[0]], torch.bfloat16, fast
                    )
                )
                word = "fast" if fast else "fp32"
                yield {"shape": name, "kernel": f"product {scaling} {word}", "ms": ms, "tflops": flops / ms / 1e9}


# --- casts, right after a write ---------------------------------------------------------------------------------------


def casts(shapes: dict[str, tuple[int, int, bool, bool]]) -> Iterator[dict[str, Any]]:
    before = fp8_kernels.BLOCK_M, fp8_kernels.BLOCK_K, fp8_kernels.WARPS
    for name, (M, K, rows, columns) in shapes.items():
        source = torch.randn(M, K, device=DEVICE).bfloat16()
        x, amax = torch.empty_like(source), fp8_amax(source, False)

        def repeated(cast: bool, x: Tensor = x, source: Tensor = source) -> float:
            def call() -> None:
                for _ in range(CASTS_IN_A_ROW):
                    x.copy_(source)
                    if cast:
                        fp8_cast(x, amax, False, rows, columns, False)  # noqa: B023

            return median_ms(call, 7) / CASTS_IN_A_ROW

        write_ms = repeated(False)
        for tile, (whole, last_first) in itertools.product(TILES, ((False, False), (True, False), (True, True))):
            fp8_kernels.BLOCK_M, fp8_kernels.BLOCK_K, fp8_kernels.WARPS = tile
            fp8_kernels.WHOLE_TILES, fp8_kernels.LAST_FIRST = whole, last_first
            ms = repeated(True) - write_ms
            moved_bytes = x.nbytes + (rows + columns) * x.numel()
            yield {
                "cast": name, "tile": tile, "whole_tiles": whole, "last_first": last_first, "ms": round(ms, 5),
                "gb_s": moved_bytes / ms / 1e6 if ms > 0 else None,
            }  # fmt: skip
    fp8_kernels.BLOCK_M, fp8_kernels.BLOCK_K, fp8_kernels.WARPS = before
    fp8_kernels.WHOLE_TILES = fp8_kernels.LAST_FIRST = True


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
        calls: dict[str, Callable[[Tensor], Tensor]] = {"bf16": lambda a, w=own: F.linear(a, w)}  # type: ignore[misc]
        for scaling in SCALINGS:
            calls[f"fp8 {scaling}"] = lambda a, w=own, s=scaling: tigon.fp8_linear(a, w, scaling=s)  # type: ignore[misc]
        if importlib.util.find_spec("torchao") is not None and DEVICE == "cuda":
            for scaling in SCALINGS:
                calls[f"torchao {scaling}"] = torchao_linear(H, F_, weight.clone(), scaling)
        for turn in range(ROUNDS):
            for what, call in calls.items():
                ms = median_ms(lambda call=call, x=x, dy=dy: call(x).backward(dy))  # type: ignore[misc]
                yield {"shape": name, "tokens": tokens, "linear": what, "round": turn, "ms": ms}


# --- steps ------------------------------------------------------------------------------------------------------------


def built(preset: str, tiny: bool) -> Any:
    from tigon.models.loading.presets import PRESETS

    shape = dict(PRESETS["tigon-demo" if tiny else preset])
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    tigon.patch(model)
    return model


def timed(model: Any, ids_BT: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    times_s = []
    for number in range(WARM_UP_STEPS + STEPS):
        if DEVICE == "cuda" and number == WARM_UP_STEPS:
            torch.cuda.reset_peak_memory_stats()
        start_s = time.perf_counter()
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    median_s = sorted(times_s[WARM_UP_STEPS:])[STEPS // 2]
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    return {
        "ms": median_s * 1e3, "tokens_per_s": ids_BT.numel() / median_s, "peak_gib": peak_gib, "loss": loss.item(),
    }  # fmt: skip


def predicted(preset: str, batch: int, seq: int, settings: Settings) -> dict[str, float]:
    from tigon.models.loading.presets import PRESETS

    shape = dict(PRESETS[preset])
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    request = Request(model=preset, config=config, batch=batch, seq=seq, settings=settings, masked=False)
    plan = estimate(request, gpu=find_gpu("h200"))
    return {"predicted_ms": plan.step_s * 1e3, "predicted_peak_gib": plan.peak_allocated_bytes / 2**30}


def prepared(model: Any, precision: str, checkpointing: str, graphs: bool) -> Callable[[], None]:
    """Set the model up for a variant. Returns the function that undoes it."""
    scaling = next((word for word in precision.split() if word in SCALINGS), None)
    parts_for = known_amax.parts_for
    cast = fp8_kernels.WHOLE_TILES, fp8_kernels.LAST_FIRST
    if precision == SEARCHING:
        known_amax.parts_for = lambda x, tensors: None
        fp8_kernels.WHOLE_TILES = fp8_kernels.LAST_FIRST = False
    report = tigon.patch_fp8(model, scaling=scaling) if scaling else None
    layer_graphs = cuda_graphs.graph(model, recomputes=checkpointing == "full") if graphs else None
    if checkpointing == "full" and not graphs:
        enable(model)
        replace_function(model, recomputed)

    def undo() -> None:
        known_amax.parts_for = parts_for
        fp8_kernels.WHOLE_TILES, fp8_kernels.LAST_FIRST = cast
        model.gradient_checkpointing_disable()
        if layer_graphs is not None:
            layer_graphs.release()
        if report is not None:
            report.undo()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    return undo


def steps(tiny: bool) -> Iterator[dict[str, Any]]:
    for name, (preset, batch, seq, checkpointing) in RUNS.items():
        batch, seq = (2, 64) if tiny else (batch, seq)
        model = built(preset, tiny)
        model.train()
        ids_BT = torch.randint(0, model.config.vocab_size, (batch, seq), device=DEVICE)
        # A learning rate of 0: every turn then trains the same weights.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=DEVICE == "cuda")
        variants = [variant for variant in VARIANTS if DEVICE == "cuda" or not variant[1]]
        for turn, (precision, graphs) in itertools.product(range(ROUNDS), variants):
            undo = prepared(model, precision, checkpointing, graphs)
            line = {"run": name, "precision": precision, "cuda_graphs": graphs, "round": turn}
            line |= timed(model, ids_BT, optimizer)
            undo()
            yield line
        del model, optimizer
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def predictions(tiny: bool) -> Iterator[dict[str, Any]]:
    """The planner's time and peak of each step; it does not know CUDA graphs."""
    if tiny:
        return
    for name, (preset, batch, seq, checkpointing) in RUNS.items():
        for precision in ("bf16", *(f"fp8 {scaling}" for scaling in SCALINGS)):
            kind, _, scaling = precision.partition(" ")
            options = {"train.fp8_scaling": scaling} if scaling else {}
            settings = Settings.of({"train.precision": kind, "train.checkpointing": checkpointing, **options})
            yield {"run": name, "precision": precision, **predicted(preset, batch, seq, settings)}


def main() -> None:
    given = step_record.options(
        __doc__,
        lambda parser: parser.add_argument(
            "--part", action="append", choices=PARTS, help="only this part; may be repeated"
        ),
    )
    packages = ("torchao",) if importlib.util.find_spec("torchao") is not None else ()
    record = step_record.StepRecord("measure_fp8", torch.device(DEVICE), packages)
    shapes, tokens = (TINY_SHAPES, 48) if given.tiny else (SHAPES, 8192)
    parts = {
        # fp64 products of 8192 tokens take a minute.
        "errors": errors(shapes, min(tokens, 1024)), "kernels": kernels(shapes, tokens),
        "casts": casts(TINY_CASTS if given.tiny else CASTS),
        "linears": linears(shapes, tokens), "steps": steps(given.tiny), "predictions": predictions(given.tiny),
    }  # fmt: skip
    if given.part:
        parts = {part: parts[part] for part in given.part}
    lines: dict[str, list[dict[str, Any]]] = {}
    for part, measurements in parts.items():
        lines[part] = []
        for line in measurements:
            lines[part].append(line)
            print(part, json.dumps(line), flush=True)
        record.write(given.json, **lines)


if __name__ == "__main__":
    main()
