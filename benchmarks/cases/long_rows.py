"""Measure one training step of one long row, with memory limited, beside its plan.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python -m benchmarks long-rows --json RECORD                       # Llama-3.2-1B in 24 GiB; about 4 minutes
    python -m benchmarks long-rows --model llama-3.1-8b --limit 79 --row 131072:offload-attention
    python -m benchmarks long-rows --tiny                              # a small model, also on the CPU

A row is TOKENS:KIND, the length of the sample and `train.checkpointing`. A step is the model's forward and backward
pass, clipping and fused AdamW. Weights, gradients and AdamW's states are bf16 and stay on the GPU. MLPs are computed in
tiles and attention's backward pass in groups of heads. The limit is for the whole process: PyTorch's allocator gets
what the CUDA context and the kernels leave.

Before each step, the states are made, and the first layer alone runs once on the same row. This compiles the kernels,
and it shows within seconds if a layer does not fit. Rows of up to 131,072 tokens take two steps.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from typing import Any

import torch
import transformers

import tigon
from benchmarks.harness import Bench, Case
from tigon.bench import timing
from tigon.bench.training.planned import gpu_of
from tigon.models.loading.config import load_config
from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.request import Request
from tigon.planner.simulate.allocator import ALLOCATOR_SETTINGS, has_expandable_segments
from tigon.techniques import TECHNIQUES
from tigon.techniques.head_groups import key_heads
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

ROWS = ("131072:offload", "131072:offload-attention", "524288:offload-attention")
TINY_ROWS = ("300:offload", "300:offload-attention")
TILE_TOKENS = 4096
REPEATED_TOKENS = 131072
"""A step of a longer row is measured once, because it takes minutes."""


def groups_of(config: Any) -> int:
    """Two groups for each key head, if it has an even number of query heads."""
    heads = key_heads(config)
    return 2 * heads if config.num_attention_heads % (2 * heads) == 0 else heads


def request_of(name: str, tokens: int, kind: str, *, tiny: bool) -> Request:
    config = load_config("tigon-demo" if tiny else name)
    if tiny:
        config.num_hidden_layers, config.vocab_size = 3, 256
    config.max_position_embeddings = max(config.max_position_embeddings, tokens)
    settings = Settings.of(
        {
            "train.precision": "bf16",
            "train.optimizer": "adamw",
            "train.checkpointing": kind,
            "train.mlp_tile_tokens": 128 if tiny else TILE_TOKENS,
            "train.attention_groups": groups_of(config),
        }
    )
    return Request(model=name, config=config, batch=1, seq=tokens, settings=settings)


class Training:
    """A model of a request with its techniques, and an optimizer whose states exist."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        request.config.use_cache = False
        with device:
            self.model: Any = transformers.AutoModelForCausalLM.from_config(
                request.config, dtype=torch.bfloat16
            ).train()
        tigon.patch(self.model)
        names = ("tiled-mlp", "grouped-attention", f"checkpointing-{request.settings.train.checkpointing}")
        for technique in (TECHNIQUES[name] for name in names):
            if technique.used_by(request.settings):
                assert technique.model is not None
                technique.model(self.model, request.settings, RunInfo())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, request.config.vocab_size, (1, request.seq), generator=draw).to(device)

    def rehearse(self) -> None:
        """A forward and backward pass of the first layer alone."""
        layers = self.model.model.layers
        self.model.model.layers = layers[:1]
        self.model.config.num_hidden_layers = 1
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.model.model.layers, self.model.config.num_hidden_layers = layers, len(layers)
        self.optimizer.zero_grad(set_to_none=True)
        timing.synchronize(self.device)

    def step(self) -> dict[str, Any]:
        norms: list[Any] = []

        def one(_number: int) -> torch.Tensor:
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()  # type: ignore[no-any-return]

        timed = timing.time_steps(one, self.device, steps=1, warm_ups=0)
        found = {"step_s": timed.ms[0] / 1e3, "loss": timed.losses[0], "gradient_norm": float(norms[0])}
        if self.device.type == "cuda":
            found["peak_allocated_bytes"] = timed.peak_bytes or 0
            found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
            found["non_allocator_bytes"] = non_allocator_bytes()
        return found


