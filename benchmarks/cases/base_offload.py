"""Measure `lora.base_offload`: equality with resident layers, peaks beside their plans, and the speed that it costs.

    python -m benchmarks base-offload --json RECORD                # on a GPU with 80 GB: about 3 minutes
    python -m benchmarks base-offload --row llama-3.1-70b-full     # one row; the host needs 64 GiB for it
    python -m benchmarks base-offload --row qwen3-32b-full         # a row that runs only if it is named
    python -m benchmarks base-offload --row 8gb-24576 --row 24gb-98304    # long samples, beside docs/long-context.md
    python -m benchmarks base-offload --tiny                       # small models, also without a GPU

Weights and tokens are random. Adapters have rank 16 and fp32 weights, under bf16 autocast, with fused AdamW. The device
draws and quantises one layer at a time, so that it never holds the model.

The row `equality` compares losses and gradients of Llama-3.2-1B, in bf16 and in NF4, with each kind of checkpointing,
between a model on the device and the same one with its layers on the host. The copies are also made late: a buffer is
NaN from the start of its copy, so that a use that does not wait gives NaN. Two runs on the device alone show how much
a GPU's own sums differ. On a CPU nothing differs.

The other rows are QLoRA steps of one sample, of 4,096 tokens if the name has no other length. The allocator gets what
the limit leaves beside the CUDA context and the kernels. If the row says so, the same model is then measured without
the limit and with all layers on the device. The line `link` is the rate of a copy from pinned host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tigon
from benchmarks.cases.long_rows import limit_allocator
from benchmarks.cases.lora import TINY, USUAL, Trained, draw, store_in_nf4
from benchmarks.harness import Bench, Case, figures, times_ms
from tigon._trunk import decoder_layers
from tigon.bench import timing
from tigon.bench.training.planned import gpu_of
from tigon.models.loading.presets import PRESETS
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB
from tigon.planner.request import Request
from tigon.techniques import TECHNIQUES
from tigon.techniques.base_offload.base_offload import KEY
from tigon.techniques.base_offload.streamed_layers import StreamedLayers
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

# Its types are incomplete, and mypy checks this file.
transformers = importlib.import_module("transformers")

EQUALITY = "equality"
LATE_CYCLES = 5_000_000
"""GPU cycles that a late copy waits: about 3 ms."""
MICRO_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """QLoRA steps of one model whose layers are on the host. limit_gib: memory of the card that it stands for."""

    model: str
    checkpointing: str
    limit_gib: float
    steps: int
    tiled: bool = False
    """As in the table of README.md: adapters of rank 32, MLPs in tiles, attention in groups."""
    resident: bool = False
    """Whether the same model is also measured with all layers on the device."""
    seq: int = 4096


_8B = Row(model="llama-3.1-8b", checkpointing="full", limit_gib=8, steps=5, resident=True)
_LONG = Row(model="llama-3.1-8b", checkpointing="offload", limit_gib=23.5, steps=1, seq=98304, tiled=True)
ROWS = {
    "llama-3.1-8b-full": _8B,
    "llama-3.1-8b-offload": dataclasses.replace(_8B, checkpointing="offload"),
    "llama-3.1-70b-full": Row(model="llama-3.1-70b", checkpointing="full", limit_gib=24, steps=2),
    "qwen3-32b-full": Row(model="qwen3-32b", checkpointing="full", limit_gib=16, steps=3),
    "8gb-24576": dataclasses.replace(_LONG, limit_gib=7.45, steps=2, seq=24576),
    "24gb-98304": _LONG,
}
DEFAULT = (EQUALITY, "llama-3.1-8b-full", "llama-3.1-8b-offload", "llama-3.1-70b-full")


# --- models -----------------------------------------------------------------------------------------------------------


def config_of(model: str, tiny: bool) -> Any:
    small = TINY | {"num_hidden_layers": 5}  # odd, so that the first and the last layer share a buffer
    config = transformers.AutoConfig.for_model(**{**PRESETS[model], **(small if tiny else {})})
    config.use_cache = False
    return config


def on_host(config: Any, device: torch.device, *, nf4: bool) -> Any:
    """A model with random weights. Its decoder layers are on the CPU, and all else is on the device."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    torch.manual_seed(0)
    layers = decoder_layers(model)
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        if module not in inside:
            draw(module, device)
    for layer in layers:
        for module in layer.modules():
            draw(module, device)
        if nf4:
            store_in_nf4(layer, device)
        layer.to("cpu")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.is_loaded_in_4bit = nf4
    return model


def trained_on_host(config: Any, settings: Settings, shape: tuple[int, int], device: torch.device) -> Trained:
    model = on_host(config, device, nf4=settings.lora.quantize)
    ids_BT = torch.randint(0, config.vocab_size, shape, device=device)
    trained = Trained(model, settings, ids_BT)
    tigon.patch(model)
    for technique in (TECHNIQUES["tiled-mlp"], TECHNIQUES["grouped-attention"]):
        if technique.used_by(settings):
            technique.model(model, settings, RunInfo())
    return trained


# --- equality ---------------------------------------------------------------------------------------------------------


class LateCopies(StreamedLayers):
    """A buffer is NaN from the start of its copy, and on a GPU the copy is late."""

    def copied_in(self, host: Tensor, buffer: Tensor) -> Any:
        if self._stream is None:
            buffer.fill_(255)  # a NaN in each floating-point dtype
            return super().copied_in(host, buffer)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            buffer.fill_(255)
            torch.cuda._sleep(LATE_CYCLES)
        return super().copied_in(host, buffer)


