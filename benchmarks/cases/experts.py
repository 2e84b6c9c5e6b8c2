"""Measure a layer of experts, and the router that serves it, forward and backward.

    python -m benchmarks experts --json RECORD
    python -m benchmarks experts --part router         the router alone
    python -m benchmarks experts --sonicmoe            transformers' "sonicmoe" too, if its kernels can be loaded
    python -m benchmarks experts --tiny                a small layer, also without a GPU

errors    tigon, transformers' grouped_mm and its eager loop against the fp64 formula, on a small layer in bf16.
layers    their times and peaks in turns. The eager loop waits for the host to read which experts are chosen.
kernels   the kernels of tigon's forward and backward, by name.
router    Qwen3-MoE's router (a product, softmax, top-k, normalisation) and the load-balancing loss of 48 layers, by
          transformers' code and by tigon's ops, beside one layer of `tigon.experts`. `host_us` is the time in which
          Python has called everything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from benchmarks.harness import Bench, Case, host_us, kernels_of, peaks_bytes, times_ms
from tigon.bench.numerical_errors import relative_error
from tigon.integrations import experts as registered
from tigon.ops import experts, load_balancing_loss, topk_softmax

IMPLEMENTATIONS = ("tigon", "grouped_mm", "eager")
PARTS = ("errors", "layers", "kernels", "router")
LAYERS = 48


@dataclass(frozen=True)
class Shape:
    """One layer of experts."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


CHECK = Shape("check", 16, 4, 256, 192)
SHAPES = (
    Shape("sonicmoe", 64, 4, 2560, 1280),
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    Shape("mixtral-8x7b", 8, 2, 4096, 14336),
)
"""The first is the shape whose time SonicMoE published for an H100: 8.446 ms for 16,384 tokens."""
TOKENS = {"sonicmoe": (16384,)}
TINY = (Shape("tiny", 4, 2, 32, 24),)


def config_of(shape: Shape) -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )


def layer(shape: Shape, device: torch.device) -> Any:
    """transformers' module with random bf16 weights; Mixtral's experts have the same layout as Qwen3's."""
    with device:
        module = qwen3_moe.Qwen3MoeExperts(config_of(shape)).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def routed(shape: Shape, tokens: int, skewed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
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


def drawn(shape: Shape, tokens: int, skewed: bool, device: torch.device) -> tuple[Any, tuple[Tensor, ...], Tensor]:
    """(module, inputs, upstream gradient)."""
    torch.manual_seed(0)
    module = layer(shape, device)
    index, weights = routed(shape, tokens, skewed, device)
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    inputs = (hidden, index, weights.bfloat16().requires_grad_())
    return module, inputs, torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)


def errors(names: list[str], device: torch.device) -> dict[str, list[float]]:
    """Relative errors against fp64: output, then gradients of hidden, weights, gate_up and down."""
    module, inputs, dy = drawn(CHECK, 500, True, device)
    got = {name: step(module, name, inputs, dy) for name in names}
    hidden, index, weights = inputs
    exact = (hidden.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_())
    truth = step(module.double(), "eager", exact, dy.double())
    return {name: [relative_error(a, b) for a, b in zip(one, truth, strict=True)] for name, one in got.items()}


def measure_layer(names: list[str], shape: Shape, tokens: int, skewed: bool, device: torch.device) -> dict[str, Any]:
    module, inputs, dy = drawn(shape, tokens, skewed, device)
    calls = {name: partial(step, module, name, inputs, dy) for name in names}
    medians = times_ms(calls, device)
    flops = 18 * tokens * shape.top_k * shape.hidden * shape.inner
    return {
        "shape": asdict(shape),
        "tokens": tokens,
        "skewed": skewed,
        "median_ms": medians,
        "tflops": {name: flops / ms / 1e9 for name, ms in medians.items()},
        "peak_bytes": peaks_bytes(calls, device),
    }


def measure_kernels(shape: Shape, tokens: int, device: torch.device) -> dict[str, Any]:
    module, inputs, dy = drawn(shape, tokens, False, device)
    for _ in range(2):
        step(module, "tigon", inputs, dy)
    found = kernels_of(lambda: step(module, "tigon", inputs, dy), device)
    return {"shape": shape.name, "tokens": tokens, **found}


def measure_router(shape: Shape, tokens: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    router = qwen3_moe.Qwen3MoeTopKRouter(config_of(shape)).to(device, torch.bfloat16)
    torch.nn.init.normal_(router.weight, std=0.02)
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    logits, weights, index = router(hidden)
    d_weights, module = torch.randn_like(weights), layer(shape, device)
    dy, fixed = torch.randn_like(hidden), weights.detach()
    gates = tuple(torch.randn_like(logits).requires_grad_() for _ in range(LAYERS))

    def route_by_tigon() -> Any:
        found, _ = topk_softmax(F.linear(hidden, router.weight), shape.top_k, normalised=True)
        return torch.autograd.grad(found, [hidden, router.weight], d_weights)

    def serve() -> Any:
        out = experts(hidden, index, fixed, module.gate_up_proj, module.down_proj)
        return torch.autograd.grad(out, [hidden, *module.parameters()], dy)

    def balance() -> Any:
        return torch.autograd.grad(qwen3_moe.load_balancing_loss_func(gates, shape.experts, shape.top_k), gates)

    calls: dict[str, Callable[[], Any]] = {
        "router": lambda: torch.autograd.grad(router(hidden)[1], [hidden, router.weight], d_weights),
        "router by tigon": route_by_tigon,
        "experts": serve,
        f"balance of {LAYERS} layers": balance,
        f"balance of {LAYERS} layers by tigon": lambda: torch.autograd.grad(
            load_balancing_loss(gates, shape.top_k), gates
        ),
    }
    medians = times_ms(calls, device)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "median_ms": medians,
        "host_us": {name: host_us(call, device, medians[name]) for name, call in calls.items()},
    }


def measure(bench: Bench) -> None:
    names = [name for name in IMPLEMENTATIONS if name not in bench.given.without]
    names += ["sonicmoe"] if bench.given.sonicmoe else []
    parts = bench.given.part or PARTS
    registered.register()
    if "errors" in parts:
        bench.add("errors", errors(names, bench.device))
    shapes = TINY if bench.tiny else [one for one in SHAPES if one.name in (bench.given.shape or (one.name,))]
    for shape in shapes:
        for tokens in (64,) if bench.tiny else TOKENS.get(shape.name, (4096, 32768)):
            for skewed in (False, True) if "layers" in parts else ():
                bench.add("layers", measure_layer(names, shape, tokens, skewed, bench.device))
            if "kernels" in parts:
                bench.add("kernels", measure_kernels(shape, tokens, bench.device))
            if "router" in parts:
                bench.add("router", measure_router(shape, tokens, bench.device))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    shapes = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", action="append", choices=shapes, help="only this shape; may be repeated")
    parser.add_argument("--without", action="append", default=[], choices=IMPLEMENTATIONS, help="may be repeated")
    parser.add_argument("--sonicmoe", action="store_true", help="measure transformers' implementation of SonicMoE too")


CASE = Case(measure=measure, options=options)
