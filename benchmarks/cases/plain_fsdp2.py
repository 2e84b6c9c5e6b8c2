"""Measure FSDP2 without tigon: transformers' own model in a plain loop, as torchtitan divides it.

    torchrun --nproc-per-node 2 -m benchmarks plain-fsdp2 --json RECORD
    torchrun --nproc-per-node 2 -m benchmarks plain-fsdp2 --tiny         a check of the script on a CPU

It is the baseline of `tigon sweep recipes/two-gpus.sweep.yaml`: Llama-3.1-8B, 8 random samples of 512 tokens per GPU,
bf16 weights and states, full checkpointing, `fully_shard` per layer, fused AdamW, clipped gradients.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import Bench, Case, figures
from tigon.bench import timing
from tigon.models.loading.presets import PRESETS

BATCH, SEQ, STEPS, WARM_UPS = 8, 512, 5, 3


def divided(preset: str, device: torch.device) -> Any:
    """The model with random bf16 weights, each layer of which is one FSDP2 unit."""
    config = transformers.AutoConfig.for_model(**PRESETS[preset])
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    timing.release(device)
    return model


def trained(preset: str, rank: int, device: torch.device, *, batch: int, seq: int, steps: int) -> timing.Steps:
    """Train random samples in the process group that exists, and time `steps` steps after the warm-ups.

    Args:
        preset: Name of the model.
        rank: This process's number, which seeds its samples.
        device: Its device.
        batch: Samples per step in each process.
        seq: Tokens per sample.
        steps: How many steps are timed.
    """
    model = divided(preset, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(model.config.vocab_size, (WARM_UPS + steps, batch, seq), generator=draw).to(device)

    def step(number: int) -> torch.Tensor:
        loss = model(input_ids=ids[number], labels=ids[number], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return timing.time_steps(step, device, steps=steps, warm_ups=WARM_UPS)


def measure(bench: Bench) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if bench.tiny else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    bench.writes = rank == 0
    batch, seq = (2, 32) if bench.tiny else (BATCH, SEQ)
    preset = "tigon-demo" if bench.tiny else "llama-3.1-8b"
    timed = trained(preset, rank, device, batch=batch, seq=seq, steps=STEPS)
    ranks = dist.get_world_size()
    bench.add("rows", {"processes": ranks, "batch": batch, "seq": seq, **figures(timed, ranks * batch * seq)})
    dist.destroy_process_group()


CASE = Case(measure=measure)
