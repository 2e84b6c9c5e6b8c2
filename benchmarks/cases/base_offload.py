"""Measure `lora.base_offload`: equality with resident layers, peaks beside their plans, and the speed that it costs.

    python -m benchmarks base-offload --json RECORD                # on a GPU with 80 GB: about 5 minutes
    python -m benchmarks base-offload --row llama-3.1-70b-full     # one row; the host needs 80 GiB for it
    python -m benchmarks base-offload --row 24gb --row 48gb        # samples of the table "What fits" in README.md
    python -m benchmarks base-offload --row 48gb --plan            # only prints the plan, on any machine
    python -m benchmarks base-offload --tiny                       # small models, also without a GPU

A record that exists at `--json` gets the new lines, if the machine and the versions are the same.

Weights and tokens are random. Adapters have rank 16 and fp32 weights, under bf16 autocast, with fused AdamW. The device
draws and quantises one layer at a time, so that it never holds the model.

The row `equality` compares losses and gradients of Llama-3.2-1B, in bf16 and in NF4, with each kind of checkpointing,
between a model on the device and the same one with its layers on the host. The copies are also made late: a buffer is
NaN from the start of its copy, so that a use that does not wait gives NaN. Two runs on the device alone show how much
a GPU's own sums differ. On a CPU nothing differs.

The other rows are QLoRA steps of one sample. Those with a model in their name have 4,096 tokens. Those with a card in
their name have about the length that README.md says to fit on it. A step of at most 16,384 tokens compiles the kernels.
Then the allocator gets what the limit leaves beside the CUDA context and the kernels, and further steps warm up and are
timed. A step of more than 131,072 tokens has no warm-up of its length: its pinned memory is allocated and freed before
it, so that the step finds it. If the row says so, the same model is then measured without the limit and with all layers
on the device. A row that runs out of memory has the error instead of its figures. The line `link` is the rate of a copy
from pinned host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tigon
from benchmarks.cases.long_rows import limit_allocator, non_allocator_bytes
from benchmarks.cases.lora import TINY, USUAL, Trained, draw, store_in_nf4
from benchmarks.harness import Bench, Case, figures, times_ms
from benchmarks.pages import what_fits
from tigon._trunk import decoder_layers
from tigon.bench import timing
from tigon.bench.training.planned import gpu_of
from tigon.models.loading.presets import PRESETS
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.request import Request
from tigon.planner.simulate.allocator import has_expandable_segments
from tigon.techniques import TECHNIQUES
from tigon.techniques.base_offload.base_offload import KEY
from tigon.techniques.base_offload.streamed_layers import StreamedLayers
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

# Its types are incomplete, and mypy checks this file.
transformers = importlib.import_module("transformers")

EQUALITY = "equality"
LONGEST = 1 << 18
"""Positions of each model, so that rows may be longer than its checkpoint declares."""
REPEATED_TOKENS, COMPILING_TOKENS = 131072, 16384
"""A longer row has no warm-up of its length; the first step of each row has at most `COMPILING_TOKENS`."""
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
    seq: int = 4096
    rank: int = 16
    tiled: bool = False
    """MLPs in tiles and attention in groups, as in the table of README.md."""
    resident: bool = False
    """Whether the same model is also measured with all layers on the device."""


_8B = Row(model="llama-3.1-8b", checkpointing="full", limit_gib=8, steps=5, resident=True)
_70B = Row(model="llama-3.1-70b", checkpointing="full", limit_gib=24, steps=2, resident=True)
_32B = Row(model="qwen3-32b", checkpointing="full", limit_gib=16, steps=3, resident=True)


def _fits(card: str, seq: int, model: str = "llama-3.1-8b", **fields: Any) -> Row:
    """A row of README.md. card: its size in GB, as there."""
    limit_gib = find_gpu(what_fits.CARDS[card]).memory_bytes / GIB
    return Row(model=model, checkpointing="offload", limit_gib=limit_gib, steps=1, seq=seq, rank=32, **fields)


ROWS = {
    "llama-3.1-8b-full": _8B,
    "llama-3.1-8b-offload": dataclasses.replace(_8B, checkpointing="offload"),
    "qwen3-32b-full": _32B,
    "qwen3-32b-offload": dataclasses.replace(_32B, checkpointing="offload"),
    "llama-3.1-70b-full": _70B,
    "llama-3.1-70b-offload": dataclasses.replace(_70B, checkpointing="offload"),
    # An H100 has about 0.2 GiB more outside the allocator than the plans count. On 8 GB that costs tokens.
    "8gb": _fits("8 GB", 14336, resident=True),
    "8gb-tiles": _fits("8 GB", 24576, tiled=True),
    "12gb": _fits("12 GB", 36096),
    "16gb": _fits("16 GB", 55168),
    "24gb": _fits("24 GB", 92160, resident=True),
    "48gb": _fits("48 GB", 237056),
    "16gb-32b": _fits("16 GB", 21248, "qwen3-32b"),
    "24gb-70b": _fits("24 GB", 30336, "llama-3.1-70b"),
}
DEFAULT = (EQUALITY, "llama-3.1-8b-full", "llama-3.1-8b-offload", "qwen3-32b-full", "llama-3.1-70b-full")


# --- models -----------------------------------------------------------------------------------------------------------


def config_of(model: str, tiny: bool) -> Any:
    small = TINY | {"num_hidden_layers": 5}  # odd, so that the first and the last layer share a buffer
    config = transformers.AutoConfig.for_model(**{**PRESETS[model], **(small if tiny else {})})
    config.use_cache = False
    config.max_position_embeddings = max(config.max_position_embeddings, LONGEST)
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
    """Median step and peaks, after a warm-up unless the sample is very long."""
    tokens = trained.ids_BT.numel()
    if tokens > REPEATED_TOKENS:
        pin(trained)
    bench.free()
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
    warm_ups = int(tokens <= REPEATED_TOKENS)
    found = figures(timing.time_steps(trained.step, bench.device, steps=count, warm_ups=warm_ups), tokens)
    if bench.gpu:
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["non_allocator_bytes"] = non_allocator_bytes()
        found["pinned_bytes"] = torch.cuda.memory.host_memory_stats().get("active_bytes.current")
    return found


def compile_kernels(trained: Trained) -> None:
    """A step that is not measured. It makes AdamW's states too."""
    whole, trained.ids_BT = trained.ids_BT, trained.ids_BT[:, :COMPILING_TOKENS]
    trained.step()
    trained.ids_BT = whole


