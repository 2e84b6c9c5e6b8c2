"""The share of a router in a layer of experts: its time, forward and backward, beside that of the experts it serves.

    python -m benchmarks.measure_router --json RECORD     # on a GPU, about 20 seconds
    python -m benchmarks.measure_router --tiny            # a small layer, also without a GPU

Three parts are timed. Qwen3-MoE's router has a product, softmax, top-k and normalisation. The load-balancing loss
covers all layers. One layer of `tigon.experts` has the gradients of a full fine-tuning. The first two are transformers'
code and tigon's ops. `host_ms` is the time in which Python has called everything, without waiting for the GPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from benchmarks import measure_experts, step_record
from tigon.ops import experts, load_balancing_loss, topk_softmax

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TURNS, WARM_UPS, CALLS, LAYERS = 10, 3, 10, 48


def timed_ms(run: Callable[[], Any]) -> float:
    """The median time of a call, from the GPU's clock; calls follow each other without waiting."""
    times: list[float] = []
    for turn in range(WARM_UPS + TURNS):
        if DEVICE.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                run()
            end.record()
            torch.cuda.synchronize()
            ms = begin.elapsed_time(end) / CALLS
        else:
            start_s = time.perf_counter()
            run()
            ms = 1e3 * (time.perf_counter() - start_s)
        if turn >= WARM_UPS:
            times.append(ms)
    return statistics.median(times)


def host_ms(run: Callable[[], Any]) -> float:
    """The median time of a call until it returns; the GPU finishes before the next one."""
    times: list[float] = []
    for _ in range(WARM_UPS + TURNS):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times[WARM_UPS:])


def measure(shape: measure_experts.Shape, tokens: int) -> dict[str, Any]:
    """Milliseconds of each part for one shape."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden, moe_intermediate_size=shape.inner, num_experts=shape.experts,
        num_experts_per_tok=shape.top_k, norm_topk_prob=True,
    )  # fmt: skip
    router = Qwen3MoeTopKRouter(config).to(DEVICE, torch.bfloat16)
    torch.nn.init.normal_(router.weight, std=0.02)
    hidden = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    logits, weights, index = router(hidden)
    d_weights = torch.randn_like(weights)
    layer = measure_experts.layer(shape, torch.bfloat16, str(DEVICE))
    leaves = [hidden, *layer.parameters()]
    dy, fixed = torch.randn_like(hidden), weights.detach()
    gates = tuple(torch.randn_like(logits).requires_grad_() for _ in range(LAYERS))

    def route() -> Any:
        return torch.autograd.grad(router(hidden)[1], [hidden, router.weight], d_weights)

    def route_by_tigon() -> Any:
        scores = torch.nn.functional.linear(hidden, router.weight)
        found, _ = topk_softmax(scores, shape.top_k, normalised=True)
        return torch.autograd.grad(found, [hidden, router.weight], d_weights)

    def serve() -> Any:
        out = experts(hidden, index, fixed, layer.gate_up_proj, layer.down_proj)
        return torch.autograd.grad(out, leaves, dy)

    def balance() -> Any:
        return torch.autograd.grad(load_balancing_loss_func(gates, shape.experts, shape.top_k), gates)

    def balance_by_tigon() -> Any:
        return torch.autograd.grad(load_balancing_loss(gates, shape.top_k), gates)

    return {
        "shape": shape.name, "tokens": tokens, "router_ms": timed_ms(route),
        "router_by_tigon_ms": timed_ms(route_by_tigon), "router_host_ms": host_ms(route),
        "router_by_tigon_host_ms": host_ms(route_by_tigon), "experts_ms": timed_ms(serve),
        "balance_ms_per_layer": timed_ms(balance) / LAYERS,
        "balance_by_tigon_ms_per_layer": timed_ms(balance_by_tigon) / LAYERS,
    }  # fmt: skip


def main() -> None:
    given = step_record.options(__doc__)
    record, rows = step_record.StepRecord("measure_router", DEVICE), []
    for shape in measure_experts.TINY if given.tiny else measure_experts.SHAPES:
        for tokens in (64,) if given.tiny else (4096, 32768):
            rows.append(measure(shape, tokens))
            print(json.dumps(rows[-1]), flush=True)
            record.write(given.json, rows=rows)


if __name__ == "__main__":
    main()
