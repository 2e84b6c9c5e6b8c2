"""Measure the ops of hybrid models and sigmoid routers, and training steps of Qwen3.5-9B by shape.

    python -m benchmarks hybrid-ops --json RECORD            # on a GPU with 80 GB
    python -m benchmarks hybrid-ops --part ops
    python -m benchmarks hybrid-ops --part steps --layers 8  # fewer layers
    python -m benchmarks hybrid-ops --tiny                   # small shapes, also without a GPU

ops     Short convolution (8192 channels, one document and 16), gated norm (heads of 128) and the routers of DeepSeek-V3
        and GLM-4.5-Air, forward and backward of 8192 tokens in bf16: tigon, flash-linear-attention if it is installed,
        and PyTorch. Times in turns, bytes that a call adds to the peak, and errors of the result and of each gradient
        against fp64.
steps   LoRA of rank 16 on all linear layers, full checkpointing, 8192 tokens as one document and as 16. Weights and
        tokens are random. The versions take turns on one model:
            PyTorch                 transformers with its own code for the gated delta rule and the convolution
            flash-linear-attention  transformers with that library's kernels, where it is installed
            tigon                   tigon.patch, beside that library where it is installed
        PyTorch's code mixes packed documents, so it runs with one document alone. flash-linear-attention 0.6 refuses
        its backward on Hopper with Triton 3.4 to 3.7.0; the record then has the message.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from benchmarks.cases.lora import USUAL, Trained, dense
from benchmarks.harness import Bench, Case, figures, peaks_bytes, predicted, times_ms
from tigon.bench import timing
from tigon.bench.numerical_errors import relative_error
from tigon.models import packed_documents
from tigon.models.loading.presets import PRESETS
from tigon.models.seams.documents import document_numbers
from tigon.ops import OPS
from tigon.planner.request import Request

PARTS = ("ops", "steps")
PRESET, TOKENS, DOCUMENTS, TURNS = "qwen3.5-9b", 8192, 16, 3
FLA = "flash-linear-attention"
FLA_VERSIONS: Mapping[str, bool] = {"PyTorch": False, FLA: True, "tigon": True}
"""Version -> whether it may use the library."""
REPLACED = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
"""The functions of transformers that look for a library."""
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_LAYERS = 4


def has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


def positions(tokens: int, documents: int, device: torch.device) -> Tensor:
    """(1, T) positions that begin anew at each document; the documents differ in length."""
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(2))[: documents - 1].add(1).sort()[0]
    bounds = [0, *cuts.tolist(), tokens]
    return torch.cat([torch.arange(end - begin) for begin, end in itertools.pairwise(bounds)])[None].to(device)


def bounds_of(positions_1T: Tensor) -> Tensor:
    """Returns the index of the first token of each document, and the number of all tokens."""
    begins = (positions_1T[0] == 0).nonzero().flatten()
    return torch.cat((begins, begins.new_tensor([positions_1T.numel()]))).int()


# --- ops --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One op on given inputs. calls: implementation -> a function of the inputs that need gradients."""

    op: str
    name: str
    inputs: Mapping[str, Tensor]
    calls: Mapping[str, Callable[..., Tensor]]
    truth: Callable[..., Tensor]
    """The fp64 formula of the inputs in fp64."""


def results(call: Callable[..., Tensor], inputs: Mapping[str, Tensor], dy: Tensor) -> list[Tensor]:
    """The result, and the gradient of every input."""
    out = call(**inputs)
    return [out.detach(), *torch.autograd.grad(out, [*inputs.values()], dy.to(out.dtype))]