def non_allocator_bytes() -> int:
    """The GPU's memory that is in use outside PyTorch's allocator."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()


def limit_allocator(limit_bytes: int) -> int:
    """Let the allocator use what the limit leaves, and return it."""
    left_bytes = limit_bytes - non_allocator_bytes()
    total_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, left_bytes / total_bytes))
    return left_bytes


def row_for(request: Request, plan: Estimate, limit_bytes: int, device: torch.device) -> dict[str, Any]:
    """One row: its plan and its measurement, or the error if it ran out of memory."""
    row: dict[str, Any] = {
        "model": request.model,
        "tokens": request.seq,
        "checkpointing": request.settings.train.checkpointing,
        "mlp_tile_tokens": request.settings.train.mlp_tile_tokens,
        "attention_groups": request.settings.train.attention_groups,
        "limit_bytes": limit_bytes,
        "predicted": {
            "peak_allocated_bytes": plan.peak_allocated_bytes,
            "device_bytes": plan.device_bytes,
            "host_bytes": plan.host_bytes,
            "step_s": plan.step_s,
        },
    }
    try:
        training = Training(request, device)
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        begin_s = time.perf_counter()
        training.rehearse()
        row["rehearsal_s"] = time.perf_counter() - begin_s
        if device.type == "cuda":
            timing.release(device)
            row["rehearsal_peak_bytes"] = torch.cuda.max_memory_allocated()
            row["allocator_limit_bytes"] = limit_allocator(limit_bytes)
        # The first whole step also allocates the pinned memory of all layers.
        row["steps"] = [training.step() for _ in range(2 if request.seq <= REPEATED_TOKENS else 1)]
        row["measured"] = row["steps"][-1]
    except torch.OutOfMemoryError as error:
        row["error"] = str(error)
    return row


def line(row: dict[str, Any]) -> str:
    head = f"{row['model']} {row['tokens']:,} {row['checkpointing']:<18}"
    predicted, measured = row["predicted"], row.get("measured")
    if measured is None:
        return f"{head} planned {predicted['peak_allocated_bytes'] / GIB:.2f} GiB; {row['error']}"
    text = f"{head} step {predicted['step_s']:.1f} -> {measured['step_s']:.1f} s  loss {measured['loss']:.4f}"
    if "peak_allocated_bytes" not in measured:
        return text
    device_bytes = measured["peak_reserved_bytes"] + measured["non_allocator_bytes"]
    return (
        f"{text}  allocated {predicted['peak_allocated_bytes'] / GIB:.2f} -> "
        f"{measured['peak_allocated_bytes'] / GIB:.2f} GiB  whole process {predicted['device_bytes'] / GIB:.2f} -> "
        f"{device_bytes / GIB:.2f} of {row['limit_bytes'] / GIB:.2f} GiB"
    )


def plan_line(request: Request, plan: Estimate) -> str:
    return (
        f"{request.model} {request.seq:,} {request.settings.train.checkpointing:<18} {plan.step_s:.1f} s  allocated "
        f"{plan.peak_allocated_bytes / GIB:.2f} GiB  whole process {plan.device_bytes / GIB:.2f} GiB  "
        f"host {plan.host_bytes / GIB:.1f} GiB"
    )


def measure(bench: Bench) -> None:
    given = bench.given
    if not bench.gpu and not (bench.tiny or given.plan):
        bench.refuse(f"{given.model} needs a GPU; add --tiny to measure a small model on the CPU, or --plan")
    if not has_expandable_segments():
        if bench.gpu:
            bench.refuse(f"set {ALLOCATOR_SETTINGS}=expandable_segments:True")
        os.environ[ALLOCATOR_SETTINGS] = "expandable_segments:True"  # the plans of a GPU that has them
    limit_bytes = int(given.limit * GIB)
    gpu = replace(gpu_of(bench.device) if bench.gpu else find_gpu("h100"), memory_bytes=limit_bytes)
    for text in given.row or (TINY_ROWS if bench.tiny else ROWS):
        tokens, _, kind = text.partition(":")
        request = request_of(given.model, int(tokens), kind, tiny=bench.tiny)
        plan = estimate(request, gpu=gpu, evaluation=False)
        if given.plan:
            print(plan_line(request, plan))
            continue
        row = row_for(request, plan, limit_bytes, bench.device)
        bench.add("rows", row, line(row))
        bench.free()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.2-1b", help="a preset; default llama-3.2-1b")
    parser.add_argument("--limit", type=float, default=24.0, metavar="GIB", help="memory; default 24")
    parser.add_argument("--row", action="append", metavar="TOKENS:KIND", help="default: " + ", ".join(ROWS))
    parser.add_argument("--plan", action="store_true", help="only print the plans")


CASE = Case(measure=measure, options=options, needs_gpu=False)
