"""LoRA of Qwen3-30B-A3B by shape on one GPU: tokens/s and peak of a training step, with the planner's prediction.

    python -m benchmarks.measure_experts_lora --json RECORD     # on a GPU with 80 GB, about 2 minutes
    python -m benchmarks.measure_experts_lora --profile --only attention --batch 4    # the kernels of a step
    python -m benchmarks.measure_experts_lora --tiny            # a small model, also without a GPU

1 x 4096 tokens, random bf16 weights, adapters of rank 16 in fp32 under bf16 autocast, full activation checkpointing,
fused AdamW. The adapters are on the linear layers of attention, or on the weights of the experts. Three versions of
the same model take turns:

    transformers   grouped_mm, with PEFT's adapters; nothing of tigon
    grouped_mm     tigon.patch(experts=False): tigon's other ops, the experts as in transformers
    tigon          tigon.patch: the experts as one op

PEFT forms the weights of all experts plus their adapters' products in each forward pass.

With --profile, one more step of each version is recorded. Its `busy_ms` is the time in which the GPU ran a kernel. The
rest of the step waits for the CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from typing import Any

import torch

import tigon
from benchmarks import step_record
from tigon.bench.training.planned import gpu_of
from tigon.errors import TigonError
from tigon.models.loading.presets import PRESETS
from tigon.planner.request import Request
from tigon.planner.search.option import estimate_option
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.records.technique import RunInfo

# Its types are incomplete, and mypy checks this file.
transformers = importlib.import_module("transformers")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TURNS, STEPS, WARM_UPS, SECONDS = 4, 3, 1, 100
TARGETS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "experts": ("experts",)}
VERSIONS = ("transformers", "grouped_mm", "tigon")
TINY = {
    "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def made(tiny: bool) -> Any:
    """The model with random bf16 weights, drawn on the device."""
    shape = {**PRESETS["qwen3-30b-a3b"], **(TINY if tiny else {})}
    config = transformers.AutoConfig.for_model(**shape)
    config.use_cache = False
    initialization = importlib.import_module("transformers.initialization")
    with initialization.no_init_weights(), DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)
    model.set_experts_implementation("grouped_mm")
    return model


def settings_of(target: str, kernels: str) -> Settings:
    """The run as the planner knows it."""
    return Settings.of({
        "train.precision": "amp-bf16", "train.optimizer": "adamw", "model.kernels": kernels,
        "train.checkpointing": "full", "lora.rank": 16,
        "lora.targets": TARGETS[target],
    })  # fmt: skip


def step(model: Any, ids_BT: torch.Tensor, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """(milliseconds, loss) of one optimizer step."""
    gpu = DEVICE.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    count = torch.tensor(ids_BT.numel() - len(ids_BT), device=DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss = model(input_ids=ids_BT, labels=ids_BT, num_items_in_batch=count, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start_s), float(loss.detach())


def patched(model: Any, version: str) -> Any:
    """The report whose `undo` gives the model back; None for the version without tigon."""
    if version == "transformers":
        return None
    return tigon.patch(model, experts=None if version == "tigon" else False)


def profiled(model: Any, ids_BT: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The kernels of one step: how many there are, how long the GPU was busy, and the longest by name."""
    activities = [getattr(torch.profiler.ProfilerActivity, DEVICE.type.upper())]
    with torch.profiler.profile(activities=activities) as profile:
        ms, _ = step(model, ids_BT, optimizer)
    kernels = step_record.device_kernels(profile.events())
    return {
        "ms": ms, "busy_ms": step_record.busy_ms(kernels), "launches": len(kernels),
        "kernels": step_record.by_name(kernels),
    }  # fmt: skip


def measured(model: Any, target: str, given: argparse.Namespace, deadline_s: float) -> dict[str, Any]:
    """Median step, peak and loss of each version, with adapters on `target`."""
    adapted = TECHNIQUES["lora"].model(model, settings_of(target, "tigon"), RunInfo())  # as `tigon train` adds them
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.train()
    tigon.checkpoint(adapted, "full")
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=DEVICE.type == "cuda")
    batch, seq = (2, 32) if given.tiny else (given.batch, 4096)
    ids_BT = torch.randint(0, model.config.vocab_size, (batch, seq), device=DEVICE)
    times: dict[str, list[float]] = {version: [] for version in given.version}
    profiles: dict[str, dict[str, Any]] = {}
    peaks, losses = dict.fromkeys(given.version, 0), {}
    before_bytes = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    for turn in range(WARM_UPS + TURNS):
        if turn > WARM_UPS and time.monotonic() > deadline_s:
            break
        for version in given.version:
            report = patched(model, version)
            if DEVICE.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            for number in range(1 + STEPS):  # the first fills the allocator, which was emptied
                ms, losses[version] = step(adapted, ids_BT, optimizer)
                if turn >= WARM_UPS and number:
                    times[version].append(ms)
            if DEVICE.type == "cuda":
                peaks[version] = torch.cuda.max_memory_allocated()
            if given.profile and version not in profiles and turn >= WARM_UPS:
                profiles[version] = profiled(adapted, ids_BT, optimizer)
            if report is not None:
                report.undo()
    rows: dict[str, dict[str, Any]] = {}
    for version in given.version:
        median_ms = statistics.median(times[version])
        rows[version] = {
            "ms": median_ms, "tokens_per_s": 1e3 * ids_BT.numel() / median_ms, "peak_bytes": peaks[version],
            "last_loss": losses[version], "all_ms": times[version],
        } | ({"profile": profiles[version]} if version in profiles else {})  # fmt: skip
    for version, kernels in (("tigon", "tigon"), ("transformers", "none")):
        if version in rows:
            rows[version]["predicted"] = predicted(model.config, target, kernels, batch, seq)
    trained_count = sum(p.numel() for p in trained)
    return {
        "adapters": target, "batch": batch, "seq": seq, "trained": trained_count, "before_bytes": before_bytes,
        "versions": rows,
    }  # fmt: skip


def predicted(config: Any, target: str, kernels: str, batch: int, seq: int) -> dict[str, Any]:
    """The planner's peak and step for this run, or why it has none."""
    request = Request(
        model="qwen3-30b-a3b", config=config, batch=batch, seq=seq, settings=settings_of(target, kernels), masked=False
    )
    try:
        estimate = estimate_option(request, gpu_of(DEVICE)).estimate
    except TigonError as error:
        return {"detail": " ".join(str(error).split())[:200]}
    return {"peak_bytes": estimate.peak_allocated_bytes, "ms": 1e3 * estimate.step_s}


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", action="store_true", help="record the kernels of one step of each version")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows of 4096 tokens")
    parser.add_argument("--only", choices=TARGETS, action="append", help="adapters on these alone")
    parser.add_argument("--version", choices=VERSIONS, action="append", help="these versions alone")


def main() -> None:
    start_s = time.monotonic()
    given = step_record.options(__doc__, more_options)
    given.version = given.version or list(VERSIONS)
    targets = given.only or list(TARGETS)
    record = step_record.StepRecord("measure_experts_lora", DEVICE, ("peft",))
    rows = []
    for number, target in enumerate(targets):
        model = made(given.tiny)  # anew, so that nothing of the adapters before is left
        rows.append(measured(model, target, given, start_s + SECONDS * (number + 1) / len(TARGETS)))
        print(json.dumps(rows[-1]), flush=True)
        record.write(given.json, rows=rows)
        del model
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