def convolution(tokens: int, channels: int, documents: int, device: torch.device) -> Problem:
    inputs = {
        "x": torch.randn(1, tokens, channels, device=device, dtype=torch.bfloat16, requires_grad=True),
        "weight": (0.5 * torch.randn(channels, 4, device=device, dtype=torch.bfloat16)).requires_grad_(),
    }
    positions_1T = positions(tokens, documents, device)
    numbers = document_numbers(positions_1T) if documents > 1 else None
    op = OPS["causal_conv1d"]
    calls: dict[str, Callable[..., Tensor]] = {
        "tigon": lambda x, weight: op.call(x, weight, activation="silu", seq_idx=numbers)
    }
    if has_fla():
        module = importlib.import_module("fla.modules.causal_conv1d")
        ends = bounds_of(positions_1T).long() if documents > 1 else None
        calls[FLA] = lambda x, weight: module.causal_conv1d(x, weight, activation="silu", cu_seqlens=ends)[0]
    if documents == 1:
        calls["PyTorch"] = lambda x, weight: F.silu(
            F.conv1d(x.transpose(1, 2), weight[:, None], padding=3, groups=channels)[..., :tokens]
        ).transpose(1, 2)
    truth = lambda x, weight: op.oracle(x, weight, activation="silu", seq_idx=numbers)  # noqa: E731
    return Problem("causal_conv1d", f"{tokens} x {channels}, {documents} documents", inputs, calls, truth)


