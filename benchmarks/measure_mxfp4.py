"""Adapters on GPT-OSS-20B by shape, with experts in MXFP4: a step's time and peak, with the planner's prediction.

    python -m benchmarks.measure_mxfp4 --json RECORD     # on a GPU with 24 GB, about 80 seconds
    python -m benchmarks.measure_mxfp4 --tiny            # a small model, also without a GPU

1 x 2048 tokens, random bytes for the experts and random bf16 weights for the rest. Adapters of rank 16 in fp32 under
bf16 autocast are on the linear layers, and then on the experts too, each with transformers' eager attention and with
`attention_sinks`. Full activation checkpointing, fused AdamW. First the dense weight of one projection is compared with
transformers' own, and both are timed.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import statistics
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import tigon
from benchmarks import measure_experts_lora, measure_router, step_record
from tigon.bench.training.planned import gpu_of
from tigon.errors import TigonError
from tigon.models.loading.presets import PRESETS
from tigon.ops.linear.mxfp4 import BLOCK, CODE, mxfp4_weight
from tigon.planner.request import Request
from tigon.planner.search.option import estimate_option
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.mechanisms.adapter_targets import expert_parameters
from tigon.techniques.mechanisms.mxfp4_experts import Mxfp4Parametrization
from tigon.techniques.records.technique import RunInfo

# Its types are incomplete, and mypy checks this file.
transformers = importlib.import_module("transformers")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, WARM_UPS = 5, 2
TARGETS: tuple[tuple[str, ...], ...] = (("linear",), ("linear", "experts"))
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def stored(shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes and exponents of a weight of the layout (experts, inputs, outputs)."""
    experts, inputs, outputs = shape
    blocks = (experts, outputs, inputs // BLOCK)
    packed = torch.randint(0, 256, (*blocks, BLOCK // 2), dtype=torch.uint8, device=DEVICE)
    return packed, torch.full(blocks, 120, dtype=torch.uint8, device=DEVICE)


def made(tiny: bool) -> Any:
    """The model with random weights, drawn on the device."""
    shape = {**PRESETS["gpt-oss-20b"], **(TINY if tiny else {})}
    config = transformers.AutoConfig.for_model(**shape)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )  # fmt: skip
    for path in list(expert_parameters(model)):
        module_path, _, name = path.rpartition(".")
        module = model.get_submodule(module_path)
        packed, scales = stored(getattr(module, name).shape)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        register_parametrization(module, name, Mxfp4Parametrization(scales, torch.bfloat16), unsafe=True)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE).normal_(std=0.02)
                setattr(module, name, nn.Parameter(drawn))
    rotary = type(model.model.rotary_emb)
    with DEVICE:
        model.model.rotary_emb = rotary(config)
    return model


def dequantisation(tiny: bool) -> dict[str, Any]:
    """Milliseconds of the dense gate and up weight of a layer, by tigon and by transformers, and whether they agree."""
    reference = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    packed, scales = stored(torch.Size((4, 64, 128) if tiny else (32, 2880, 5760)))
    code = torch.tensor(CODE, device=DEVICE)

    def ours() -> torch.Tensor:
        return mxfp4_weight(code, packed, scales, torch.bfloat16)  # type: ignore[no-any-return]

    def theirs() -> torch.Tensor:
        return reference(packed, scales, dtype=torch.bfloat16)  # type: ignore[no-any-return]

    equal = torch.equal(ours().transpose(1, 2), theirs())
    return {
        "equal": equal, "tigon_ms": measure_router.timed_ms(ours), "transformers_ms": measure_router.timed_ms(theirs),
        "bytes": packed.numel() + scales.numel() + 4 * packed.numel(),
    }  # fmt: skip


def settings_of(targets: tuple[str, ...], sinks: bool) -> Settings:
    """The run as the planner knows it."""
    return Settings.of({
        "train.precision": "amp-bf16", "train.optimizer": "adamw", "model.kernels": "tigon",
        "train.checkpointing": "full", "model.attention": "eager",
        "lora.rank": 16, "lora.targets": targets, "lora.quantize": True, "lora.quantize_to": "mxfp4",
        "model.attention_sinks": sinks,
    })  # fmt: skip


def measured(model: Any, targets: tuple[str, ...], tiny: bool, sinks: bool) -> dict[str, Any]:
    """Median step, peak and losses with adapters on `targets`, with the planner's prediction."""
    adapted = TECHNIQUES["lora"].model(model, settings_of(targets, sinks), RunInfo())
    tigon.patch(adapted, attention_sinks=sinks)
    adapted.train()
    tigon.checkpoint(adapted, "full")
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=DEVICE.type == "cuda")
    seq = 32 if tiny else 2048
    ids_BT = torch.randint(0, model.config.vocab_size, (1, seq), device=DEVICE)
    if DEVICE.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = [measure_experts_lora.step(adapted, ids_BT, optimizer) for _ in range(WARM_UPS + STEPS)]
    median_ms = statistics.median(ms for ms, _ in steps[WARM_UPS:])
    peak_bytes = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    return {
        "adapters": targets, "attention_sinks": sinks, "seq": seq, "trained": sum(p.numel() for p in trained),
        "ms": median_ms, "tokens_per_s": 1e3 * seq / median_ms, "peak_bytes": peak_bytes,
        "losses": [loss for _, loss in steps],
        "all_ms": [ms for ms, _ in steps], "predicted": predicted(model.config, targets, seq, sinks),
    }  # fmt: skip


def predicted(config: Any, targets: tuple[str, ...], seq: int, sinks: bool) -> dict[str, Any]:
    """The planner's peak and step for this run, or why it has none."""
    request = Request(
        model="gpt-oss-20b", config=config, batch=1, seq=seq, settings=settings_of(targets, sinks), masked=False
    )  # fmt: skip
    try:
        estimate = estimate_option(request, gpu_of(DEVICE)).estimate
    except TigonError as error:
        return {"detail": " ".join(str(error).split())[:200]}
    return {"peak_bytes": estimate.peak_allocated_bytes, "ms": 1e3 * estimate.step_s}


def main() -> None:
    given = step_record.options(__doc__)
    record, rows = step_record.StepRecord("measure_mxfp4", DEVICE, ("peft",)), []
    weight = dequantisation(given.tiny)
    print(json.dumps(weight), flush=True)
    for targets, sinks in itertools.product(TARGETS, (False, True)):
        model = made(given.tiny)
        rows.append(measured(model, targets, given.tiny, sinks))
        print(json.dumps(rows[-1]), flush=True)
        record.write(given.json, dequantisation=weight, rows=rows)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
