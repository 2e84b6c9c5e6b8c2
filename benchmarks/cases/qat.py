"""Measure what rounding to 4 or 8 bits costs a trained model, and what quantisation-aware training recovers.

    tigon train recipe.yaml --set output.name=plain
    tigon train recipe.yaml --set output.name=qat --set train.qat=int4
    python -m benchmarks qat --plain runs/plain --trained runs/qat --json RECORD
    python -m benchmarks qat --tiny

Each line is one `tigon export`, which transformers reads back. Its loss is that of Python's documentation beyond the
first 0.35 MiB, which the runs must not have read.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.exports import small_model
from benchmarks.harness import Bench, Case
from tigon._quiet import quiet_loading
from tigon.data.source import reading
from tigon.trained import export, find
from tigon.trained.load import load_tokenizer_of

READ_MIB, ALL_MIB = 0.35, 0.5
LENGTH, N_SEQUENCES = 128, 8


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


def _loss(folder: Path, tokens: torch.Tensor) -> float:
    """Nats per token, as transformers reads the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return float(sum(model(input_ids=row[None], labels=row[None]).loss.float() for row in tokens) / len(tokens))


def _measure(bench: Bench) -> None:
    quiet_loading()
    with tempfile.TemporaryDirectory() as scratch:
        given = bench.given
        if bench.tiny:
            given.plain = given.trained = str(small_model("llama", Path(scratch) / "small"))
        chosen = find.find(given.plain)
        tokens = _held_out(load_tokenizer_of(chosen))[: 2 if bench.tiny else None]
        for training, source, name in (("plain", given.plain, None), ("plain", given.plain, given.format),
                                       ("train.qat", given.trained, given.format)):  # fmt: skip
            trained = find.find(source)
            target = Path(scratch) / f"{training}-{name}"
            wanted = export.Export(
                target=target, merge=trained.adapter is not None, format=name, dtype=None if name else "bf16",
                verify=False,
            )  # fmt: skip
            export.export(trained, wanted)
            size = (target / "model.safetensors").stat().st_size
            line = {"training": training, "format": name or "bf16", "bytes": size, "loss": _loss(target, tokens)}
            bench.add("lines", line)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", metavar="RUN", help="a run without train.qat")
    parser.add_argument("--trained", metavar="RUN", help="a run with train.qat")
    parser.add_argument("--format", default="int4", help="the format of the exports")


CASE = Case(measure=_measure, options=_options, packages=("compressed-tensors", "peft"), needs_gpu=False)
