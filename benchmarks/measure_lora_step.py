"""A LoRA step of Llama-3.1-8B: tokens per second and peak memory with PEFT's layers and with tigon's fused ones.

    python -m benchmarks.measure_lora_step --json RECORD     # on the GPU: about 3 minutes
    python -m benchmarks.measure_lora_step --json RECORD --quantised    # 4-bit weights alone: about 90 s
    python -m benchmarks.measure_lora_step --tiny            # a small model on the CPU, to see that it runs

4 x 2048 tokens, random weights, rank 16 on all layers, fp32 adapters under bf16 autocast, AdamW. The frozen weights are
bf16, or 4-bit if bitsandbytes is installed. Both versions run under `tigon.patch`; only its flag `lora` differs. They
take turns, twice. The record is written after each line, so that a run that is ended leaves what it measured.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import tigon
from benchmarks import step_record

# Their types are incomplete, and mypy checks this file.
peft, transformers = (importlib.import_module(name) for name in ("peft", "transformers"))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS, STEPS, WARM_UP_STEPS = 2, 5, 2
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TINY_SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def quantise(model: Any) -> None:
    """Replace the layers' weights by 4-bit ones, as transformers does for `load_in_4bit`."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, layer in list(parent.named_children()):
                if type(layer) is torch.nn.Linear:
                    stored = bitsandbytes.nn.Linear4bit(
                        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16,
                        compress_statistics=True, quant_type="nf4",
                    )  # fmt: skip
                    stored.weight = bitsandbytes.nn.Params4bit(
                        layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
                    )
                    setattr(parent, name, stored.to(DEVICE))
    model.is_loaded_in_4bit = True


def adapted(tiny: bool, four_bit: bool) -> Any:
    """The model with its adapters, whose second matrices are not 0."""
    config = transformers.LlamaConfig(
        **(TINY_SIZES if tiny else SIZES), max_position_embeddings=8192, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if four_bit:
        quantise(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=MODULES))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)
    return model


def timed(model: Any, ids_BT: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The median time of a step, and the peak."""
    gpu = DEVICE == "cuda"
    times_s = []
    for step in range(WARM_UP_STEPS + STEPS):
        if gpu and step == WARM_UP_STEPS:
            torch.cuda.reset_peak_memory_stats()
        start_s = time.perf_counter()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    median_s = sorted(times_s[WARM_UP_STEPS:])[STEPS // 2]
    return {
        "ms": round(median_s * 1e3, 1), "tokens_per_s": round(ids_BT.numel() / median_s),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if gpu else 0.0, "loss": float(loss.detach()),
    }  # fmt: skip


def kernel_times(model: Any, ids_BT: torch.Tensor, most: int = 16) -> list[dict[str, Any]]:
    """The kernels of one step that take the most time: name, calls, ms of all calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.cuda.synchronize()
    model.zero_grad()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {"name": event.key[:80], "calls": event.count, "ms": round(event.self_device_time_total / 1e3, 2)}
        for event in events[:most]
    ]


def measure(tiny: bool, four_bit: bool, keep: Callable[[dict[str, Any]], None]) -> None:
    """Both versions without and with activation checkpointing. keep: gets each line when it is measured."""
    model = adapted(tiny, four_bit)
    batch, seq = (2, 32) if tiny else (4, 2048)
    ids_BT = torch.randint(0, model.config.vocab_size, (batch, seq), device=DEVICE)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=DEVICE == "cuda")
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        for round_ in range(ROUNDS):
            for layers, fused in (("peft", False), ("tigon", None)):
                report = tigon.patch(model, lora=fused)
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
                line: dict[str, Any] = {
                    "weights": "4-bit" if four_bit else "bf16", "checkpointing": checkpointing, "layers": layers,
                    **timed(model, ids_BT, optimizer),
                }  # fmt: skip
                print(json.dumps(line), flush=True)
                if DEVICE == "cuda" and not checkpointing and round_ == ROUNDS - 1:
                    line["kernels"] = kernel_times(model, ids_BT)
                keep(line)
                report.undo()


def main() -> None:
    given = step_record.options(
        __doc__, lambda p: p.add_argument("--quantised", action="store_true", help="measure 4-bit weights alone")
    )
    has_4_bit = importlib.util.find_spec("bitsandbytes") is not None
    if given.quantised and not has_4_bit:
        raise SystemExit("--quantised needs bitsandbytes")
    packages = ("peft", "bitsandbytes") if has_4_bit else ("peft",)
    record = step_record.StepRecord("measure_lora_step", torch.device(DEVICE), packages)
    lines: list[dict[str, Any]] = []

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        record.write(given.json, measurements=lines)

    for four_bit in [kind for kind in (True, False) if (has_4_bit if kind else not given.quantised)]:
        measure(given.tiny, four_bit, keep)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
