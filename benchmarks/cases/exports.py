"""Measure how much each export changes what a model computes, by reading it back with transformers or PEFT.

    python -m benchmarks exports --json RECORD                     # small models of each family; minutes on a CPU
    python -m benchmarks exports --json RECORD --model RUN         # a real model: a run that trained adapters
    python -m benchmarks exports --tiny

A line is one `tigon export`. The difference of the logits is relative, the largest of four texts, and all models
compute in fp32. With `--model` a line has the answer of the exported model too, and for a GGUF file also that of
ik_llama.cpp, a fork of llama.cpp, if the package ik-llama-cpp-python is installed. Lines of the record at --json are
kept, so an interrupted measurement continues.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from tigon.trained import export, find, load
from tigon.trained.gguf_file import FAMILIES, TYPES

_LINE = re.compile(r"verified by ([^:]+):.*?; (\d+) of (\d+) next tokens .*?; logits differ by ([\d.]+)%")
_PROGRAM = re.compile(r"([a-z-]+) \d")
_TEXTS = ["The small model reads these words, and counts 1, 2, 3.", "def f(x):\n    return x + 1\n"]
_SHAPE = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
_OTHERS = ("mistral", "gemma3_text")
"""Families whose GGUF files llama.cpp's converter writes."""
QUESTION = "How tall is the lighthouse at Brindle Point?"
NEW_TOKENS = 32
_ITSELF = "the run itself"


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


def _forms(target: Path, *, merge: bool, tiny: bool) -> dict[str, export.Export]:
    """Title -> an export of whole weights."""
    dtypes, kinds, formats = (["bf16"], ["q8_0"], ["int4"]) if tiny else (export.DTYPES, TYPES, FORMATS)
    whole = partial(export.Export, target, merge=merge)
    return {
        **{f"safetensors {dtype}": whole(dtype=dtype) for dtype in dtypes},
        **{f"GGUF {kind}": whole(gguf=kind) for kind in kinds},
        **{name: whole(format=name) for name in formats},
    }


def _export(source: str, wanted: export.Export) -> dict[str, Any]:
    """The last comparison of an export, or why it is refused."""
    try:
        lines = export.export(find.find(source), wanted).lines
    except TigonError as error:
        return {"refused": str(error)}
    *_, (reader, same, tokens, size) = _LINE.findall("\n".join(lines))
    programs = " with ".join(_PROGRAM.findall(reader))
    return {"reader": programs, "same": int(same), "tokens": int(tokens), "logits_percent": float(size)}


def _answer(model: Any, tokenizer: Any, question: str) -> str:
    """The likeliest answer."""
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0][ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def _read(target: Path, wanted: export.Export) -> tuple[Any, Any]:
    """An exported model and its tokenizer, as transformers or PEFT reads them."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not wanted.merge:
        return AutoPeftModelForCausalLM.from_pretrained(str(target)), AutoTokenizer.from_pretrained(str(target))
    named = {}
    if wanted.gguf:  # transformers would take the tokenizer of the folder instead of the file's
        (file,) = target.glob("*.gguf")
        target, named = target / "alone", {"gguf_file": file.name}
        target.mkdir()
        file.rename(target / file.name)
    # compressed-tensors makes MXFP4 weights bf16, whatever dtype the other weights are read in.
    dtype = "auto" if wanted.format else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype, **named)
    return model, AutoTokenizer.from_pretrained(str(target), **named)


def _answer_of_llama_cpp(file: Path, tokenizer: Any, question: str) -> str:
    """The likeliest answer of ik_llama.cpp, with the chat template as transformers renders it."""
    from ik_llama_cpp import IkLlama

    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    model = IkLlama(str(file), n_ctx=512, n_threads=1, verbose=False)
    made = model.generate(model.tokenize(prompt, add_bos=False, special=True), max_tokens=NEW_TOKENS)
    text: str = model.detokenize(made)
    model.close()
    return text


def _measure_small(bench: Bench, folder: Path) -> None:
    done = {(line["family"], line["format"]) for line in bench.resume("small")}
    target = folder / "exported"
    for family in ["llama"] if bench.tiny else [*FAMILIES, *_OTHERS]:
        source = small_model(family, folder / family)
        for name, wanted in _forms(target, merge=False, tiny=bench.tiny).items():
            if (family, name) in done:
                continue
            bench.add("small", {"family": family, "format": name, **_export(str(source), wanted)})
            shutil.rmtree(target, ignore_errors=True)


def _measure_real(bench: Bench, target: Path) -> None:
    given, done = bench.given, {line["format"] for line in bench.resume("real")}
    trained = load.load(find.find(given.model), device=torch.device("cpu"), dtype=torch.float32)
    answer = partial(_answer, question=given.question)
    if _ITSELF not in done:
        bench.add("real", {"format": _ITSELF, "answer": answer(trained.model, trained.tokenizer)})
    forms = {"adapters": export.Export(target, verify=True), **_forms(target, merge=True, tiny=bench.tiny)}
    for name, wanted in forms.items():
        if name in done or name.endswith("32"):  # small models show that 32 bits change nothing
            continue
        line = _export(given.model, wanted)
        if "refused" not in line:
            written = list(target.glob("*.gguf" if wanted.gguf else "*.safetensors"))
            line["bytes"] = sum(file.stat().st_size for file in written)
            if wanted.gguf and importlib.util.find_spec("ik_llama_cpp"):
                line["answer_of_llama_cpp"] = _answer_of_llama_cpp(written[0], trained.tokenizer, given.question)
            line["answer"] = answer(*_read(target, wanted))
        bench.add("real", {"format": name, **line})
        shutil.rmtree(target, ignore_errors=True)


def _measure(bench: Bench) -> None:
    quiet_loading()
    with tempfile.TemporaryDirectory() as scratch:
        if bench.given.model is None:
            _measure_small(bench, Path(scratch))
        else:
            _measure_real(bench, Path(scratch) / "exported")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="RUN", help="a run that trained adapters, to export instead")
    parser.add_argument("--question", default=QUESTION, help="what the exported model is asked")


CASE = Case(
    measure=_measure,
    options=_options,
    packages=("gguf", "peft", "compressed-tensors", "ik-llama-cpp-python"),
    needs_gpu=False,
)
