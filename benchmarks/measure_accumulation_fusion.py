"""Gradient accumulation fusion: its errors, then the time and the peak of a step with and without it.

    python -m benchmarks.measure_accumulation_fusion --json RECORD     # on the GPU: about 2 minutes
    python -m benchmarks.measure_accumulation_fusion --graphs          # the same inside CUDA graphs of the layers
    python -m benchmarks.measure_accumulation_fusion --tiny            # a small model on the CPU, to see that it runs

First the gradients of three micro-batches are compared with fp64, with 2 layers of the model. An error above twice the
usual one ends the script with exit code 1. Then Llama-3.2-1B's shape takes steps of 8 micro-batches of 8 x 1024 tokens,
with AdamW and `tigon.patch`: in bf16 and under autocast, without and with activation checkpointing. Steps with and
without fusion take turns, in one model. The record is written after each of these four runs. The planner's predictions
come last, because they take longer than the steps.

With `--graphs` (`train.cuda_graphs`) the steps have 64 x 1024 tokens in bf16, in micro-batches of 4 and 8 samples.
Two models with the same parameters take turns, because a graph contains the fusion or not. Their peak is that of both,
so it is not recorded: `tigon bench train --variant tigon-graphs:none@4 --variant tigon-graphs-fused:none@4` measures
each alone. On the CPU a replay runs the layer again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tigon
from benchmarks import step_record
from benchmarks.eager_capture import eager_capture
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.planner.estimate import estimate
from tigon.planner.gpus import row_of
from tigon.planner.request import Request
from tigon.techniques import cuda_graphs
from tigon.techniques.checkpointing import enable
from tigon.techniques.keys.settings import Settings
from tigon.techniques.mechanisms.fused_embedding import fuse_embeddings
from tigon.techniques.mechanisms.fused_linear import fuse_linears
from tigon.techniques.mechanisms.layer_graphs import CudaCapture, LayerGraphs

transformers = importlib.import_module("transformers")  # its types are incomplete, and mypy checks this file

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS, WARM_UP_ROUNDS, MICRO_BATCHES = 3, 1, 8
# (precision, checkpointing)
RUNS = (("bf16", "none"), ("bf16", "full"), ("amp-bf16", "none"), ("amp-bf16", "full"))
# (micro-batches of a step, samples of a micro-batch, checkpointing) of steps in graphs, all in bf16
GRAPH_RUNS = ((16, 4, "none"), (8, 8, "none"), (16, 4, "full"))
TINY_GRAPH_RUNS = ((3, 2, "none"), (3, 2, "full"))
SIZES = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
TINY_SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = {False: (8, 1024), True: (2, 32)}
"""Whether the model is the small one -> samples and tokens of a micro-batch."""
MOST_TIMES_THE_USUAL_ERROR = 2.0


def config_of(tiny: bool, **changes: Any) -> Any:
    sizes = {**(TINY_SIZES if tiny else SIZES), **changes}
    return transformers.LlamaConfig(**sizes, max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False)


def model_of(config: Any, dtype: torch.dtype, *, fused: bool = True) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config)
    model.to(dtype).train()
    tigon.patch(model)
    if fused:
        fuse_linears(model)
        fuse_embeddings(model)
    return model


def put_in_graphs(model: Any, checkpointing: str) -> LayerGraphs:
    new_capture = CudaCapture if DEVICE.type == "cuda" else lambda: eager_capture
    return cuda_graphs.graph(model, recomputes=checkpointing == "full", new_capture=new_capture)


def run_micro_batches(model: Any, batches: list[Tensor], *, fused: bool, autocast: bool) -> float:
    """The forward and backward passes of one step; returns the last loss."""
    loss = torch.zeros(())
    for ids_BT in batches:
        with accumulation_fusion() if fused else contextlib.nullcontext():
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids_BT, labels=ids_BT).loss / len(batches)
            loss.backward()
    return float(loss.detach()) * len(batches)


def batches_of(config: Any, count: int, batch: int, seq: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, config.vocab_size, (batch, seq), generator=generator).to(DEVICE) for _ in range(count)
    ]  # fmt: skip


# --- errors -----------------------------------------------------------------------------------------------------------


def gradients(
    config: Any, state: dict[str, Tensor], batches: list[Tensor], *, fused: bool, precision: str, graphs: bool = False
) -> Any:
    dtype = {"bf16": torch.bfloat16, "amp-bf16": torch.float32, "fp64": torch.float64}[precision]
    model = model_of(config, dtype, fused=fused)
    model.load_state_dict(state)
    if graphs:
        put_in_graphs(model, "none")
    run_micro_batches(model, batches, fused=fused, autocast=precision.startswith("amp"))
    return {name: p.grad.double().cpu() for name, p in model.named_parameters()}


def errors(tiny: bool, graphs: bool) -> list[dict[str, Any]]:
    """For each precision and kind of head the parameter whose error grows most."""
    lines = []
    for tied in (True, False):
        config = config_of(tiny, num_hidden_layers=2, tie_word_embeddings=tied)
        batches = batches_of(config, 3, 2, 32 if tiny else 512)
        state = model_of(config, torch.bfloat16).state_dict()
        exact = gradients(config, state, batches, fused=False, precision="fp64")
        for precision in ("bf16", "amp-bf16"):
            found = {
                fused: gradients(config, state, batches, fused=fused, precision=precision, graphs=graphs)
                for fused in (False, True)
            }
            ratios = {}
            for name, want in exact.items():
                usual, got = (float((found[fused][name] - want).norm() / want.norm()) for fused in (False, True))
                ratios[name] = (got / max(usual, 1e-9), usual, got)
            worst = max(ratios, key=lambda name: ratios[name][0])
            ratio, usual, got = ratios[worst]
            lines.append({
                "tied": tied, "precision": precision, "parameter": worst, "times_the_usual_error": round(ratio, 3),
                "usual_error": usual, "error": got,
            })  # fmt: skip
            print(json.dumps(lines[-1]), flush=True)
    return lines


# --- steps ------------------------------------------------------------------------------------------------------------


def predicted(tiny: bool, precision: str, checkpointing: str, fused: bool) -> dict[str, float]:
    """The planner's peak and time of such a step; empty without a GPU."""
    if DEVICE.type != "cuda":
        return {}
    config, (batch, seq) = config_of(tiny), SHAPE[tiny]
    properties = torch.cuda.get_device_properties(DEVICE)
    settings = Settings.of(
        {
            "train.precision": precision,
            "train.checkpointing": checkpointing,
            "train.gradient_accumulation": MICRO_BATCHES,
            "train.gradient_accumulation_fusion": fused,
        }
    )
    request = Request(model="llama", config=config, batch=batch, seq=seq, settings=settings, clipped=False)
    plan = estimate(request, gpu=row_of(properties.name, properties.total_memory), evaluation=False)
    return {
        "predicted_peak_gib": round(plan.peak_allocated_bytes / 2**30, 2), "predicted_ms": round(plan.step_s * 1e3, 1)
    }  # fmt: skip


