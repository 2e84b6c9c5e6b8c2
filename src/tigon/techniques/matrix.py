"""Which techniques exclude each other: the pairs as data, each with its reason, what to do instead, and its source.

A run is refused before anything is loaded, because most of these pairs do not fail: they train something else than
what was asked for, or fail hours later at the first save.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from tigon.errors import RecipeError
from tigon.techniques import TECHNIQUES
from tigon.techniques.choices import RECIPE_KEYS, Choices
from tigon.techniques.condition import Condition, yaml_word
from tigon.techniques.optimizers import OPTIMIZERS
from tigon.techniques.technique import PACKAGE_EXTRAS


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Choices that all of `when` hold for are refused."""

    when: tuple[Condition, ...]
    reason: str
    instead: str
    source: str

    def applies(self, choices: Choices) -> bool:
        return all(condition.holds(choices) for condition in self.when)


_GALORE = Condition("optimizer", "is one of", ("galore", "galore-layerwise"))
_LAYERWISE = Condition("optimizer", "is", "galore-layerwise")

_BITSANDBYTES = tuple(row.name for row in OPTIMIZERS.values() if row.package == "bitsandbytes")

EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        when=(_GALORE, Condition("zero", "is at least", 1)),
        reason="ZeRO hands the optimizer flat slices of all parameters, and GaLore projects whole matrices",
        instead="sharding.zero: 0, or train.optimizer: adamw-8bit with ZeRO",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py; github.com/jiaweizzhao/GaLore/issues/2",
    ),
    Exclusion(
        when=(Condition("optimizer", "is", "adafactor"), Condition("zero", "is at least", 1)),
        reason="ZeRO hands the optimizer flat slices, of which Adafactor keeps whole second moments: no saving, and "
        "other updates than without ZeRO",
        instead="train.optimizer: adamw-8bit, or sharding.zero: 0",
        source="transformers 5.17 optimization.py: Adafactor._get_options; losses of both compared on a small model",
    ),
    Exclusion(
        when=(_GALORE, Condition("fsdp", "is", True)),
        reason="FSDP2 hands the optimizer a slice of each matrix, and GaLore projects whole matrices",
        instead="sharding.fsdp: false, or train.optimizer: adamw-torchao-8bit with FSDP2",
        source="tigon.techniques.galore; torch.distributed.fsdp.fully_shard",
    ),
    Exclusion(
        when=(Condition("optimizer", "is one of", _BITSANDBYTES), Condition("fsdp", "is", True)),
        reason="bitsandbytes' operators have no rule for the sharded tensors of FSDP2: the first step fails",
        instead="train.optimizer: adamw-torchao-8bit, or sharding.zero: 2 instead of sharding.fsdp",
        source="bitsandbytes 0.50.2 with PyTorch 2.13, run on two processes",
    ),
    Exclusion(
        when=(Condition("optimizer", "is", "adafactor"), Condition("fsdp", "is", True)),
        reason="Adafactor mixes sharded and whole tensors: the first step fails",
        instead="train.optimizer: adamw-torchao-4bit",
        source="transformers 5.17 optimization.py with PyTorch 2.13, run on two processes",
    ),
    Exclusion(
        when=(Condition("quantized", "is", True), Condition("fsdp", "is", True)),
        reason="Accelerate leaves 4-bit weights out of the sharding, so that FSDP2 would save nothing",
        instead="sharding.fsdp: false with sharding.gpus, which copies the 4-bit weights to each GPU",
        source="accelerate 1.15 utils/fsdp_utils.py: fsdp2_prepare_model",
    ),
    Exclusion(
        when=(_GALORE, Condition("lora_rank", "is at least", 1)),
        reason="LoRA's matrices are no larger than a projection, so that GaLore would be plain AdamW",
        instead="train.optimizer: adamw",
        source="arXiv 2403.03507 §4.2",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("accumulate", "is at least", 2)),
        reason="each micro-batch's gradient is used and freed at once, so that there is nothing to accumulate",
        instead="train.gradient_accumulation: 1, or train.optimizer: galore",
        source="transformers 5.17 trainer_optimizer.py; arXiv 2403.03507 §4.4",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("gpus", "is at least", 2)),
        reason="each weight is updated before its gradient has been summed over the GPUs",
        instead="sharding.gpus: 1, or train.optimizer: galore",
        source="transformers 5.17 trainer_optimizer.py",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("precision", "is", "amp-fp16")),
        reason="each weight is updated in the backward pass, before the loss scale is divided out of its gradient",
        instead="train.precision: amp-bf16, or train.optimizer: galore",
        source="torch.amp.GradScaler",
    ),
    Exclusion(
        when=(
            Condition("zero", "is at least", 1),
            Condition("offload", "is not", "none"),
            Condition("optimizer", "is not one of", ("adamw", "adamw-foreach")),
        ),
        reason="with offload, Accelerate and DeepSpeed replace every optimizer by DeepSpeedCPUAdam, which has fp32 "
        "states and, unless AdamW was asked for, L2 regularisation instead of decoupled weight decay",
        instead="train.optimizer: adamw, or sharding.offload: none",
        source="accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed",
    ),
    Exclusion(
        when=(
            Condition("zero", "is at least", 1), Condition("offload", "is not", "none"),
            Condition("precision", "is", "bf16"),
        ),
        reason="states in bf16 on the host need a DeepSpeedCPUAdam that is made for them, and Accelerate makes it for "
        "fp32 ones, so that DeepSpeed refuses it",
        instead="train.precision: amp-bf16, or sharding.offload: none",
        source="deepspeed 0.19.8 runtime/base_optimizer.py: _configure_master_weights",
    ),
    Exclusion(
        when=(Condition("quantized", "is", True), Condition("lora_rank", "is", None)),
        reason="4-bit weights have no gradient, so that nothing would be trained",
        instead="lora.rank: 16",
        source="arXiv 2305.14314",
    ),
    Exclusion(
        when=(Condition("fsdp", "is", True), Condition("zero", "is at least", 1)),
        reason="both partition the same states",
        instead="one of sharding.fsdp and sharding.zero",
        source="transformers 5.17 training_args.py",
    ),
    Exclusion(
        when=(
            Condition("offload", "is not", "none"), Condition("zero", "is", 0), Condition("fsdp", "is", False),
        ),
        reason="offload moves the states that ZeRO or FSDP2 manage, and neither is on",
        instead="sharding.zero: 2 (states) or 3 (weights too), or train.checkpointing: offload for activations",
        source="deepspeed.ai/docs/config-json; torch.distributed.fsdp.CPUOffloadPolicy",
    ),
    Exclusion(
        when=(Condition("offload", "is", "nvme"), Condition("zero", "is not", 3)),
        reason="only DeepSpeed's stage 3 swaps to files",
        instead="sharding.zero: 3, or sharding.offload: cpu",
        source="deepspeed.ai/docs/config-json, offload_optimizer and offload_param",
    ),
    Exclusion(
        when=(Condition("attention_groups", "is at least", 2), Condition("attention", "is not", "sdpa")),
        reason="it is the sdpa function that is called group by group",
        instead="model.attention: sdpa",
        source="tigon.techniques.head_groups",
    ),
    Exclusion(
        when=(Condition("kernels", "is", "liger"), Condition("zero", "is", 3)),
        reason="Liger reads the head's weight past its module, where stage 3 has left it empty",
        instead="model.kernels: tigon, or sharding.zero: 2",
        source="github.com/linkedin/Liger-Kernel/issues/767, issues/1048",
    ),
)  # fmt: skip


