"""Measure what few rows teach a small chat model: the eval loss, the style of its answers, and made-up facts.

    python -m benchmarks small-data SmolLM2-135M-Instruct \\
        --json benchmarks/results/nvidia-h100/few-rows/small-data.json

The model is a checkpoint folder of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), or a hub
id. Each case is a run of `tigon train` with rows of `benchmarks/small_rows.py`. Afterwards the model answers ten
questions of other kinds and eight about the facts, with the likeliest token each time. Cases of the record at --json
that are finished are kept, so an interrupted measurement continues.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import small_rows
from benchmarks.harness import Bench, Case
from tigon.trained import find, load
from tigon.trainer import run

LORA_RANK = 16
NEW_TOKENS = 20
N_FACTS = 8


@dataclass(frozen=True)
class Run:
    """One run: the rows, and the keys of the recipe that differ between runs."""

    rows: int
    epochs: float
    learning_rate: float
    packing: bool = False
    batch_size: int = 4
    lora: bool = True

    def overrides(self) -> dict[str, Any]:
        more = {"lora.rank": LORA_RANK} if self.lora else {}
        # A micro-batch of one packed sample takes a quarter of the memory, and the step is the same up to rounding.
        size = "train.gradient_accumulation" if self.packing else "train.batch_size"
        return {
            "train.epochs": self.epochs,
            "train.learning_rate": self.learning_rate,
            "data.packing": self.packing,
            "train.batch_size": 1,
            size: self.batch_size,
            **more,
        }


BASE = Run(80, 0.05, 1e-30)
"""Trains nothing, so its figures are those of the model as it comes."""
RUNS = (
    BASE,
    Run(80, 3, 2e-4),
    Run(20, 10, 2e-4),
    Run(20, 10, 1e-3),
    Run(80, 1, 1e-4, packing=True),
    Run(20, 5, 2e-5, lora=False),
    Run(80, 3, 2e-4, packing=True),
    Run(20, 5, 1e-4),
    Run(20, 5, 2e-4),
    Run(20, 5, 5e-4),
    Run(20, 5, 1e-5, lora=False),
    Run(20, 5, 5e-5, lora=False),
    Run(80, 5, 2e-4, packing=True, batch_size=1),
    Run(80, 1, 2e-4),
    Run(80, 10, 2e-4),
    Run(80, 3, 2e-5, lora=False),
    Run(80, 3, 1e-4),
    Run(80, 3, 5e-4),
    Run(80, 3, 1e-3),
    Run(80, 3, 2e-4, batch_size=8),
    Run(300, 1, 2e-4),
    Run(300, 3, 2e-4),
    Run(300, 3, 2e-4, packing=True),
)
"""The most telling ones first, because a CPU takes hours for all."""


def measured(case: Run, model: str, folder: Path) -> dict[str, Any]:
    """Train a case, and ask the result."""
    train, held_out = small_rows.rows(case.rows)
    small_rows.save(train, folder / "rows.jsonl")
    small_rows.save(held_out, folder / "eval.jsonl")
    recipe = folder / "recipe.yaml"
    recipe.write_text("output: {name: small, if_exists: number}\n", encoding="utf-8")
    keys = {
        "model.name": model,
        "data.source": folder / "rows.jsonl",
        "data.eval_source": folder / "eval.jsonl",
        "output.folder": folder / "runs",
        "output.sample_tokens": 0,
        "train.report_to": "none",
        "train.log_steps": 1,
        **case.overrides(),
    }
    path = run.train(recipe, [f"{name}={value}" for name, value in keys.items()])
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    data = json.loads((path / "data.json").read_text(encoding="utf-8"))
    steps = max(record["step"] for record in records if record["event"] == "train")
    return {
        **asdict(case),
        "samples": data["rows"],
        "tokens": data["tokens"],
        "steps": steps,
        "train_s": summary["train_s"],
        "eval_loss": summary["eval_loss"],
        "answers": _asked(path),
    }


def _asked(path: Path) -> dict[str, str]:
    """The likeliest answer of the trained model to each question, all in one batch."""
    loaded = load.load(find.find(str(path)), device=load.device_of("auto"), dtype=torch.float32)
    questions = [*small_rows.OTHER_KINDS, *(question for question, _ in small_rows.facts()[:N_FACTS])]
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    asked = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(loaded.model.device)
    with torch.no_grad():
        made = loaded.model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
    texts = tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return dict(zip(questions, texts, strict=True))


def measure(bench: Bench) -> None:
    done = list(bench.resume("cases"))
    bench.fields["environment"] = bench.environment()
    for run_ in RUNS:
        if any(all(one[name] == value for name, value in asdict(run_).items()) for one in done):
            continue
        with tempfile.TemporaryDirectory() as folder:
            line = measured(run_, bench.given.model, Path(folder))
        bench.add("cases", line, str({name: value for name, value in line.items() if name != "answers"}))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder with SmolLM2-135M-Instruct, or its hub id")


CASE = Case(measure=measure, options=options, packages=("peft",), needs_gpu=False)