def pin(trained: Trained) -> None:
    """Let PyTorch's cache of pinned memory hold a block for the input of each layer."""
    if trained.device.type == "cuda":
        shape = (*trained.ids_BT.shape, trained.model.config.hidden_size)
        layers = range(trained.model.config.num_hidden_layers)
        blocks = [torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for _ in layers]
        blocks.clear()


def settings_of(row: Row, config: Any, **changes: Any) -> Settings:
    settings = USUAL.having(
        {"lora.quantize": True, "lora.rank": row.rank, "train.checkpointing": row.checkpointing, **changes}
    )
    if row.tiled:
        groups = config.num_key_value_heads
        settings = settings.having({"train.mlp_tile_tokens": 4096, "train.attention_groups": groups})
    return settings


def plan(bench: Bench, model: str, config: Any, shape: tuple[int, int], settings: Settings) -> dict[str, Any]:
    request = Request(model=model, config=config, batch=shape[0], seq=shape[1], settings=settings, masked=False)
    gpu = gpu_of(bench.device) if bench.gpu else find_gpu("h100")
    found = estimate(request, gpu=gpu, evaluation=False)
    return {
        "peak_bytes": found.peak_allocated_bytes,
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
        "ms": 1e3 * found.step_s,
    }


def line_of(bench: Bench, name: str) -> tuple[dict[str, Any], Any]:
    """Returns the part of a line that describes its row, and the model's config."""
    row = ROWS[name]
    config, seq = config_of(row.model, bench.tiny), 64 if bench.tiny else row.seq
    about = {"row": name, "model": row.model, "checkpointing": row.checkpointing, "rank": row.rank, "tiled": row.tiled}
    about |= {"batch": 1, "seq": seq, "limit_bytes": int(row.limit_gib * GIB)}
    return about | {"expandable_segments": has_expandable_segments()}, config


