"""Measure the training runs that the planner's predictions are checked against, one after the other on one GPU.

    python -m benchmarks plans --json RECORD [--only RE] [--time-limit S]

The committed RECORD is benchmarks/results/nvidia-h200/planner/runs.json.

Each case uses the model, patch, techniques, arguments and Trainer of `tigon train`, with random tokens and weights and
without files. The peaks are those of the whole run, from the model's first tensor to the check before a save. The step
time is the mean of the last two steps. The file is written after every case, and keeps earlier cases that are not
measured now. `--tiny` runs every case with a small model on the CPU instead, to check that the cases run. It gives
times but not peaks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from benchmarks.harness import Bench
from benchmarks.harness import Case as Measurement
from tigon.data.packing import Collator, Sample, SampleDataset
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import TigonError
from tigon.models.loading.presets import PRESETS
from tigon.objectives.causal_lm import CausalLM
from tigon.planner.render.json_names import settings_mapping
from tigon.recipe.keys import ModelConfig, Recipe, TrainConfig
from tigon.techniques.keys.lora import LoraConfig
from tigon.trainer import engine, guarded
from tigon.trainer import model as models
from tigon.trainer import trainer as trainers
from tigon.trainer.guards import preflight
from tigon.trainer.measuring.timed_run import StepMeter, StepTimer
from tigon.trainer.setup import Setup, TrainingData

PACKAGES = ("accelerate", "peft", "bitsandbytes", "torchao")
DOCUMENTS = 4
"""Documents per sequence of a masked case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run, with the keys of a recipe."""

    model: str
    batch: int
    seq: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the preset."""
    precision: str = "amp-bf16"
    optimizer: str = "adamw"
    checkpointing: str = "none"
    kernels: str = "tigon"
    attention: str = "sdpa"
    lora_rank: int | None = None
    lora_base: str = "auto"
    quantized: bool = False
    accumulate: int = 1
    masked: bool = False
    evaluated: bool = False
    steps: int = 3

    @property
    def id(self) -> str:
        """The model, the batch, and the options that differ from the defaults."""
        words = [self.model, f"b{self.batch}", f"s{self.seq}"]
        for name in ("precision", "checkpointing", "kernels", "optimizer", "attention"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                words.append({"checkpointing": f"ckpt-{value}", "kernels": f"kernels-{value}"}.get(name, value))
        words += [f"lora{self.lora_rank}"] if self.lora_rank else []
        words += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        words += [word for word in ("quantized", "masked", "evaluated") if getattr(self, word)]
        return " ".join(words)

    def recipe(self, device: str) -> Recipe:
        train = TrainConfig(
            steps=self.steps, batch_size=self.batch, gradient_accumulation=self.accumulate, optimizer=self.optimizer,
            precision=self.precision, checkpointing=self.checkpointing, device=device,
        )  # fmt: skip
        model = ModelConfig(
            name=self.model, config=dict(self.config) or None, kernels=self.kernels, attention=self.attention
        )
        lora = LoraConfig(rank=self.lora_rank, base=self.lora_base, quantize=self.quantized)
        return Recipe(model=model, train=train, lora=lora)


def _of(model: str, **shared: Any) -> functools.partial[Case]:
    return functools.partial(Case, model=model, **shared)


_1B, _OLMO, _06B = _of("llama-3.2-1b"), _of("olmo-2-1b"), _of("qwen3-0.6b")
_8B, _QWEN8 = _of("llama-3.1-8b", precision="bf16"), _of("qwen3-8b", precision="bf16")
_GEMMA = _of("gemma-2-2b")

# The most important cases come first, because a time limit cuts off the end.
CASES: tuple[Case, ...] = (
    _1B(batch=4, seq=2048),
    _8B(batch=2, seq=4096, checkpointing="full"),
    _OLMO(batch=4, seq=2048),
    _QWEN8(batch=2, seq=4096, checkpointing="full"),
    _06B(batch=8, seq=2048),
    _GEMMA(batch=2, seq=2048),
    _8B(batch=4, seq=4096, checkpointing="full", lora_rank=16),
    _1B(batch=4, seq=2048, kernels="none"),
    _1B(batch=4, seq=2048, kernels="no-flce"),
    _1B(batch=4, seq=2048, kernels="liger"),
    _1B(batch=16, seq=2048, checkpointing="full"),
    _1B(batch=8, seq=2048, checkpointing="every-2"),
    _1B(batch=8, seq=2048, checkpointing="selective"),
    _1B(batch=16, seq=2048, checkpointing="offload"),
    _1B(batch=8, seq=2048, precision="bf16"),
    _1B(batch=2, seq=1024, precision="fp32"),
    _1B(batch=4, seq=2048, precision="amp-fp16", steps=6),  # the loss scale may skip the first steps
    _1B(batch=4, seq=2048, optimizer="adamw-foreach"),
    _1B(batch=4, seq=2048, optimizer="adamw-8bit"),
    _1B(batch=4, seq=2048, optimizer="adafactor"),
    _1B(batch=4, seq=2048, optimizer="sgd"),
    _1B(batch=4, seq=2048, optimizer="paged-adamw-8bit"),
    _1B(batch=1, seq=512),
    _1B(batch=64, seq=512, checkpointing="full"),
    _1B(batch=1, seq=16384, checkpointing="full"),
    _1B(batch=2, seq=8192),
    _1B(batch=2, seq=8192, checkpointing="full", kernels="none"),
    _1B(batch=2, seq=1024, attention="eager"),
    _1B(batch=2, seq=2048, accumulate=4),
    _1B(batch=4, seq=2048, masked=True),
    _1B(batch=8, seq=2048, kernels="none", evaluated=True, checkpointing="full"),
    _1B(batch=4, seq=2048, lora_rank=16, lora_base="fp32"),
    _8B(batch=1, seq=2048),
    _8B(batch=1, seq=16384, checkpointing="full"),
    _8B(batch=2, seq=8192, checkpointing="offload"),
    _8B(batch=2, seq=4096, checkpointing="full", kernels="none"),
    _8B(batch=2, seq=4096, checkpointing="full", kernels="liger"),
    _8B(batch=2, seq=4096, checkpointing="full", optimizer="adafactor"),
    _8B(batch=2, seq=4096, checkpointing="full", optimizer="adamw-8bit"),
    _8B(batch=1, seq=4096, checkpointing="every-2", optimizer="sgd"),
    _QWEN8(batch=1, seq=2048),
    _QWEN8(batch=1, seq=4096, checkpointing="selective"),
    _QWEN8(batch=2, seq=4096, checkpointing="full", lora_rank=16),
    _QWEN8(batch=2, seq=4096, checkpointing="full", kernels="none"),
    _06B(batch=8, seq=2048, kernels="none"),
    _06B(batch=8, seq=2048, kernels="liger"),
    _06B(batch=16, seq=4096, checkpointing="full"),
    _06B(batch=32, seq=1024, precision="bf16"),
    _06B(batch=4, seq=4096, masked=True, checkpointing="full"),
    _GEMMA(batch=2, seq=2048, kernels="none"),
    _GEMMA(batch=8, seq=2048, checkpointing="full"),
    _GEMMA(batch=4, seq=2048, precision="bf16", kernels="liger"),
    _OLMO(batch=8, seq=4096, checkpointing="full"),
    _OLMO(batch=4, seq=2048, kernels="none"),
    _OLMO(batch=8, seq=2048, precision="bf16", checkpointing="every-2"),
    _OLMO(batch=4, seq=4096, checkpointing="selective", optimizer="adamw-foreach"),
    _06B(batch=4, seq=2048, optimizer="galore"),
    _06B(batch=4, seq=2048, lora_rank=16, lora_base="fp32", quantized=True),
    _06B(batch=4, seq=2048, optimizer="adamw-torchao-8bit"),  # compiles
    # An odd length beside an even one: a plain loop once measured 18.20 GiB for the first, where 17.21 are planned.
    _1B(batch=3, seq=1111, precision="bf16", kernels="none"),
    _1B(batch=3, seq=1112, precision="bf16", kernels="none"),
)

TINY: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def tiny(case: Case) -> Case:
    """The same techniques on a model and batch that take a CPU one second."""
    known = models.load_config(ModelConfig(name=case.model)).to_dict()
    shape = {name: value for name, value in TINY.items() if name in known}
    return dataclasses.replace(case, config=shape, batch=min(case.batch, 2), seq=64)


# --- one run ---------------------------------------------------------------------------------------------------------


def rows_of(case: Case, count: int, vocab_size: int) -> SampleDataset:
    """Random sequences of one document each, or of DOCUMENTS with different lengths in a masked case."""
    generator = torch.Generator().manual_seed(1)
    starts = [0]
    if case.masked:
        starts += sorted((torch.randperm(case.seq - 1, generator=generator)[: DOCUMENTS - 1] + 1).tolist())
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], case.seq], strict=True)]
    positions_T = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    rows = []
    for _ in range(count):
        tokens_T = torch.randint(vocab_size, (case.seq,), generator=generator, dtype=torch.int32)
        labels_T = tokens_T.masked_fill(positions_T == 0, IGNORE_INDEX)
        rows.append(Sample(tokens_T, labels_T, positions_T))
    return SampleDataset(rows)


