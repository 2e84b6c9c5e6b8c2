"""Measure the ops of hybrid models and sigmoid routers, and training steps of Qwen3.5 by shape.

    python -m benchmarks hybrid-ops --json RECORD            # on a GPU with 80 GB
    python -m benchmarks hybrid-ops --part ops --op gated_delta_rule
    python -m benchmarks hybrid-ops --part steps --version tigon --json RECORD   # adds one version to the record
    python -m benchmarks hybrid-ops --part steps --layers 8  # fewer layers
    python -m benchmarks hybrid-ops --part steps --preset qwen3.5-4b --training full
    python -m benchmarks hybrid-ops --tiny                   # small shapes, also without a GPU

ops     Short convolution (8192 channels, one document and 16), the gated delta rule (16 heads of keys, 32 of values),
        gated norm (heads of 128) and the routers of DeepSeek-V3 and GLM-4.5-Air, forward and backward of 8192 tokens in
        bf16: tigon, flash-linear-attention if it is installed, and PyTorch. Times in turns, bytes that a call adds to
        the peak, and errors of the result and of each gradient against fp64.
steps   LoRA of rank 16 on all linear layers of the 9B, or all weights in bf16 with AdamW (`--training full`) or with
        bitsandbytes' AdamW in 8 bits (`full-8bit`). Full checkpointing, 8192 tokens as 16 documents and as one. Weights
        and tokens are random. Each version builds its own model from one seed:
            PyTorch                 transformers with its own code for the gated delta rule and the convolution
            flash-linear-attention  transformers with that library's kernels, where it is installed
            tigon                   tigon.patch, beside that library where it is installed
            tigon's op              tigon.patch with tigon's gated delta rule in the library's place
            Liger                   transformers with that library's kernels, and Liger's
        PyTorch's code mixes packed documents, so it runs with one document alone. flash-linear-attention 0.6 refuses
        its backward on Hopper with Triton 3.4 to 3.7.0; the record then has the message. The two libraries compile and
        tune for a minute. Give each version a process of its own (`--version`), so that one that takes too long leaves
        the others their lines: a process adds its line to the record at --json.
plans   The planner's peak and step of that training by tigon.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from benchmarks.cases.lora import USUAL, Trained, dense
from benchmarks.harness import Bench, Case, figures, kernels_of, peaks_bytes, predicted, times_ms
from tigon.bench import timing
from tigon.bench.numerical_errors import relative_error
from tigon.models import packed_documents
from tigon.models.loading.presets import PRESETS
from tigon.models.seams import convolution as state_layers
from tigon.models.seams.documents import document_numbers
from tigon.ops import OPS
from tigon.planner.request import Request
from tigon.techniques.keys.settings import Settings

FULL = Settings.of({"train.precision": "bf16", "train.checkpointing": "full"})
TRAININGS = {
    "lora": USUAL.having({"train.checkpointing": "full"}),
    "full": FULL.having({"train.optimizer": "adamw"}),
    "full-8bit": FULL.having({"train.optimizer": "adamw-8bit"}),
}
PARTS = ("ops", "steps", "plans")
PRESET, TOKENS, DOCUMENTS = "qwen3.5-9b", 8192, 16
FLA = "flash-linear-attention"
OWN = "tigon's op"
LIGER = "Liger"
FLA_VERSIONS: Mapping[str, bool] = {"PyTorch": False, FLA: True, "tigon": True, OWN: False, LIGER: True}
"""Version -> whether it may use the library. Liger is the last, because it replaces classes of transformers."""
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


def scan(tokens: int, heads: int, width: int, documents: int, device: torch.device) -> Problem:
    """The gated delta rule of two heads of v for each of k, with q and k of length one."""
    q, k = (F.normalize(torch.randn(1, tokens, heads, width, device=device), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, 2 * heads, width, device=device, dtype=torch.bfloat16)
    g, beta = -0.5 * torch.rand(2, 1, tokens, 2 * heads, device=device) ** 2
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": -2 * beta.bfloat16()}
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    bounds = bounds_of(positions(tokens, documents, device)) if documents > 1 else None
    op = OPS["gated_delta_rule"]
    tigons = lambda q, k, v, g, beta: op.call(q, k, v, g, beta, cu_seqlens=bounds)[0]  # noqa: E731
    calls: dict[str, Callable[..., Tensor]] = {"tigon": tigons}
    if has_fla():
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        ends = None if bounds is None else bounds.long()
        calls[FLA] = lambda q, k, v, g, beta: rule(q, k, v, g, beta, cu_seqlens=ends)[0]
    if documents == 1:
        modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        plain = getattr(modeling.torch_chunk_gated_delta_rule, "__wrapped__", modeling.torch_chunk_gated_delta_rule)
        calls["PyTorch"] = lambda q, k, v, g, beta: plain(q, k, v, g, beta)[0]
    # In fp64 the op is the chunked formula in PyTorch, which the tests compare with the recurrence.
    return Problem("gated_delta_rule", f"{tokens} x {2 * heads} heads, {documents} documents", inputs, calls, tigons)


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
    heads = 1 if tiny else 16
    yield scan(tokens, heads, width, 1, device)
    yield scan(tokens, heads, width, 4 if tiny else DOCUMENTS, device)
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
    errors, refusals = {}, {}
    for name, call in [*calls.items()]:
        try:
            errors[name] = dict(zip(names, map(relative_error, call(), exact), strict=True))
        except (RuntimeError, NotImplementedError) as error:  # a library that refuses
            refusals[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            del calls[name]
    about = {"op": problem.op, "problem": problem.name, "refusals": refusals}
    return about | {"median_ms": times_ms(calls, device), "peak_bytes": peaks_bytes(calls, device), "errors": errors}


# --- steps ------------------------------------------------------------------------------------------------------------


def config_of(bench: Bench) -> Any:
    config_class = importlib.import_module("transformers").AutoConfig
    layers = bench.given.layers or (TINY_LAYERS if bench.tiny else PRESETS[bench.given.preset]["num_hidden_layers"])
    return config_class.for_model(
        **{
            **PRESETS[bench.given.preset],
            **(TINY if bench.tiny else {}),
            "num_hidden_layers": layers,
            "use_cache": False,
        }
    )


class FullyTrained(Trained):
    """A model whose weights are all trained in bf16. Its turns go on from one another, because no copy fits."""

    def __init__(self, model: Any, settings: Settings, ids_BT: Tensor) -> None:
        self.device, self.ids_BT, self.inputs = ids_BT.device, ids_BT, {}
        self.model = model.train()
        tigon.checkpoint(model, "full")
        self.parameters = [*model.parameters()]
        if settings.train.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=self.device.type == "cuda")
        else:
            self.optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(self.parameters, lr=1e-6)

    def restore(self, start: Sequence[Tensor]) -> None:
        pass


def base_of(trained: Trained) -> Any:
    """The transformers model, without PEFT's wrapper."""
    return trained.model.get_base_model() if hasattr(trained.model, "get_base_model") else trained.model


