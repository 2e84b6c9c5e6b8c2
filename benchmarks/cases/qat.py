"""Measure what rounding to 4 or 8 bits costs a trained model, and what quantisation-aware training recovers.

    python -m benchmarks qat --model HuggingFaceTB/SmolLM2-135M-Instruct --json RECORD
    python -m benchmarks qat --tiny

LoRA on Python's documentation is trained once without `train.qat` and once with each format. Each line is one
`tigon export`, which transformers reads back. Its losses are those of documents beyond the first 0.35 MiB, which no run
has read. The runs stay in the folder `--runs`. Finished runs there and lines of the record at --json are kept, so an
interrupted measurement continues. An unfinished run there begins anew.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.exports import small_model
from benchmarks.harness import Bench, Case
from tigon._quiet import quiet_loading
from tigon.data.source import reading
from tigon.techniques.qat.formats import FORMATS
from tigon.techniques.qat.qat import KEY, NONE
from tigon.trained import export, find
from tigon.trained.load import load_tokenizer_of
from tigon.trainer import run

READ_MIB, ALL_MIB = 0.35, 0.5
LENGTH, N_SEQUENCES = 128, 16
RECIPE = """\
data: {source: python-docs, max_text_mib: 0.3, sequence_length: 64, eval_fraction: 0.05}
train: {batch_size: 4, learning_rate: 0.001, precision: amp-bf16}
lora: {rank: 16}
"""


def _train(model: str, steps: int, name: str, folder: Path) -> Path:
    """Train with the weights rounded to a format, or with `none`, unless that is done. Returns the run's folder."""
    runs = folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', model).strip('-')}-{steps}-steps"
    run_folder = runs / name
    if (run_folder / "summary.json").is_file():
        return run_folder
    shutil.rmtree(run_folder, ignore_errors=True)  # an interrupted run
    runs.mkdir(parents=True, exist_ok=True)
    recipe = runs / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    keys = {
        "model.name": model,
        "output.folder": runs,
        "output.name": name,
        "output.sample_tokens": 0,
        "train.report_to": "none",
        "train.steps": steps,
        KEY: name,
    }
    return run.train(recipe, [f"{key}={value}" for key, value in keys.items()])


def _held_out(tokenizer: Any) -> torch.Tensor:
    """Tokens (sequences, length) of the documents after the first `READ_MIB`."""
    seen, texts = 0, []
    for document in reading.read(["python-docs"], "auto", ALL_MIB):
        text = "".join(part.text for part in document.segments)
        if seen > READ_MIB * 2**20:
            texts.append(text)
        seen += len(text.encode())
    ids = tokenizer("\n\n".join(texts))["input_ids"][: LENGTH * N_SEQUENCES]
    return torch.tensor(ids).view(-1, LENGTH)


def _losses(folder: Path, tokens: torch.Tensor) -> list[float]:
    """Nats per token of each sequence, as transformers reads the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return [float(model(input_ids=row[None], labels=row[None]).loss) for row in tokens]


def _measure(bench: Bench) -> None:
    quiet_loading()
    done = {(line["training"], line["format"]) for line in bench.resume("lines", choosing=("formats", "runs"))}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if bench.tiny else bench.given.runs
        model = str(small_model("llama", folder / "small")) if bench.tiny else bench.given.model
        for trained, name in [(NONE, None), *((t, one) for one in bench.given.formats for t in (NONE, one))]:
            if (trained, name or "bf16") in done:
                continue
            trained_run = find.find(str(_train(model, bench.given.steps, trained, folder)))
            target = Path(scratch) / "exported"
            wanted = export.Export(target, merge=True, format=name, dtype=None if name else "bf16", verify=False)
            export.export(trained_run, wanted)
            tokens = _held_out(load_tokenizer_of(trained_run))[: 2 if bench.tiny else None]
            size, losses = (target / "model.safetensors").stat().st_size, _losses(target, tokens)
            line = {"training": trained, "format": name or "bf16", "bytes": size, "loss": sum(losses) / len(losses)}
            bench.add("lines", {**line, "losses": losses})
            shutil.rmtree(target)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a hub id")
    parser.add_argument("--runs", type=Path, default=Path("runs/qat"), metavar="FOLDER", help="default: runs/qat")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument("--steps", type=int, default=32, help="of each training (default: 32)")


CASE = Case(measure=_measure, options=_options, packages=("compressed-tensors", "peft"), needs_gpu=False)
