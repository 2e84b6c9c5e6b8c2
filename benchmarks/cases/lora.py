"""Measure training steps with LoRA: PEFT's layers against tigon's, experts, and experts in MXFP4.

    python -m benchmarks lora --json RECORD                          # on a GPU with 80 GB: about 8 minutes
    python -m benchmarks lora --run llama-3.1-8b --run llama-3.1-8b-4-bit
    python -m benchmarks lora --run qwen3-30b-a3b --profile          # the kernels of one more step of each version
    python -m benchmarks lora --tiny                                 # small models, also without a GPU

Weights and tokens are random. Adapters have rank 16 and fp32 weights, under bf16 autocast, with fused AdamW. The
versions of a run take turns on one model:

    transformers   PEFT's adapters; nothing of tigon
    peft           tigon.patch(lora=False): tigon's other ops
    grouped_mm     tigon.patch(experts=False): the experts as in transformers
    tigon          tigon.patch
    sinks          tigon.patch(attention_sinks=True)

The runs, each with the planner's prediction for the versions that it knows:

    llama-3.1-8b          4 x 2048 tokens, all linear layers, bf16 weights, without and with activation checkpointing
    llama-3.1-8b-4-bit    the same with 4-bit weights; needs bitsandbytes
    llama-3.1-8b-dora, llama-3.1-8b-dora-4-bit    the same with DoRA and full checkpointing
    qwen3-30b-a3b         1 x 4096 tokens, adapters on attention and then on the experts, full checkpointing. PEFT forms
                          the weights of all experts plus their adapters' products in each forward pass.
    gpt-oss-20b           1 x 2048 tokens, experts in MXFP4, adapters on the linear layers and then on the experts too.
                          First the dense weight of one projection is compared with transformers' own. Both are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import tigon
from benchmarks.harness import Bench, Case, figures, kernels_of, predicted, times_ms
from tigon.bench import timing
from tigon.models.loading.presets import PRESETS
from tigon.ops.linear.mxfp4 import BLOCK, CODE, mxfp4_weight
from tigon.planner.request import Request
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.adapter_targets import expert_parameters
from tigon.techniques.lora.mxfp4_experts import Mxfp4Parametrization
from tigon.techniques.technique import RunInfo

# Its types are incomplete, and mypy checks this file.
transformers = importlib.import_module("transformers")

TURNS, STEPS, WARM_UPS = 3, 3, 1
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
TINY_MXFP4 = {
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
PATCHES: dict[str, dict[str, Any] | None] = {
    "transformers": None,
    "peft": {"lora": False},
    "grouped_mm": {"experts": False},
    "tigon": {},
    "sinks": {"attention_sinks": True},
}
"""Version -> the options of `tigon.patch`."""
KNOWN: dict[str, dict[str, Any]] = {
    "transformers": {"model.kernels": "none"},
    "tigon": {},
    "sinks": {"model.attention_sinks": True},
}
"""Version -> what the planner knows it by."""


USUAL = Settings.of({"train.precision": "amp-bf16", "train.optimizer": "adamw", "lora.rank": 16})


@dataclass(frozen=True, kw_only=True)
class Run:
    """Adapters on one model. build: makes the model of a config."""

    preset: str
    build: Callable[[Any, torch.device], Any]
    batch: int
    seq: int
    targets: tuple[tuple[str, ...], ...]
    versions: tuple[str, ...]
    tiny: dict[str, Any]
    checkpointing: tuple[str, ...] = ("full",)
    settings: Settings = USUAL


# --- models -----------------------------------------------------------------------------------------------------------


def dense(config: Any, device: torch.device) -> Any:
    """The model with random bf16 weights, drawn on the device."""
    initialization = importlib.import_module("transformers.initialization")
    with initialization.no_init_weights(), device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    model.tie_weights()  # which transformers leaves out with the initial weights
    return model


def grouped(config: Any, device: torch.device) -> Any:
    model = dense(config, device)
    model.set_experts_implementation("grouped_mm")
    return model


def four_bit(config: Any, device: torch.device) -> Any:
    model = dense(config, device)
    for block in model.model.layers:
        store_in_nf4(block, device)
    model.is_loaded_in_4bit = True
    return model


def store_in_nf4(block: Any, device: torch.device) -> None:
    """Quantise the linear layers of a decoder layer on the device, as transformers does for `load_in_4bit`."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    for parent in (block.self_attn, block.mlp):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                stored = bitsandbytes.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=True,
                    quant_type="nf4",
                    device="meta",
                )
                stored.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                ).to(device)
                stored.quant_state = stored.weight.quant_state  # a module that moves keeps it
                setattr(parent, name, stored)