@contextlib.contextmanager
def run_by(version: str, trained: Trained, documents: int) -> Iterator[None]:
    """The model as this version runs it."""
    modeling = importlib.import_module(type(base_of(trained)).__module__)
    own = {
        name: getattr(function, "__wrapped__", function) for name in REPLACED if (function := getattr(modeling, name))
    }
    with contextlib.ExitStack() as stack:
        if not FLA_VERSIONS[version]:
            stack.enter_context(patch.multiple(modeling, **own))
        positions_1T = positions(trained.ids_BT.numel(), documents, trained.device)
        trained.inputs = {"position_ids": positions_1T}
        if version in ("tigon", OWN):
            objection = None if version == OWN else "the library runs its gated delta rule"
            stack.enter_context(patch.object(state_layers, "rule_objection", lambda layer: objection))
        if version in ("tigon", OWN):
            stack.callback(tigon.patch(trained.model).undo)
            if documents > 1:
                stack.callback(packed_documents.keep_apart(base_of(trained)))
        elif documents > 1:
            trained.inputs["cu_seq_lens_q"] = bounds_of(positions_1T)
        yield


def built(bench: Bench, version: str) -> Trained:
    """The model of a version with its optimizer. All versions have the same weights and tokens."""
    config, training = config_of(bench), bench.given.training
    torch.manual_seed(1)
    ids_BT = torch.randint(0, config.vocab_size, (1, 96 if bench.tiny else TOKENS), device=bench.device)
    model = dense(config, bench.device)
    if version == LIGER:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen3_5(model=model)
    return (Trained if training == "lora" else FullyTrained)(model, TRAININGS[training], ids_BT)


