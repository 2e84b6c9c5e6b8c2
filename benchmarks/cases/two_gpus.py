"""Measure tigon's engines for several GPUs on two GPUs of one host, beside plain FSDP2 and beside predictions.

    python -m benchmarks two-gpus --json RECORD [--only RE] [--time-limit S]     on two GPUs
    python -m benchmarks two-gpus --json RECORD --predict         adds predictions, on any machine

The cases answer five questions:

    8b-*      How fast do FSDP2 and ZeRO-3 train Llama-3.1-8B? The engines are those that `tigon train` starts. The
              baseline `8b-plain-fsdp2` is a loop as in torchtitan: transformers' model without tigon, fully_shard per
              layer, fused AdamW. All have bf16 weights and states, full checkpointing, and clipped gradients.
    zero-3-*  Which of DeepSpeed's settings makes ZeRO-3 slow? Llama-3.1-8B with 12 of its 32 layers, so that a case
              takes less time. They differ in the sizes of buckets and in what is gathered at a time.
    plus-*    Do ZeRO++'s 8-bit weights and 4-bit gradients train as ZeRO-3 does? DeepSpeed compiles their kernels with
              nvcc. It sends 4-bit gradients between machines only, so each process of that case sees one GPU.
    long-*    Can two GPUs train a row that is twice the longest of one GPU, by Ulysses and in a ring?
    equal-*   Are the loss and its gradient's norm those of one process, in fp32?

Weights and tokens are random. Each case runs in its own processes with its own time limit. The record is written after
every case. `--tiny` runs the cases with small models on the CPU, to check the script. FSDP2 and ZeRO-3 need a GPU, so
they become DDP there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import plans
from benchmarks.cases.plans import Case
from benchmarks.harness import Bench, kernel_table, write_json
from benchmarks.harness import Case as Measurement
from benchmarks.process_stacks import end_with_stacks
from tigon.bench.record import environment
from tigon.planner.engines import zero
from tigon.planner.estimate import estimate
from tigon.planner.gpus import row_of
from tigon.planner.request import Request
from tigon.recipe.keys import ModelConfig
from tigon.techniques import sharding
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.technique import RunInfo
from tigon.trainer import model as models
from tigon.trainer.distributed import launch
from tigon.trainer.timed_run import StepMeter

GPUS = 2
LONGEST = 39_168
"""The longest row of one document that `tigon plan llama-3.2-1b --gpu h100 --batch 1 --checkpointing none --longest`
predicts to fit one H100."""
WARM_UP = 3
"""Steps before the timed ones: they compile kernels, and make the optimizer's states."""

_8B = functools.partial(
    Case, model="llama-3.1-8b", batch=8, seq=512, precision="bf16", checkpointing="full", steps=WARM_UP + 5
)
_1B = functools.partial(Case, model="llama-3.2-1b")
_ZERO: dict[str, Any] = {"gpus": GPUS, "zero": 3}
_FSDP, _ROW = {"gpus": GPUS, "fsdp": True}, {"gpus": GPUS, "fsdp": True, "sequence": GPUS}
_RING = _ROW | {"sequence_method": "ring"}