def gated_norm(rows: int, width: int, device: torch.device) -> Problem:
    x, z = (torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    inputs = {"x": x, "z": z, "weight": torch.rand(width, device=device, dtype=torch.bfloat16, requires_grad=True)}
    op = OPS["gated_rms_norm"]
    calls: dict[str, Callable[..., Tensor]] = {
        "tigon": lambda x, z, weight: op.call(x, z, weight),
        "PyTorch": lambda x, z, weight: op.oracle(x, z, weight),
    }
    if has_fla():
        fused = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
        calls[FLA] = lambda x, z, weight: fused(x, z, weight, None, eps=1e-6)
    return Problem("gated_rms_norm", f"{rows} x {width}", inputs, calls, calls["PyTorch"])


def router(name: str, tokens: int, experts: int, groups: int, top_groups: int, device: torch.device) -> Problem:
    logits = torch.randn(tokens, experts, device=device, requires_grad=True)
    bias = 0.1 * torch.randn(experts, device=device)
    op, options = OPS["topk_sigmoid"], {"groups": groups, "top_groups": top_groups, "scale": 2.5}
    calls: dict[str, Callable[..., Tensor]] = {
        "tigon": lambda logits: op.call(logits, bias, 8, **options)[0],
        "PyTorch": lambda logits: op.oracle(logits, bias, 8, **options)[0],
    }
    truth = lambda logits: op.oracle(logits, bias.double(), 8, **options)[0]  # noqa: E731
    return Problem("topk_sigmoid", f"{name}, {tokens} x {experts}", {"logits": logits}, calls, truth)


def problems(tiny: bool, device: torch.device) -> Iterator[Problem]:
    tokens, channels, width = (96, 32, 32) if tiny else (TOKENS, 8192, 128)
    torch.manual_seed(0)
    yield convolution(tokens, channels, 1, device)
    yield convolution(tokens, channels, 4 if tiny else DOCUMENTS, device)
    yield gated_norm(tokens if tiny else 32 * tokens, width, device)
    yield router("deepseek-v3", tokens, 256, 8, 4, device)
    yield router("glm-4.5-air", tokens, 128, 1, 1, device)


def measured(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Times, peaks and errors of each implementation."""
    with torch.no_grad():
        dy = torch.randn_like(problem.calls["tigon"](**problem.inputs))
    wide = {name: x.detach().double().requires_grad_() for name, x in problem.inputs.items()}
    exact = results(problem.truth, wide, dy.double())
    calls = {name: partial(results, call, problem.inputs, dy) for name, call in problem.calls.items()}
    names = ("out", *(f"d{name}" for name in problem.inputs))
    errors = {name: dict(zip(names, map(relative_error, call(), exact), strict=True)) for name, call in calls.items()}
    about = {"op": problem.op, "problem": problem.name}
    return about | {"median_ms": times_ms(calls, device), "peak_bytes": peaks_bytes(calls, device), "errors": errors}


# --- steps ------------------------------------------------------------------------------------------------------------


def config_of(bench: Bench) -> Any:
    config_class = importlib.import_module("transformers").AutoConfig
    layers = bench.given.layers or (TINY_LAYERS if bench.tiny else PRESETS[PRESET]["num_hidden_layers"])
    return config_class.for_model(
        **{**PRESETS[PRESET], **(TINY if bench.tiny else {}), "num_hidden_layers": layers, "use_cache": False}
    )


@contextlib.contextmanager
def run_by(version: str, trained: Trained, documents: int) -> Iterator[None]:
    """The model as this version runs it."""
    modeling = importlib.import_module(type(trained.model.get_base_model()).__module__)
    own = {
        name: getattr(function, "__wrapped__", function) for name in REPLACED if (function := getattr(modeling, name))
    }
    with contextlib.ExitStack() as stack:
        if not FLA_VERSIONS[version]:
            stack.enter_context(patch.multiple(modeling, **own))
        positions_1T = positions(trained.ids_BT.numel(), documents, trained.device)
        trained.inputs = {"position_ids": positions_1T}
        if version == "tigon":
            stack.callback(tigon.patch(trained.model).undo)
            if documents > 1:
                stack.callback(packed_documents.keep_apart(trained.model.get_base_model()))
        elif documents > 1:
            trained.inputs["cu_seq_lens_q"] = bounds_of(positions_1T)
        yield


def steps(bench: Bench, trained: Trained, config: Any, documents: int) -> dict[str, Any]:
    """Median step, peak and losses of each version."""
    versions = [name for name in FLA_VERSIONS if name != FLA or has_fla()]
    versions = [name for name in versions if name != "PyTorch" or documents == 1]
    turns: dict[str, list[timing.Steps]] = {version: [] for version in versions}
    rows: dict[str, dict[str, Any]] = {version: {} for version in versions}
    start = [parameter.detach().clone() for parameter in trained.parameters]
    for _ in range(TURNS):
        for version in versions:
            if rows[version]:
                continue
            trained.restore(start)
            bench.free()
            try:
                with run_by(version, trained, documents):
                    turns[version].append(timing.time_steps(trained.step, bench.device, steps=2, warm_ups=1))
            except (RuntimeError, NotImplementedError) as error:  # a library that refuses, or too little memory
                rows[version]["detail"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                trained.optimizer.zero_grad(set_to_none=True)
    for version, timed in turns.items():
        if not rows[version]:
            rows[version] = figures(timing.Steps.joined(timed[1:]), trained.ids_BT.numel())  # the first turn compiles
    settings = USUAL.having({"train.checkpointing": "full"})
    request = Request(model=PRESET, config=config, batch=1, seq=trained.ids_BT.numel(), settings=settings, masked=False)
    plan = predicted(request, bench.device)
    about = {"layers": config.num_hidden_layers, "tokens": trained.ids_BT.numel(), "documents": documents}
    return about | {"library": has_fla(), "versions": rows, "predicted": plan}


def measure(bench: Bench) -> None:
    parts = bench.given.part or PARTS
    for problem in problems(bench.tiny, bench.device) if "ops" in parts else ():
        bench.add("ops", measured(problem, bench.device))
        bench.free()
    if "steps" in parts:
        config = config_of(bench)
        ids_BT = torch.randint(0, config.vocab_size, (1, 96 if bench.tiny else TOKENS), device=bench.device)
        trained = Trained(dense(config, bench.device), USUAL.having({"train.checkpointing": "full"}), ids_BT)
        for documents in (1, 4 if bench.tiny else DOCUMENTS):
            bench.add("steps", steps(bench, trained, config, documents))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model instead of all")


CASE = Case(measure=measure, options=options, packages=("peft", FLA))
