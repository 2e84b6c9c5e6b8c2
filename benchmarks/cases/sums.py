"""Measure what a small chat model learns from rewards and from pairs: sums, with the recipes of recipes/sums.

    python -m benchmarks sums SmolLM2-135M-Instruct --json benchmarks/results/nvidia-h100/post-training/sums.json

The model is a checkpoint folder of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), or a hub
id. Each objective is a run of `tigon train`. A first run with a learning rate of nearly 0 evaluates the model as it
comes. Objectives of the record at --json that are finished are kept.
"""

from __future__ import annotations

import argparse
import json
import runpy
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Case
from tigon.trainer import run

RECIPES = Path(__file__).parents[2] / "recipes" / "sums"
OBJECTIVES = ("grpo", "dpo", "kto")
NOTHING = 1e-30
"""A learning rate that trains nothing."""
SHORTEST = ("train.steps=2", "train.eval_steps=2", "train.batch_size=8")


def measured(objective: str, bench: Bench, folder: Path) -> dict[str, Any]:
    """The records of a run and, as step 0, of an evaluation before it."""
    given = bench.given
    made = runpy.run_path(str(RECIPES / "rows.py"))["rows"](given.largest)
    rows = folder / "sums.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    keys = [
        f"model.name={given.model}", f"data.source={rows}", f"output.folder={folder / 'runs'}", "train.report_to=none",
        "output.save_model=false", f"data.eval_fraction={given.eval_rows / len(made)}", *given.set,
    ]  # fmt: skip
    keys += SHORTEST if bench.tiny else ()
    before = [*keys, "train.steps=1", "train.eval_steps=null", f"train.learning_rate={NOTHING}", "train.warmup_steps=0"]
    first = _records(run.train(RECIPES / f"{objective}.yaml", before), "eval")
    started_s = time.perf_counter()
    path = run.train(RECIPES / f"{objective}.yaml", keys)
    return {
        "objective": objective,
        "largest": given.largest,
        "overrides": list(given.set),
        "run_s": round(time.perf_counter() - started_s, 1),
        "eval": [{**first[-1], "step": 0}, *_records(path, "eval")],
        "train": _records(path, "train"),
        "completions": _records(path, "completion"),
    }


def _records(path: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == event]


def measure(bench: Bench) -> None:
    done = {line["objective"] for line in bench.resume("runs", choosing=("objective",))}
    bench.fields["environment"] = bench.environment()
    for objective in bench.given.objective or OBJECTIVES:
        if objective in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            line = measured(objective, bench, Path(folder))
        bench.add("runs", line, f"{objective}: {line['run_s']} s; {_progress(line)}")
        _check(line)


def _progress(line: dict[str, Any]) -> str:
    """The metric of the eval rows over steps, for the terminal."""
    name = "eval_reward" if line["objective"] == "grpo" else "eval_rewards/margins"
    return f"{name} " + ", ".join(f"{record['step']}: {record[name]:.3f}" for record in line["eval"])


def _check(line: dict[str, Any]) -> None:
    """At first a policy equals its reference, so DPO's loss is log 2 and its margin 0."""
    first = line["train"][0]
    if line["objective"] == "dpo":
        assert abs(first["loss"] - 0.6931) < 0.01 and abs(first["rewards/margins"]) < 0.01, first


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder with SmolLM2-135M-Instruct, or its hub id")
    parser.add_argument("--objective", action="append", choices=OBJECTIVES, help="only this one; may be repeated")
    parser.add_argument("--largest", type=int, default=9, help="the largest number in a question (default: 9)")
    parser.add_argument("--eval-rows", type=int, default=16, help="questions that are not trained on (default: 16)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a key of the recipes")


CASE = Case(measure=measure, options=options, packages=("trl", "peft"), needs_gpu=False)