_12_LAYERS = functools.partial(_8B, config={"num_hidden_layers": 12})
_LAYER = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
"""Elements of the matrices of one layer."""
SMALL: dict[str, Any] = {"reduce_bucket_size": 4096**2, "stage3_prefetch_bucket_size": 4096**2 * 9 // 10}
"""Sizes that follow from the hidden size, as those of transformers' `auto`: one matrix of a layer, or less."""
LARGE: dict[str, Any] = {"reduce_bucket_size": 5 * 10**8, "stage3_prefetch_bucket_size": 2 * 10**8}
"""More than the weights of one layer, in elements. DeepSpeed's own default prefetches 5e7."""
BY_LAYER: dict[str, Any] = {"reduce_bucket_size": _LAYER, "stage3_prefetch_bucket_size": _LAYER}
WEIGHTS: dict[str, Any] = {"leaf_module": {"classes": []}}
"""Each weight is gathered by itself."""
LAYERS: dict[str, Any] = {"leaf_module": {"classes": ["LlamaDecoderLayer"]}}
"""The weights of a layer are gathered together: DeepSpeed puts its hooks on layers, not on all of their modules."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One case, and how to run it."""

    case: Case
    limit_s: int
    """Seconds after which its processes are killed."""
    plain: bool = False
    """Whether it is the baseline without tigon."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Settings of DeepSpeed in place of tigon's."""
    one_gpu_each: bool = False
    """Whether a process sees its own GPU alone, as on a machine with one GPU."""
    profiled: bool = False
    """Whether the kernels of its last step are recorded instead of times."""


# The most important first, because a time limit cuts off the end.
RUNS: Mapping[str, Run] = {
    "8b-plain-fsdp2": Run(case=_8B(kernels="none", sharding=_FSDP), limit_s=75, plain=True),
    "8b-fsdp2": Run(case=_8B(sharding=_FSDP), limit_s=80),
    "8b-zero-3-weights": Run(case=_8B(sharding=_ZERO), limit_s=90, zero=WEIGHTS | SMALL),
    "8b-zero-3-layers": Run(case=_8B(sharding=_ZERO), limit_s=90, zero=LAYERS | BY_LAYER),
    "8b-zero-3-profile": Run(case=_8B(sharding=_ZERO), limit_s=90, profiled=True),
    "8b-zero-3-buckets": Run(case=_8B(sharding=_ZERO), limit_s=90, zero=WEIGHTS | LARGE),
    "zero-3-weights": Run(case=_12_LAYERS(sharding=_ZERO), limit_s=60, zero=WEIGHTS | SMALL),
    "zero-3-layers-buckets": Run(case=_12_LAYERS(sharding=_ZERO), limit_s=60, zero=LAYERS | BY_LAYER),
    "zero-3-weights-buckets": Run(case=_12_LAYERS(sharding=_ZERO), limit_s=60, zero=WEIGHTS | LARGE),
    "zero-3-layers": Run(case=_12_LAYERS(sharding=_ZERO), limit_s=60, zero=LAYERS | SMALL),
    "zero-3-fsdp2": Run(case=_12_LAYERS(sharding=_FSDP), limit_s=60),
    "plus-none": Run(case=_1B(batch=4, seq=1024, steps=11, sharding=_ZERO), limit_s=60),
    "plus-int8-weights": Run(
        case=_1B(batch=4, seq=1024, steps=11, sharding=_ZERO | {"zero_int8_weights": True}), limit_s=150
    ),
    "plus-int4-gradients": Run(
        case=_1B(batch=4, seq=1024, steps=11, sharding=_ZERO | {"zero_int4_gradients": True}),
        limit_s=150,
        one_gpu_each=True,
    ),
    "long-two-gpus": Run(case=_1B(batch=1, seq=2 * LONGEST, sharding=_ROW), limit_s=70),
    "long-two-gpus-ring": Run(case=_1B(batch=1, seq=2 * LONGEST, sharding=_RING), limit_s=60),
    "long-one-gpu": Run(case=_1B(batch=1, seq=LONGEST), limit_s=60),
    "equal-one-process": Run(case=_1B(batch=1, seq=512, precision="fp32", steps=1), limit_s=45),
    "equal-two-processes": Run(case=_1B(batch=1, seq=512, precision="fp32", steps=1, sharding=_ROW), limit_s=60),
}


def tiny(run: Run) -> Run:
    """The same run with a small model, on the CPU."""
    sharding = {name: value for name, value in run.case.sharding.items() if name.startswith(("gpus", "sequence"))}
    return dataclasses.replace(run, case=dataclasses.replace(plans.tiny(run.case), sharding=sharding), limit_s=90)


# --- one process of a case -------------------------------------------------------------------------------------------


class _Unskipped:
    """What `StepMeter.end` asks a trainer, for a loop that skips no step."""

    class accelerator:
        optimizer_step_was_skipped = False

    class gate:
        left_out = 0


def plain_fsdp2(case: Case, meter: StepMeter, device: torch.device) -> dict[str, Any]:
    """Train transformers' own model with FSDP2 in a plain loop, as torchtitan divides it."""
    config = models.load_config(ModelConfig(name=case.model, config=dict(case.config) or None))
    section = ModelConfig(name=case.model, config=dict(case.config) or None, kernels="none")
    model = models.build(section, config, dtype=torch.bfloat16, device=device, seed=1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    meter.mark("load")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rank = dist.get_rank()
    first: dict[str, Any] = {}
    rows = plans.rows_of(case, case.readers * case.steps * case.batch, config.vocab_size)
    for step in range(case.steps):
        start = (step * case.readers + rank) * case.batch
        tokens_BT = torch.stack([rows[start + i].tokens_T for i in range(case.batch)]).long().to(device)
        meter.begin()
        loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        meter.mark("forward")
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        meter.mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        meter.end(_Unskipped)
        if not first:
            mean = loss.detach().float()
            dist.all_reduce(mean)
            first = {"first_loss": float(mean) / case.readers, "first_grad_norm": float(norm.full_tensor())}
    return first


@contextlib.contextmanager
def _zero_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed use these settings, and mark no layers for it besides theirs."""
    own, marks = sharding.deepspeed_config, sharding.gathers_layers

    def config(choices: Choices, run_info: RunInfo) -> dict[str, Any]:
        made = own(choices, run_info)
        return made | {"zero_optimization": made["zero_optimization"] | settings}

    sharding.deepspeed_config = config
    if settings:
        sharding.gathers_layers = lambda choices, run_info: False
    try:
        yield
    finally:
        sharding.deepspeed_config, sharding.gathers_layers = own, marks


class _Kernels(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Records the kernels of the last step. The profiler makes that step slower."""

    def __init__(self, last: int) -> None:
        self._last, self.record = last, dict[str, Any]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._last - 1:
            kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
            self._profiler = profile(activities=[kind])
            self._profiler.start()
            self._begin_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._last:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiled_s = time.perf_counter() - self._begin_s
            self._profiler.stop()
            events = self._profiler.events()
            others = [one for one in events or () if "nccl" not in one.name.lower()]
            self.record = {
                "profiled_s": profiled_s, "busy_without_nccl_ms": kernel_table(others)["busy_ms"],
                **kernel_table(events),
            }  # fmt: skip


def measured(run: Run, device: torch.device) -> dict[str, Any]:
    """The row of a case in this process."""
    if run.plain:
        meter = StepMeter(device)
        row = {"status": "ok", "detail": "", **plain_fsdp2(run.case, meter, device)}
        row |= {"allocated_bytes": meter.allocated_bytes, "reserved_bytes": meter.reserved_bytes}
        row |= {"phases": meter.phases, "all_steps_s": meter.step_s}
    else:
        with tempfile.TemporaryDirectory(prefix="tigon-two-gpus-") as folder, _zero_settings(run.zero):
            kernels = _Kernels(run.case.steps) if run.profiled else None
            row = plans.run(run.case, device, Path(folder), callbacks=(kernels,) if kernels else ())
            row |= kernels.record if kernels else {}
    if row["status"] == "ok":
        steps_s = row["all_steps_s"][WARM_UP:] or row["all_steps_s"][-1:]
        tokens = run.case.readers * run.case.batch * run.case.seq
        row |= {"step_s": statistics.median(steps_s), "tokens_per_s": tokens / statistics.median(steps_s)}
    memory_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    about = {"case": dataclasses.asdict(run.case), "environment": environment(device), "memory_bytes": memory_bytes}
    return row | about


def one_process(run: Run, path: Path, *, small: bool) -> None:
    """Run a case in this process, and write its row beside those of the other processes."""
    transformers.utils.logging.set_verbosity_error()
    launch.ignore_accelerate_variables()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if run.one_gpu_each:  # before CUDA looks
        os.environ |= {"CUDA_VISIBLE_DEVICES": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    device = torch.device("cpu") if small else torch.device("cuda", 0 if run.one_gpu_each else rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    launch.init_distributed(device)
    row = measured(run, device)
    path.with_suffix(f".{rank}").write_text(json.dumps(row), encoding="utf-8")
    if row["status"] != "ok":
        sys.stdout.flush()
        os._exit(1)  # the other process may wait in a collective, and the launcher then ends it
    launch.shutdown_distributed()


# --- all cases -------------------------------------------------------------------------------------------------------


def run_case(name: str, run: Run, folder: Path, *, small: bool) -> dict[str, Any]:
    """Run a case in its own processes. Returns rank 0's row, with the peaks of all ranks."""
    ranks, path = int(run.case.sharding.get("gpus", 1)), folder / name
    command = [sys.executable]
    command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command += ["-m", "benchmarks", "two-gpus", "--case", name, "--json", str(path)]
    begin_s = time.monotonic()
    environ = {**os.environ, "OMP_NUM_THREADS": "1" if small else "4", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        [*command, *(["--tiny"] if small else [])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environ, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=run.limit_s)
            detail = "" if process.returncode == 0 else printed[-5000:]
        except subprocess.TimeoutExpired:
            detail = f"killed after {run.limit_s} s: {end_with_stacks(process)[-12_000:]}"
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{name}.[0-9]*"))]
    row = rows[0] if rows else {"status": "failed"}
    row["detail"] = row.get("detail") or detail
    row["peak_bytes"] = [one["allocated_bytes"] for one in rows]
    return {"name": name, **row, "seconds": round(time.monotonic() - begin_s, 1)}


def has_prediction(run: Run) -> bool:
    """Whether the planner knows the settings of a case: tigon's own, or those that it had before. It knows no shared
    rows."""
    known = run.zero in ({}, WEIGHTS | SMALL, LAYERS | BY_LAYER) and "sequence" not in run.case.sharding
    return run.case.precision != "fp32" and known


def predicted(run: Run, gpu_name: str, memory_bytes: int) -> dict[str, float]:
    """The seconds per step, tokens/s and allocated bytes that the planner predicts for a case."""
    case, gpu = run.case, row_of(gpu_name, memory_bytes)
    config = models.load_config(ModelConfig(name=case.model, config=dict(case.config) or None))
    choices = case.recipe("cuda").choices()
    request = Request(model=case.model, config=config, batch=case.batch, seq=case.seq, choices=choices)
    with unittest.mock.patch.object(zero, "gathers_layers", return_value=run.zero != WEIGHTS | SMALL):
        plan = estimate(request, gpu=gpu, evaluation=False)
    return {"step_s": plan.step_s, "tokens_per_s": plan.tokens_per_s, "allocated_bytes": plan.peak_allocated_bytes}


PRINTED = (
    "name", "status", "tokens_per_s", "step_s", "peak_bytes", "first_loss", "first_grad_norm", "last_loss", "seconds",
    "detail",
)  # fmt: skip


def run_all(bench: Bench) -> None:
    """Run the cases one after the other. Cases that are not measured now stay in the record."""
    given, begin_s = bench.given, time.monotonic()
    bench.resume("cases")
    with tempfile.TemporaryDirectory(prefix="tigon-two-gpus-") as folder:
        for name, run in RUNS.items():
            left_s = given.time_limit - (time.monotonic() - begin_s)
            if not given.only.search(name) or left_s < 15:
                continue
            limited = tiny(run) if bench.tiny else run
            limited = dataclasses.replace(limited, limit_s=int(min(limited.limit_s, left_s)))
            row = run_case(name, limited, Path(folder), small=bench.tiny)
            for key in ("environment", "memory_bytes"):
                if found := row.pop(key, None):
                    bench.fields[key] = found
            row["tigon_commit"] = bench.fields.get("environment", {}).get("tigon_commit")
            bench.add("cases", row, json.dumps({key: row.get(key) for key in PRINTED}), key="name")


def add_predictions(path: Path) -> None:
    """Write predictions beside each case of a record."""
    record = json.loads(path.read_text(encoding="utf-8"))
    for row in record["cases"]:
        row.pop("predicted", None)
        if has_prediction(RUNS[row["name"]]):
            row["predicted"] = predicted(RUNS[row["name"]], record["environment"]["device"], record["memory_bytes"])
            print(row["name"], row["predicted"], flush=True)
    write_json(path, record)


def measure(bench: Bench) -> None:
    given = bench.given
    if given.json is None:
        bench.refuse("--json RECORD is required")
    if given.predict:
        add_predictions(given.json)
    elif given.case:
        run = RUNS[given.case]
        one_process(tiny(run) if bench.tiny else run, given.json, small=bench.tiny)
    else:
        run_all(bench)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="cases whose name this finds")
    parser.add_argument("--time-limit", type=float, default=250, help="seconds for all cases together")
    parser.add_argument("--predict", action="store_true", help="add predictions to an existing record")
    parser.add_argument("--case", choices=RUNS, help=argparse.SUPPRESS)


CASE = Measurement(measure=measure, options=options, needs_gpu=False)