def accumulated(trained: Trained) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of accumulated micro-batches with an evaluation after each, and the adapters' gradients."""
    trained.model.zero_grad()
    losses = []
    for _ in range(MICRO_BATCHES):
        loss = trained.loss()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            trained.model.eval()
            losses.append(trained.loss())
            trained.model.train()
    return losses, [p.grad.clone() for p in trained.parameters if p.grad is not None]


def difference(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> dict[str, Any]:
    """How many losses and gradients are not equal to the bit, and the largest relative error of a gradient."""
    counts = [sum(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(one, other, strict=True)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(one[1], other[1], strict=True)]
    return {"losses": counts[0], "gradients": counts[1], "largest_error": max(errors)}


def equality(bench: Bench, weights: str, checkpointing: str) -> dict[str, Any]:
    """One line: the model with its layers on the host, the same with late copies, and twice on the device."""
    config = config_of("llama-3.2-1b", bench.tiny)
    settings = USUAL.having({"train.checkpointing": checkpointing, "lora.quantize": weights == "nf4"})
    trained = trained_on_host(config, settings, (2, 64 if bench.tiny else 1024), bench.device)
    found = {}
    for name, kind in (("on_host", StreamedLayers), ("late_copies", LateCopies)):
        streamed = kind(trained.model, decoder_layers(trained.model), bench.device)
        found[name] = accumulated(trained)
        streamed.undo()
    without, again = accumulated(trained), accumulated(trained)
    return {
        "weights": weights,
        "checkpointing": checkpointing,
        "tensors": len(without[0]) + len(without[1]),
        "loss": float(without[0][0]),
        "loss_with_late_copies": float(found["late_copies"][0][0]),
        "finite_with_late_copies": all(bool(t.isfinite().all()) for part in found["late_copies"] for t in part),
        "differ": {name: difference(result, without) for name, result in found.items()}
        | {"without_twice": difference(again, without)},
    }


def equalities(bench: Bench) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for weights in ("bf16", "nf4"):
        for checkpointing in ("full", "none", "offload"):
            bench.add(EQUALITY, equality(bench, weights, checkpointing))
            bench.free()
    torch.use_deterministic_algorithms(False)


# --- steps ------------------------------------------------------------------------------------------------------------


def steps(bench: Bench, trained: Trained, count: int) -> dict[str, Any]:
    """Median step and peaks; the first step compiles and makes AdamW's states."""
    bench.free()
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
    found = figures(timing.time_steps(trained.step, bench.device, steps=count), trained.ids_BT.numel())
    if bench.gpu:
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["pinned_bytes"] = torch.cuda.memory.host_memory_stats().get("active_bytes.current")
    return found


def plan(bench: Bench, model: str, config: Any, shape: tuple[int, int], settings: Settings) -> dict[str, Any]:
    request = Request(model=model, config=config, batch=shape[0], seq=shape[1], settings=settings)
    found = estimate(request, gpu=gpu_of(bench.device), evaluation=False)
    return {
        "peak_bytes": found.peak_allocated_bytes,
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
        "ms": 1e3 * found.step_s,
    }


def measured(bench: Bench, name: str) -> dict[str, Any]:
    """One line: steps with the layers on the host and, if the row says so, on the device, beside their plans."""
    row = ROWS[name]
    config, shape = config_of(row.model, bench.tiny), (1, 64 if bench.tiny else row.seq)
    settings = USUAL.having({"lora.quantize": True, "train.checkpointing": row.checkpointing})
    if row.tiled:
        groups = config.num_key_value_heads
        settings = settings.having({"lora.rank": 32, "train.mlp_tile_tokens": 4096, "train.attention_groups": groups})
    trained = trained_on_host(config, settings, shape, bench.device)
    line: dict[str, Any] = {"row": name, "batch": shape[0], "seq": shape[1], "limit_bytes": int(row.limit_gib * GIB)}
    bench.free()
    if bench.gpu:
        line["allocator_limit_bytes"] = limit_allocator(line["limit_bytes"])
    begin_s = time.perf_counter()
    streamed = StreamedLayers(trained.model, decoder_layers(trained.model), bench.device)
    line["to_host_s"] = time.perf_counter() - begin_s
    line["layers_bytes"] = sum(layer.nbytes for layer in streamed.layers)
    line["on_host"] = steps(bench, trained, row.steps)
    line["on_host"]["predicted"] = plan(bench, row.model, config, shape, settings.having({KEY: True}))
    if bench.gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if row.resident:
        streamed.undo()
        line["resident"] = steps(bench, trained, row.steps)
        line["resident"]["predicted"] = plan(bench, row.model, config, shape, settings)
        line["speed"] = line["resident"]["ms"] / line["on_host"]["ms"]
    return line


def link(bench: Bench) -> dict[str, Any]:
    """Gigabytes per second of a copy from pinned host memory."""
    nbytes = 2**16 if bench.tiny else 2**30
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.gpu)
    there = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    ms = times_ms({"copy": lambda: there.copy_(host, non_blocking=True)}, bench.device)["copy"]
    timing.free_flush_buffer()  # 256 MiB, which would count in the peaks and under the limits
    return {"gb_per_s": nbytes / ms / 1e6}


def measure(bench: Bench) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        bench.refuse("4-bit weights need bitsandbytes: pip install bitsandbytes")
    bench.add("link", link(bench))
    for name in bench.given.row or DEFAULT:
        if name == EQUALITY:
            equalities(bench)
        else:
            bench.add("steps", measured(bench, name))
        bench.free()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--row", action="append", choices=(EQUALITY, *ROWS), help="may be repeated; default: " + ", ".join(DEFAULT)
    )


CASE = Case(measure=measure, options=options, packages=("peft", "bitsandbytes"))