_shapes: dict[str, dict[str, tuple[int, ...]]] = {}


def _shapes_of(recipe: Recipe, config: Any) -> tuple[str, dict[str, tuple[int, ...]]]:
    """(a name for the model's shape, its parameters); building a model on the meta device takes a second."""
    key = re.sub(r"\W+", "-", f"{recipe.model.name} {sorted((recipe.model.config or {}).items())}")
    if key not in _shapes:
        _shapes[key] = models.parameter_shapes(config)
    return key, _shapes[key]


def refusal(case: Case, device: torch.device) -> str | None:
    """Why `tigon train` would not start this case here: a package that is not installed, a CPU."""
    try:
        preflight.check_techniques(case.recipe(device.type), device)
    except TigonError as error:
        return _line(error)
    return None


def measure(case: Case, meter: StepMeter, device: torch.device, folder: Path) -> dict[str, float | None]:
    """Train as `tigon train` does; `meter` has the rest. The first and the last logged loss in nats,
    and the norm of the first gradient."""
    recipe = case.recipe(device.type)
    config = models.load_config(recipe.model)
    key, shapes = _shapes_of(recipe, config)
    settings = preflight.check_techniques(recipe, device)
    setup = Setup(
        recipe=recipe,
        device=device,
        settings=settings,
        config=config,
        shapes=shapes,
        objective=CausalLM(recipe.model),
    )
    built, _ = engine.build(setup, folder / key)
    meter.mark("load")
    rows = rows_of(case, case.steps * case.batch * case.accumulate, config.vocab_size)
    held_out = rows_of(case, case.batch, config.vocab_size) if case.evaluated else None
    data = TrainingData(train=rows, eval=held_out, collator=Collator(0, packing=True))
    trainer = trainers.make(setup, built, data, folder)
    trainer.add_callback(StepTimer(meter, trainer))
    trainer.train()
    guarded.refuse_nonfinite_weights(built, trainer.state.global_step)
    meter.mark("save")
    if case.evaluated:
        trainer.evaluate()
        meter.mark("eval")
    logged = [record for record in trainer.state.log_history if "loss" in record]
    return {
        "first_loss": float(logged[0]["loss"]), "first_grad_norm": logged[0].get("grad_norm"),
        "last_loss": float(logged[-1]["loss"]),
    }  # fmt: skip


