"""Measure a training loop of one's own under `tigon.plan` and `tigon.checkpoint`, beside the plan.

    python -m benchmarks own-loop --json RECORD                    # on a GPU with 80 GB: about 3 minutes
    python -m benchmarks own-loop --row 1b-64x1024-17gib           # one row
    python -m benchmarks own-loop --tiny                           # small models, also without a GPU

A row is a model, the samples and tokens of a step, and the memory that the plan may take. Each row runs as the planner
chooses, and with and without CUDA graphs. Rows with `lora` train adapters of rank 16 on 8 layers over frozen bf16
weights, rows with `qlora` over NF4. Weights and tokens are random, in bf16, with fused AdamW. The first two steps are
not counted.

The rows `liger-full-...` train the same model and tokens with Liger's kernels and transformers' checkpointing of every
layer, in one batch. They come last, because Liger also changes functions of transformers' modules.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

import tigon
from benchmarks.cases.lora import TINY, dense, four_bit
from benchmarks.harness import Bench, Case
from tigon.bench import timing
from tigon.models.loading.config import load_config

STEPS, WARM_UPS = 6, 2
LAYERS = 8
"""The layers of the models whose adapters are trained."""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Row:
    """One loop."""

    model: str
    batch: int
    seq: int
    memory: str
    adapters: str = ""
    """"", "lora" or "qlora"."""
    liger: bool = False
    """Whether Liger trains it, without a plan."""


ROWS = {
    "1b-64x1024-17gib": Row("llama-3.2-1b", 64, 1024, "17GiB"),
    "1b-64x1024-24gib": Row("llama-3.2-1b", 64, 1024, "24GiB"),
    "1b-4x1024": Row("llama-3.2-1b", 4, 1024, "70GiB"),
    **{
        f"8b-{kind}-{tokens}": Row("llama-3.1-8b", 1, tokens, "70GiB", kind)
        for kind in ("lora", "qlora")
        for tokens in (512, 2048, 8192)
    },
    "liger-full-1b-64x1024": Row("llama-3.2-1b", 64, 1024, "", liger=True),
}


def model_of(row: Row, device: torch.device, *, tiny: bool) -> Any:
    config = load_config(row.model)
    changes = {"num_hidden_layers": LAYERS} if row.adapters else {}
    config.update({**changes, **(TINY if tiny else {}), "use_cache": False})
    model = (four_bit if row.adapters == "qlora" else dense)(config, device)
    if row.adapters:
        peft = importlib.import_module("peft")
        adapters = peft.LoraConfig(r=16, target_modules=LINEAR)
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if row.liger:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        tigon.patch(model)
    return model.train()


def steps(model: Any, batch: int, ids: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """The time, peak and losses of the loop. batch: samples of a micro-batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    times, losses = [], []
    for number in range(STEPS):
        if number == WARM_UPS and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in ids.split(batch):
            loss = model(input_ids=part, labels=part).loss * (batch / len(ids))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))  # waits for the GPU
        times.append(1e3 * (time.perf_counter() - began))
    ms = statistics.median(times[WARM_UPS:])
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"ms": ms, "tokens_per_s": 1e3 * ids.numel() / ms, "peak_bytes": peak, "losses": losses, "all_ms": times}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", action="append", choices=list(ROWS), help="only these rows; repeat it for several")


def measure(bench: Bench) -> None:
    for name in bench.given.row or ROWS:
        row = ROWS[name]
        model = model_of(row, bench.device, tiny=bench.tiny)
        seq = 32 if bench.tiny else row.seq
        ids = torch.randint(0, model.config.vocab_size, (row.batch, seq), device=bench.device)
        if row.liger:
            bench.add("loops", {"row": name, "checkpointing": "full", **steps(model, row.batch, ids, bench.device)})
            del model
            timing.release(bench.device)
            continue
        chosen = None
        for how in (None, True, False) if bench.gpu else (False,):  # a CPU has no CUDA graphs
            if how is not None and how == chosen:
                continue
            plan = tigon.plan(model, batch=row.batch, seq=seq, optimizer="adamw", memory=row.memory, cuda_graphs=how)
            chosen = plan.cuda_graphs if how is None else chosen
            applied = tigon.checkpoint(model, plan)
            measured = steps(model, plan.batch, ids, bench.device)
            applied.undo()
            choice = {
                "checkpointing": plan.checkpointing,
                "micro_batches": plan.accumulate,
                "cuda_graphs": plan.cuda_graphs,
                "fusion": plan.accumulation_fusion,
            }
            planned = {"ms": 1e3 * plan.step_s, "peak_bytes": plan.peak_allocated_bytes}
            bench.add("loops", {"row": name, "asked_graphs": how, **choice, "planned": planned, **measured})
            timing.release(bench.device)
        del model, applied
        gc.collect()


CASE = Case(measure=measure, options=options, packages=("peft", "bitsandbytes"))
