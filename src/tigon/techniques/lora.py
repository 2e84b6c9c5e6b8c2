"""LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314), by PEFT and bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion, KeySwitch
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, RunInfo, Technique

# `train.precision` -> the dtype of matmuls with 4-bit weights.
_COMPUTE_DTYPES: Mapping[str, str] = {
    "fp32": "float32", "amp-bf16": "bfloat16", "amp-fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip


def target_modules(model: Any, targets: tuple[str, ...]) -> list[str]:
    """Returns the paths of the modules that get adapters.

    The target "linear" is every `nn.Linear` of the model except the head, so also one outside the decoder layers.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    wanted = {
        "linear": lambda module: isinstance(module, nn.Linear) and module is not head,
        "head": lambda module: module is head,
        "embeddings": lambda module: module is embeddings,
    }
    return [path for path, module in model.named_modules() if any(wanted[target](module) for target in targets)]


def _adapters(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    import peft

    assert choices.lora_rank is not None
    config = peft.LoraConfig(
        r=choices.lora_rank, lora_alpha=run_info.lora_alpha or 2 * choices.lora_rank, lora_dropout=0.0, bias="none",
        target_modules=target_modules(model, choices.lora_targets), task_type="CAUSAL_LM",
    )  # fmt: skip
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=choices.precision != "bf16")
    # Otherwise no input of a checkpointed layer with frozen weights would require a gradient.
    model.enable_input_require_grads()
    return wrapped


def _nf4(choices: Choices, run_info: RunInfo) -> Mapping[str, Any]:
    from transformers import BitsAndBytesConfig

    compute = getattr(torch, _COMPUTE_DTYPES[choices.precision])
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    }  # fmt: skip


def _without_cpu_packing(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU with bf16 instructions.

    It repacks them in the first evaluation, and training after that fails at an operator without a derivative
    (0.50.2, nn/modules.py: Linear4bit).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


# The planner adds adapters only on request, because they train less than the whole model.
_RANK = Setting(
    field="lora_rank", key="lora.rank", help="Rank of the adapters; none: full fine-tuning.", minimum=1, maximum=4096,
    flag=Flag(name="lora", metavar="R", help="Train LoRA adapters of rank R."), traced=True,
    label=lambda choices: (
        "" if choices.lora_rank is None else f"{'QLoRA' if choices.quantized else 'LoRA'} {choices.lora_rank}"
    ),
)  # fmt: skip
_TARGETS = Setting(
    field="lora_targets", key="lora.targets",
    help="Modules with adapters: `linear` (every `nn.Linear` except `lm_head`), `head` (`lm_head`), `embeddings`.",
    words=("linear", "head", "embeddings"), traced=True,
)  # fmt: skip
_QUANTIZED = Setting(
    field="quantized", key="lora.quantize",
    help="QLoRA: keep the frozen weights in 4 bits (NF4, with double quantisation).",
    flag=Flag(name="qlora", help="With --lora: keep the base weights in 4 bits.", requires="lora_rank"), traced=True,
)  # fmt: skip

DECLARATION = Declaration(
    pages={"lora": "LoRA and QLoRA"},
    settings=(_RANK, _TARGETS, _QUANTIZED),
    techniques=(
        Technique(
            name="lora", page="lora",
            saves="Gradients and optimizer states of all weights except the adapters: about 12 of 16 bytes per "
            "parameter.",
            costs="Two thin matmuls for each adapted one. Activations are needed as before.",
            effect_on_result="Another result than full fine-tuning: only the modules in `lora.targets` change, by "
            "an update "
            "of rank `lora.rank`.",
            needs=("peft",),
            recipe={"lora.rank": 16}, chosen=(Condition("lora_rank", "is at least", 1),), model=_adapters,
            change_rank=6, source="peft; arXiv 2106.09685",
        ),
        Technique(
            name="qlora", page="lora",
            saves="As LoRA, and the frozen weights of every `nn.Linear` except `lm_head` take 0.516 bytes per "
            "parameter instead of 4 (or 2 with `bf16`): 4 bits, 1/64 byte for a scale per 64 weights, and 1/4096 byte "
            "for an fp32 scale per 256 of those scales.",
            costs="Weights are dequantised before each matmul.",
            effect_on_result="As LoRA, and the frozen weights are rounded to 16 levels (NF4, blocks of 64, scales "
            "in 8 bits).",
            needs=("peft", "bitsandbytes"), recipe={"lora.rank": 16, "lora.quantize": True},
            chosen=(Condition("quantized", "is", True),), loading=_nf4, model=_without_cpu_packing,
            change_rank=7, source="bitsandbytes; arXiv 2305.14314",
        ),
    ),
    exclusions=(
        Exclusion(
            when=(Condition("quantized", "is", True), Condition("fsdp", "is", True)),
            reason="Accelerate leaves 4-bit weights out of the sharding, so FSDP2 would save nothing",
            instead="sharding.fsdp: false with sharding.gpus, which copies the 4-bit weights to each GPU",
            source="accelerate 1.15 utils/fsdp_utils.py: fsdp2_prepare_model",
        ),
        Exclusion(
            when=(Condition("quantized", "is", True), Condition("lora_rank", "is", None)),
            reason="4-bit weights get no gradient, so nothing would be trained",
            instead="lora.rank: 16",
            source="arXiv 2305.14314", untraceable=True,
        ),
    ),
    key_switches=(
        KeySwitch(
            keys=("lora.alpha", "lora.targets", "lora.quantize"), on=Condition("lora_rank", "is at least", 1),
            instead="lora.rank: 16",
        ),
    ),
)  # fmt: skip
