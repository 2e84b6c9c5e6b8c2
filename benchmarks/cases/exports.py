"""Measure how much each export changes what a model computes, by reading it back with the program that will use it.

    python -m benchmarks exports --json RECORD                     # small models of each family; minutes on a CPU
    python -m benchmarks exports --json RECORD --model RUN         # and a real model: a run, or a folder of adapters
    python -m benchmarks exports --tiny

A line is one `tigon export`. The difference of the logits is relative, the largest of four texts, and all models
compute in fp32. With `--model` the line has an answer of the exported model too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Bench, Case
from tigon._quiet import quiet_loading
from tigon.data.tokenizer import train_bpe
from tigon.errors import TigonError
from tigon.techniques.qat.formats import FORMATS
from tigon.trained import export, find
from tigon.trained.gguf_file import FAMILIES, TYPES

_LINE = re.compile(r"verified by (\S+).*?; (\d+) of (\d+) next tokens .*?; logits differ by ([\d.]+)%")
_TEXTS = ["The small model reads these words, and counts 1, 2, 3.", "def f(x):\n    return x + 1\n"]
_SHAPE = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
QUESTION = "How tall is the lighthouse at Brindle Point?"


def small_model(family: str, folder: Path) -> Path:
    """A small model of a family with random weights, and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_bpe(_TEXTS, 300)
    shape = _SHAPE | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape |= {"head_dim": 128} if family == "qwen3" else {}  # the one that transformers reads of a GGUF file
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _export(source: str, wanted: export.Export) -> dict[str, Any]:
    """The last comparison of an export, or why it is refused."""
    try:
        lines = export.export(find.find(source), wanted).lines
    except TigonError as error:
        return {"refused": str(error)}
    *_, (reader, same, tokens, size) = _LINE.findall("\n".join(lines))
    return {"reader": reader, "same": int(same), "tokens": int(tokens), "logits_percent": float(size)}


def _answer(target: Path, gguf_file: str | None, question: str, *, is_rounded: bool) -> str:
    """The likeliest answer of an exported model, as transformers reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {}
    if gguf_file:  # transformers would take the tokenizer of the folder instead of the file's
        alone = target / "alone"
        alone.mkdir()
        (target / gguf_file).rename(alone / gguf_file)
        target, named = alone, {"gguf_file": gguf_file}
    # compressed-tensors makes MXFP4 weights bf16, whatever dtype the other weights are read in.
    dtype = "auto" if is_rounded else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype, **named)
    tokenizer = AutoTokenizer.from_pretrained(str(target), **named)
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, max_new_tokens=32, do_sample=False)[0][ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def _measure(bench: Bench) -> None:
    quiet_loading()
    kinds = ["q8_0"] if bench.tiny else list(TYPES)
    families = ["llama"] if bench.tiny else list(FAMILIES)
    with tempfile.TemporaryDirectory() as scratch:
        for family in () if bench.resume("small") or bench.given.only != [""] else families:
            source = small_model(family, Path(scratch) / family)
            for kind in kinds:
                wanted = export.Export(target=Path(scratch) / f"{family}-{kind}", gguf=kind)
                line = _export(str(source), wanted)
                bench.add("small", {"family": family, "format": f"GGUF {kind}", **line})
        if bench.given.model is None:
            return
        target = Path(scratch) / "exported"
        merged = partial(export.Export, target=target, merge=True)
        forms = {f"safetensors {dtype}": merged(dtype=dtype) for dtype in export.DTYPES}
        forms |= {f"GGUF {kind}": merged(dtype="fp32", gguf=kind) for kind in kinds}
        forms |= {name: merged(format=name) for name in FORMATS}
        for name, wanted in forms.items():
            if not any(name.startswith(start) for start in bench.given.only):
                continue
            gguf = wanted.gguf
            line = _export(bench.given.model, wanted)
            if "refused" not in line:
                file = f"exported-{gguf}.gguf" if gguf else None
                line["bytes"] = sum(path.stat().st_size for path in target.glob(file or "*.safetensors"))
                line["answer"] = _answer(target, file, bench.given.question, is_rounded=wanted.format is not None)
            bench.add("real", {"format": name, **line})
            shutil.rmtree(target, ignore_errors=True)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="RUN", help="a run or a folder of adapters to export too")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="FORMAT", help="formats of --model, without small models"
    )
    parser.add_argument("--question", default=QUESTION, help="what the exported model is asked")


CASE = Case(measure=_measure, options=_options, packages=("gguf", "peft", "compressed-tensors"), needs_gpu=False)
