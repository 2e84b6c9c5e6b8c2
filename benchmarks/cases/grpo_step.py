"""Measure whole GRPO steps of TRL's trainer, with and without tigon's generator and shared prefix.

    python -m benchmarks grpo-step --json RECORD    # on a GPU with 80 GB: about 4 minutes
    python -m benchmarks grpo-step --tiny           # a small model, also without a GPU

The model has the shape of Qwen3-4B, random bf16 weights and LoRA of rank 16 in fp32 under autocast. A step writes 8
completions of 256 tokens for each of 8 prompts of 1,024 tokens, rewards them, and trains on them. Both rows have
tigon's layers and head. The first steps are not timed. With transformers' `generate` the first step writes few tokens,
because it takes most of a minute otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

import tigon
from benchmarks.cases.generation import qwen3_4b
from benchmarks.cases.trl_step import adapters, text, tokenizer
from benchmarks.harness import Bench, Case
from tigon.bench import timing
from tigon.integrations.trl import fuse
from tigon.integrations.trl.generation import decode_in_graphs
from tigon.planner.gpus import GIB

# Their types are incomplete, and mypy checks this file.
datasets, transformers, trl = (importlib.import_module(name) for name in ("datasets", "transformers", "trl"))

SIZES, TINY_SIZES = (8, 8, 1024, 256), (2, 2, 12, 8)
"""Prompts, completions of each, tokens of a prompt and of a completion."""
FEW_TOKENS = 8
ROWS = ("generator and shared prefix", "transformers' generate")


class Clock(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Times each step and its completions, and reads the peak of each of both parts."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, Any]] = []
        self._write = trainer.model.generate
        vars(trainer.model)["generate"] = self.generate
        trainer.add_callback(self)

    def _now(self) -> tuple[float, float]:
        """The time, and the peak in GiB since the last call."""
        timing.synchronize(self.device)
        peak = 0.0
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.reset_peak_memory_stats()
        return time.perf_counter(), peak

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated() / GIB if self.device.type == "cuda" else 0.0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        begin, before = self._now()[0], self._allocated()
        written = self._write(*args, **kwargs)
        end, peak = self._now()
        self.steps[-1] |= {
            "completions_s": round(end - begin, 3),
            "completions_peak_gib": round(peak, 2),
            "left_gib": round(self._allocated() - before, 2),
            "new_tokens": written.shape[1] - kwargs["input_ids"].shape[1],
        }
        return written

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append({})
        self._begin = self._now()[0]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        end, peak = self._now()
        step = self.steps[-1]
        step["seconds"] = round(end - self._begin, 3)
        step["update_s"] = round(step["seconds"] - step["completions_s"], 3)
        step["update_peak_gib"] = round(peak, 2)
        print(step, flush=True)


class FewTokensFirst(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Lets the first step write few tokens."""

    def __init__(self, trainer: Any) -> None:
        self.config = trainer.generation_config
        self.new_tokens, self.config.max_new_tokens = self.config.max_new_tokens, FEW_TOKENS
        trainer.add_callback(self)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.config.max_new_tokens = self.new_tokens


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Differs from completion to completion, so that advantages are not 0."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def built(bench: Bench, steps: int) -> Any:
    """TRL's trainer of a fresh model, with tigon's layers and head."""
    prompts, completions, prompt_tokens, new_tokens = TINY_SIZES if bench.tiny else SIZES
    rows = [{"prompt": text(prompt_tokens, seed)} for seed in range(prompts * steps)]
    trainer = trl.GRPOTrainer(
        qwen3_4b(bench), reward_funcs=reward, peft_config=adapters("lora"),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=prompts * completions,
            num_generations=completions, max_completion_length=new_tokens, max_steps=steps, beta=0.0,
            learning_rate=1e-6, bf16=bench.gpu, use_cpu=not bench.gpu, report_to=[], gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False}, save_strategy="no", disable_tqdm=True,
            logging_steps=1,
        ),
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer(),
    )  # fmt: skip
    tigon.patch(trainer.model)
    return trainer


def measured(bench: Bench, row: str) -> dict[str, Any]:
    """The timed steps of a row."""
    torch.manual_seed(0)
    trainer = built(bench, bench.given.steps + 1)
    ours = row == ROWS[0]
    fused = fuse(trainer, shared_prefix=ours)
    generation = decode_in_graphs(trainer) if ours else None
    if not ours and not bench.tiny:
        FewTokensFirst(trainer)
    clock = Clock(trainer, bench.device)
    trainer.train()
    said = [str(part) for part in (fused, generation) if part is not None]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    kept = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")
    learned = [{name: log[name] for name in kept} for log in logs]
    return {"row": row, "steps": clock.steps[1:], "warm_up": clock.steps[0], "said": said, "logged": learned}


def measure(bench: Bench) -> None:
    bench.fields |= {"sizes": TINY_SIZES if bench.tiny else SIZES}
    for row in ROWS:
        bench.add("measurements", measured(bench, row))
        bench.free()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each row (default: 2)")


CASE = Case(measure=measure, options=options, packages=("trl", "peft"))