@contextlib.contextmanager
def module_kept(model_type: str) -> Iterator[None]:
    """Restore a family's modeling module afterwards, because Liger replaces classes and functions in it."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def release(device: torch.device) -> None:
    """Free tensors, cached segments and workspaces, so that the next case starts like a new process."""
    if "bitsandbytes" in sys.modules:
        # bitsandbytes' manager keeps every embedding whose states it was told to keep in fp32
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        with contextlib.suppress(AttributeError):
            torch._C._host_emptyCache()


def run(case: Case, device: torch.device, folder: Path) -> dict[str, Any]:
    """The row of one case: measured, or why not."""
    release(device)
    begin_s = time.perf_counter()
    settings = settings_mapping(case.recipe(device.type).settings())
    row: dict[str, Any] = {
        "id": case.id, "model": case.model, "config": dict(case.config), "batch": case.batch, "seq": case.seq,
        "masked": case.masked, "evaluated": case.evaluated, "steps": case.steps, "choices": settings,
    }  # fmt: skip
    if reason := refusal(case, device):
        return row | {"status": "skipped", "detail": reason, "case_s": time.perf_counter() - begin_s}
    at_start_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    meter = StepMeter(device)
    try:
        with module_kept(PRESETS[case.model]["model_type"]):
            row |= {"status": "ok", "detail": "", **measure(case, meter, device, folder)}
        if not any(meter.updated):
            row |= {"status": "failed", "detail": "the loss scale skipped every step, so no optimizer state was made"}
    except torch.OutOfMemoryError as error:
        row |= {"status": "out of memory", "detail": _line(error)}
    except Exception as error:  # a failing case must be recorded and must not stop the others
        row |= {"status": "failed", "detail": f"{type(error).__name__}: {_line(error)}"}
    if row["status"] == "ok":
        step_s = sum(meter.step_s[-2:]) / 2
        row |= {"step_s": step_s, "tokens_per_s": case.batch * case.seq * case.accumulate / step_s}
    else:
        with contextlib.suppress(RuntimeError):
            meter.mark("failed")
    return row | {
        "allocated_bytes": meter.allocated_bytes, "reserved_bytes": meter.reserved_bytes, "phases": meter.phases,
        "at_start_bytes": at_start_bytes, "all_steps_s": meter.step_s, "n_updates": sum(meter.updated),
        "case_s": time.perf_counter() - begin_s,
    }  # fmt: skip


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]


# --- all runs --------------------------------------------------------------------------------------------------------


def with_the_faster_steps(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Combine the newest memory with the faster step time of two measurements.

    Short steps are CPU-bound, and the host's speed varies from run to run (QLoRA of qwen3-0.6b: 172 and 306 ms). A step
    that a change of tigon made slower keeps its earlier time. To measure all steps again, move the file away.
    """
    if before is None or row["status"] != "ok" or before["status"] != "ok" or before["step_s"] >= row["step_s"]:
        return row
    kept = {name: before[name] for name in ("step_s", "tokens_per_s", "all_steps_s")}
    return row | kept | {"steps_commit": before.get("steps_commit", before["tigon_commit"])}