class Timed(NamedTuple):
    """The steps of one variant."""

    median_s: float
    loss: float
    peak_bytes: int
    """0 without a GPU."""


def _in_turns(models: Mapping[bool, Any], batches: Any, optimizer: Any, *, autocast: bool) -> dict[bool, Timed]:
    """Steps without and with fusion in turns. models: whether to fuse -> the model, all with the same parameters."""
    gpu = DEVICE.type == "cuda"
    times_s: dict[bool, list[float]] = {fused: [] for fused in models}
    peaks_bytes, losses = dict.fromkeys(models, 0), dict.fromkeys(models, 0.0)
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        for fused, model in models.items():
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start_s = time.perf_counter()
            losses[fused] = run_micro_batches(model, batches, fused=fused, autocast=autocast)
            optimizer.step()
            optimizer.zero_grad()
            if gpu:
                torch.cuda.synchronize()
                peaks_bytes[fused] = max(peaks_bytes[fused], torch.cuda.max_memory_allocated())
            if number >= WARM_UP_ROUNDS:
                times_s[fused].append(time.perf_counter() - start_s)
    return {fused: Timed(sorted(times_s[fused])[ROUNDS // 2], losses[fused], peaks_bytes[fused]) for fused in models}


def steps(tiny: bool, precision: str, checkpointing: str) -> list[dict[str, Any]]:
    """The median time of a step and its peak, without and with fusion."""
    config = config_of(tiny)
    model = model_of(config, torch.bfloat16 if precision == "bf16" else torch.float32)
    if checkpointing == "full":
        enable(model)
    batch, seq = SHAPE[tiny]
    batches = batches_of(config, MICRO_BATCHES, batch, seq)
    gpu = DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=gpu)
    timings = _in_turns({False: model, True: model}, batches, optimizer, autocast=precision.startswith("amp"))
    lines = []
    for fused, timed in timings.items():
        lines.append({
            "precision": precision, "checkpointing": checkpointing, "fused": fused,
            "ms": round(timed.median_s * 1e3, 1), "tokens_per_s": round(MICRO_BATCHES * batch * seq / timed.median_s),
            "loss": timed.loss, "peak_gib": round(timed.peak_bytes / 2**30, 2),
        })  # fmt: skip
        print(json.dumps(lines[-1]), flush=True)
    return lines


def steps_in_graphs(tiny: bool, count: int, batch: int, checkpointing: str) -> list[dict[str, Any]]:
    """The median time of a step in graphs, without and with fusion in turns, on the same parameters."""
    config, seq = config_of(tiny), SHAPE[tiny][1]
    plain = model_of(config, torch.bfloat16, fused=False)
    fused_model = copy.deepcopy(plain, {id(parameter): parameter for parameter in plain.parameters()})
    fuse_linears(fused_model)
    fuse_embeddings(fused_model)
    models = {False: plain, True: fused_model}
    graphs = [put_in_graphs(model, checkpointing) for model in models.values()]
    batches = batches_of(config, count, batch, seq)
    gpu = DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=gpu)
    lines = []
    for fused, timed in _in_turns(models, batches, optimizer, autocast=False).items():
        lines.append({
            "precision": "bf16", "checkpointing": checkpointing, "graphs": True, "micro_batches": f"{count} x {batch}",
            "fused": fused, "ms": round(timed.median_s * 1e3, 1),
            "tokens_per_s": round(count * batch * seq / timed.median_s), "loss": timed.loss,
        })  # fmt: skip
        print(json.dumps(lines[-1]), flush=True)
    for one in graphs:
        one.release()
    return lines


def main() -> None:
    given = step_record.options(
        __doc__, lambda parser: parser.add_argument("--graphs", action="store_true", help="inside CUDA graphs")
    )
    record = step_record.StepRecord("measure_accumulation_fusion", DEVICE)
    found = errors(given.tiny, given.graphs)
    if max(line["times_the_usual_error"] for line in found) > MOST_TIMES_THE_USUAL_ERROR:
        print("the error of a gradient is more than twice the usual one; nothing was timed", file=sys.stderr)
        raise SystemExit(1)
    measured: list[dict[str, Any]] = []
    runs: list[Callable[[], list[dict[str, Any]]]]
    if given.graphs:
        shapes = TINY_GRAPH_RUNS if given.tiny else GRAPH_RUNS
        runs = [functools.partial(steps_in_graphs, given.tiny, *shape) for shape in shapes]
    else:
        runs = [functools.partial(steps, given.tiny, *run) for run in RUNS]
    for run in runs:
        measured += run()
        record.write(given.json, errors=found, measurements=measured)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    for line in [] if given.graphs else measured:
        line |= predicted(given.tiny, line["precision"], line["checkpointing"], line["fused"])
        record.write(given.json, errors=found, measurements=measured)


if __name__ == "__main__":
    main()