def draw(module: nn.Module, device: torch.device) -> None:
    """Draw the module's own parameters that are on the meta device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(std=0.02)
            setattr(module, name, nn.Parameter(drawn))


def stored_experts(shape: torch.Size, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes and exponents of a weight of the layout (experts, inputs, outputs)."""
    experts, inputs, outputs = shape
    blocks = (experts, outputs, inputs // BLOCK)
    packed = torch.randint(0, 256, (*blocks, BLOCK // 2), dtype=torch.uint8, device=device)
    return packed, torch.full(blocks, 120, dtype=torch.uint8, device=device)


def in_mxfp4(config: Any, device: torch.device) -> Any:
    """Random bytes for the experts and random bf16 weights for the rest."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    for path in list(expert_parameters(model)):
        module_path, _, name = path.rpartition(".")
        module = model.get_submodule(module_path)
        packed, scales = stored_experts(getattr(module, name).shape, device)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        register_parametrization(module, name, Mxfp4Parametrization(scales, torch.bfloat16), unsafe=True)
    for module in model.modules():
        draw(module, device)
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


_LLAMA = Run(
    preset="llama-3.1-8b",
    build=dense,
    batch=4,
    seq=2048,
    targets=(("linear",),),
    versions=("peft", "tigon"),
    checkpointing=("none", "full"),
    tiny=TINY,
)
_DORA = dataclasses.replace(_LLAMA, checkpointing=("full",))
_4_BIT = USUAL.having({"lora.quantize": True})
RUNS = {
    "llama-3.1-8b": _LLAMA,
    "llama-3.1-8b-4-bit": dataclasses.replace(_LLAMA, build=four_bit, settings=_4_BIT),
    "llama-3.1-8b-dora": dataclasses.replace(_DORA, settings=USUAL.having({"lora.dora": True})),
    "llama-3.1-8b-dora-4-bit": dataclasses.replace(_DORA, build=four_bit, settings=_4_BIT.having({"lora.dora": True})),
    "qwen3-30b-a3b": Run(
        preset="qwen3-30b-a3b",
        build=grouped,
        batch=1,
        seq=4096,
        tiny=TINY | TINY_EXPERTS,
        targets=(("q_proj", "k_proj", "v_proj", "o_proj"), ("experts",)),
        versions=("transformers", "grouped_mm", "tigon"),
    ),
    "gpt-oss-20b": Run(
        preset="gpt-oss-20b",
        build=in_mxfp4,
        batch=1,
        seq=2048,
        tiny=TINY | TINY_MXFP4,
        targets=(("linear",), ("linear", "experts")),
        versions=("tigon", "sinks"),
        settings=USUAL.having({"model.attention": "eager", "lora.quantize": True, "lora.quantize_to": "mxfp4"}),
    ),
}


# --- steps ------------------------------------------------------------------------------------------------------------


def config_of(run: Run, tiny: bool) -> Any:
    config = transformers.AutoConfig.for_model(**{**PRESETS[run.preset], **(run.tiny if tiny else {})})
    config.use_cache = False
    return config


class Trained:
    """A model with adapters whose second matrices are not 0, and its optimizer."""

    def __init__(self, model: Any, settings: Settings, ids_BT: torch.Tensor) -> None:
        self.device, self.ids_BT = ids_BT.device, ids_BT
        self.inputs: dict[str, Any] = {}
        self.model = TECHNIQUES["lora"].model(model, settings, RunInfo())  # as `tigon train` adds them
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.01)
        self.model.train()
        if settings.train.checkpointing != "none":
            tigon.checkpoint(self.model, settings.train.checkpointing)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=self.device.type == "cuda")

    def loss(self) -> torch.Tensor:
        learned = torch.tensor(self.ids_BT.numel() - len(self.ids_BT), device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return self.model(  # type: ignore[no-any-return]
                input_ids=self.ids_BT, labels=self.ids_BT, num_items_in_batch=learned, use_cache=False, **self.inputs
            ).loss

    def step(self, _number: int = 0) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def restore(self, start: Sequence[torch.Tensor]) -> None:
        """Set the adapters to these values, with a new state of the optimizer."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, start, strict=True):
                parameter.copy_(value)
        self.optimizer.state.clear()


def measured(bench: Bench, run: Run, settings: Settings, versions: list[str]) -> dict[str, Any]:
    """Median step, peak and losses of each version."""
    config = config_of(run, bench.tiny)
    model = run.build(config, bench.device)
    batch, seq = (2, 32) if bench.tiny else (bench.given.batch or run.batch, run.seq)
    ids_BT = torch.randint(0, config.vocab_size, (batch, seq), device=bench.device)
    trained = Trained(model, settings, ids_BT)
    turns: dict[str, list[timing.Steps]] = {version: [] for version in versions}
    rows: dict[str, dict[str, Any]] = {version: {} for version in versions}
    for turn in range(TURNS):
        for version in versions:
            options = PATCHES[version]
            report = None if options is None else tigon.patch(model, **options)
            bench.free()
            turns[version].append(timing.time_steps(trained.step, bench.device, steps=STEPS, warm_ups=WARM_UPS))
            if bench.given.profile and turn == TURNS - 1:
                rows[version]["profile"] = kernels_of(trained.step, bench.device)
            if report is not None:
                report.undo()
    for version, steps in turns.items():
        every = timing.Steps.joined(steps[1:])  # the first turn compiles
        rows[version] |= figures(every, ids_BT.numel())
        if version in KNOWN:
            known = settings.having(KNOWN[version])
            request = Request(model=run.preset, config=config, batch=batch, seq=seq, settings=known, masked=False)
            rows[version]["predicted"] = predicted(request, bench.device)
    count = sum(parameter.numel() for parameter in trained.parameters)
    return {"batch": batch, "seq": seq, "trained": count, "versions": rows}


def dequantisation(bench: Bench) -> dict[str, Any]:
    """Milliseconds of the dense gate and up weight of a layer, by tigon and by transformers, and whether they agree."""
    reference = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    packed, scales = stored_experts(torch.Size((4, 64, 128) if bench.tiny else (32, 2880, 5760)), bench.device)
    code = torch.tensor(CODE, device=bench.device)
    calls: dict[str, Callable[[], Any]] = {
        "tigon": lambda: mxfp4_weight(code, packed, scales, torch.bfloat16),
        "transformers": lambda: reference(packed, scales, dtype=torch.bfloat16),
    }
    equal = torch.equal(calls["tigon"]().transpose(1, 2), calls["transformers"]())
    nbytes = packed.numel() + scales.numel() + 4 * packed.numel()
    return {"equal": equal, "ms": times_ms(calls, bench.device), "bytes": nbytes}


def cases(run: Run) -> Iterator[Settings]:
    for targets in run.targets:
        for checkpointing in run.checkpointing:
            yield run.settings.having({"lora.targets": targets, "train.checkpointing": checkpointing})


def measure(bench: Bench) -> None:
    given = bench.given
    for name in given.run or RUNS:
        run = RUNS[name]
        versions = [version for version in run.versions if version in (given.version or run.versions)]
        if run.build is four_bit and importlib.util.find_spec("bitsandbytes") is None:
            bench.add("steps", {"run": name, "status": "not measured: bitsandbytes is not installed"})
            continue
        if run.build is in_mxfp4:
            bench.add("dequantisation", dequantisation(bench))
        for settings in cases(run):
            about = {"run": name, "adapters": settings.lora.targets, "checkpointing": settings.train.checkpointing}
            bench.add("steps", about | measured(bench, run, settings, versions))
            bench.free()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", action="append", choices=RUNS, help="only this run; may be repeated")
    parser.add_argument("--version", action="append", choices=PATCHES, help="only this version; may be repeated")
    parser.add_argument("--batch", type=int, metavar="B", help="samples instead of the run's")
    parser.add_argument("--profile", action="store_true", help="record the kernels of one step of each version")


CASE = Case(measure=measure, options=options, packages=("peft", "bitsandbytes"))