def refusals(choices: Choices) -> tuple[str, ...]:
    """Why these choices cannot be carried out, whatever the machine: one sentence each, with what to do instead."""
    found = [_sentence(exclusion, choices) for exclusion in EXCLUSIONS if exclusion.applies(choices)]
    if choices.optimizer not in OPTIMIZERS:
        found.insert(0, f"train.optimizer is {choices.optimizer}; it must be one of {', '.join(OPTIMIZERS)}")
    return tuple(found)


def check(choices: Choices, *, device: str) -> None:
    """Raise RecipeError with the first reason against `choices` on a `device` ("cpu" or "cuda") of this machine."""
    for reason in refusals(choices):
        raise RecipeError(reason)
    for technique in TECHNIQUES.values():
        if not technique.used_by(choices):
            continue
        said = ", ".join(f"{key}: {yaml_word(value)}" for key, value in technique.recipe.items())
        if device not in technique.devices:
            raise RecipeError(f"{said} needs a GPU, and this run is on the CPU")
        for package in technique.needs:
            if importlib.util.find_spec(package) is None:
                extra = PACKAGE_EXTRAS[package]
                raise RecipeError(f"{said} needs {package}, not installed here: pip install 'tigon[{extra}]'")


def exclusion_table() -> str:
    """The Markdown table of docs/techniques/README.md."""
    rows = ["| these together | are refused, because | instead | source |", "|---|---|---|---|"]
    for exclusion in EXCLUSIONS:
        when = " and ".join(str(condition) for condition in exclusion.when)
        rows.append(f"| {when} | {exclusion.reason} | {exclusion.instead} | {exclusion.source} |")
    return "\n".join(rows)


def _sentence(exclusion: Exclusion, choices: Choices) -> str:
    chosen = [f"{RECIPE_KEYS[c.field]}: {yaml_word(getattr(choices, c.field))}" for c in exclusion.when]
    together = chosen[0] if len(chosen) == 1 else f"{', '.join(chosen[:-1])} with {chosen[-1]}"
    return f"{together}: {exclusion.reason}; use {exclusion.instead}"