def print_plans(bench: Bench, name: str) -> None:
    """The plans of a row, without a measurement."""
    row = ROWS[name]
    line, config = line_of(bench, name)
    for on_host in (True, False) if row.resident else (True,):
        settings = settings_of(row, config, **{KEY: on_host})
        predicted = plan(bench, row.model, config, (1, line["seq"]), settings)
        print(json.dumps({**line, KEY: on_host, **predicted}), flush=True)


def measured(bench: Bench, name: str) -> dict[str, Any]:
    """One line: steps with the layers on the host and, if the row says so, on the device, beside their plans."""
    row = ROWS[name]
    line, config = line_of(bench, name)
    shape, settings = (1, line["seq"]), settings_of(row, config)
    predicted = plan(bench, row.model, config, shape, settings.having({KEY: True}))
    trained = trained_on_host(config, settings, shape, bench.device)
    begin_s = time.perf_counter()
    streamed = StreamedLayers(trained.model, decoder_layers(trained.model), bench.device)
    line["to_host_s"] = time.perf_counter() - begin_s
    line["layers_bytes"] = sum(layer.nbytes for layer in streamed.layers)
    compile_kernels(trained)
    bench.free()
    if bench.gpu:
        line["allocator_limit_bytes"] = limit_allocator(line["limit_bytes"])
    line["on_host"] = steps(bench, trained, row.steps) | {"predicted": predicted}
    no_limit(bench)
    bench.add("steps", line)
    if row.resident:
        streamed.undo()
        line["resident"] = steps(bench, trained, row.steps)
        line["resident"]["predicted"] = plan(bench, row.model, config, shape, settings)
        line["speed"] = line["resident"]["ms"] / line["on_host"]["ms"]
        print(f"without the key: {json.dumps(line['resident'])}", flush=True)
        bench.save()
    return line


def no_limit(bench: Bench) -> None:
    if bench.gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)


def attempted(bench: Bench, name: str) -> None:
    """`measured`, or a line with the error of a row that ran out of memory."""
    try:
        measured(bench, name)
    except torch.OutOfMemoryError as error:
        no_limit(bench)
        lines = bench.fields.get("steps", [])
        if lines and lines[-1]["row"] == name and "on_host" in lines[-1]:
            lines[-1]["resident"] = {"error": str(error)}
            bench.save()
        else:
            bench.add("steps", {**line_of(bench, name)[0], "error": str(error)})


def link(bench: Bench) -> dict[str, Any]:
    """Gigabytes per second of a copy from pinned host memory."""
    nbytes = 2**16 if bench.tiny else 2**30
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.gpu)
    there = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    ms = times_ms({"copy": lambda: there.copy_(host, non_blocking=True)}, bench.device)["copy"]
    timing.free_flush_buffer()  # 256 MiB, which would count in the peaks and under the limits
    return {"gb_per_s": nbytes / ms / 1e6}


def measure(bench: Bench) -> None:
    if bench.given.plan:
        for name in bench.given.row or DEFAULT:
            if name != EQUALITY:
                print_plans(bench, name)
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        bench.refuse("4-bit weights need bitsandbytes: pip install bitsandbytes")
    if not bench.gpu and not bench.tiny:
        bench.refuse("needs a GPU; add --tiny to run small shapes on the CPU, or --plan")
    bench.resume("steps", choosing=("row",))
    bench.add("link", link(bench))
    for name in bench.given.row or DEFAULT:
        if name == EQUALITY:
            equalities(bench)
        else:
            attempted(bench, name)
        bench.free()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--row", action="append", choices=(EQUALITY, *ROWS), help="may be repeated; default: " + ", ".join(DEFAULT)
    )
    parser.add_argument("--plan", action="store_true", help="only print the plans")


CASE = Case(measure=measure, options=options, packages=("peft", "bitsandbytes"), needs_gpu=False)