def measured_steps(bench: Bench, trained: Trained, version: str, documents: int) -> dict[str, Any]:
    """Median step, peak and losses of one version, or what it raises."""
    given = bench.given
    try:
        with run_by(version, trained, documents):
            timed = timing.time_steps(trained.step, bench.device, steps=given.steps, warm_ups=given.warm_ups)
            row = figures(timed, trained.ids_BT.numel())
            return row | ({"profile": kernels_of(trained.step, bench.device)} if given.profile else {})
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a library refuses, or too little memory
        trained.optimizer.zero_grad(set_to_none=True)
        return {"detail": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def steps(bench: Bench) -> None:
    """Add the lines of the versions that the record lacks."""
    given = bench.given
    done = {(line["version"], line["documents"]) for line in bench.resume("steps", ("version", "documents", "profile"))}
    counts = given.documents or ([4, 1] if bench.tiny else [DOCUMENTS, 1])
    for version in given.version or [name for name in FLA_VERSIONS if has_fla() or name not in (FLA, LIGER)]:
        wanted = [n for n in counts if (version, n) not in done and (n == 1 or version != "PyTorch")]
        if not wanted:
            continue
        trained = built(bench, version)
        note(bench, f"{version}: built")
        start = [parameter.detach().clone() for parameter in trained.parameters] if given.training == "lora" else []
        for documents in wanted:
            trained.restore(start)
            bench.free()
            layers = base_of(trained).config.num_hidden_layers
            about = {"model": given.preset, "training": given.training, "layers": layers, "version": version}
            about |= {"library": has_fla(), "tokens": trained.ids_BT.numel(), "documents": documents}
            bench.add("steps", about | measured_steps(bench, trained, version, documents))
            note(bench, f"{version}: {documents} documents")
        del trained, start
        bench.free()


def note(bench: Bench, text: str) -> None:
    """Say where the time goes: compilers and tuners take most of it."""
    print(f"{bench.seconds:.0f} s  {text}", file=sys.stderr, flush=True)


def plan(bench: Bench) -> dict[str, Any]:
    """The planner's peak and step of this training by tigon."""
    given, config, tokens = bench.given, config_of(bench), 96 if bench.tiny else TOKENS
    settings = TRAININGS[given.training]
    request = Request(model=given.preset, config=config, batch=1, seq=tokens, settings=settings, masked=False)
    about = {"model": given.preset, "training": given.training, "layers": config.num_hidden_layers, "tokens": tokens}
    return about | predicted(request, bench.device)


def measure(bench: Bench) -> None:
    parts = bench.given.part or PARTS
    for problem in problems(bench.tiny, bench.device) if "ops" in parts else ():
        if bench.given.op in (None, problem.op):
            bench.add("ops", measured(problem, bench.device))
            bench.free()
    if "steps" in parts:
        steps(bench)
    if "plans" in parts:
        bench.add("plans", plan(bench))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--op", metavar="NAME", help="only this op of the ops")
    parser.add_argument("--preset", default=PRESET, help="the model of the steps")
    parser.add_argument("--training", choices=TRAININGS, default="lora")
    parser.add_argument("--version", action="append", choices=FLA_VERSIONS, help="only this version of the steps")
    parser.add_argument("--documents", action="append", type=int, metavar="N", help="only this many documents")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model instead of all")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps (default: 3)")
    parser.add_argument("--warm-ups", type=int, default=2, metavar="N", help="steps before them (default: 2)")
    parser.add_argument("--profile", action="store_true", help="record the kernels of one more step")


CASE = Case(measure=measure, options=options, packages=("peft", FLA, "triton", "liger-kernel"))