def line_of(row: Mapping[str, Any]) -> str:
    if row["detail"]:
        return f"{row['status']}, {row['detail']}"
    left = f"{row['at_start_bytes']:,} bytes left over from before! " if row["at_start_bytes"] else ""
    return (
        f"{row['status']}, {left}{row['allocated_bytes'] / 2**30:.2f} GiB allocated, "
        f"{row['reserved_bytes'] / 2**30:.2f} reserved, {1e3 * row['step_s']:.0f} ms per step"
    )


def measure_all(bench: Bench) -> None:
    given = bench.given
    transformers.utils.logging.set_verbosity_error()
    device = torch.device("cpu") if bench.tiny else torch.device("cuda", torch.cuda.current_device())
    earlier = {row["id"]: row for row in bench.resume("cases", same=("device", "driver", "versions"))}
    bench.fields |= {"environment": bench.environment(), "tiny": bench.tiny}
    if device.type == "cuda":
        bench.fields["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    origin = {name: bench.environment()[name] for name in ("tigon_commit", "date")}
    chosen = [case for case in CASES if given.only.search(case.id)]
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tigon-plans-") as folder:
        for number, case in enumerate(chosen, 1):
            passed_s = time.perf_counter() - begin_s
            if passed_s > given.time_limit:
                print(f"time limit: {len(chosen) - number + 1} cases not started, from {case.id}", flush=True)
                break
            row = run(tiny(case) if bench.tiny else case, device, Path(folder)) | {"id": case.id, **origin}
            row = with_the_faster_steps(row, earlier.get(case.id))
            text = f"{number:2}/{len(chosen)} {passed_s:4.0f} s ({row['case_s']:.1f}) {case.id}: {line_of(row)}"
            bench.add("cases", row, text, key="id")
    statuses = [row["status"] for row in bench.fields["cases"]]
    print(", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses))))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="cases whose name this finds")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which none is started")


CASE = Measurement(measure=measure_all, options=options, packages=PACKAGES)
