"""The number formats of weights, gradients, states and products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tigon.techniques.choices import Choices
from tigon.techniques.condition import Condition
from tigon.techniques.technique import Facts, Technique

# What the model's weights are loaded in, by the word of `train.precision`.
WEIGHT_DTYPES: Mapping[str, str] = {
    "fp32": "float32", "amp-bf16": "float32", "amp-fp16": "float32", "bf16": "bfloat16",
}  # fmt: skip


def _fp32(choices: Choices, facts: Facts) -> Mapping[str, Any]:
    return {"tf32": facts.tf32} if facts.device == "cuda" else {}


TECHNIQUES = (
    Technique(
        name="fp32", page="precision",
        saves="Nothing: 16 bytes a parameter with AdamW (weight 4, gradient 4, two moments 8).",
        costs="Products have 67 TFLOP/s on an H100, 494 with `train.tf32`, where bf16 ones have 989.",
        precision="The reference. With `train.tf32: true` the factors of products have 10 bits of mantissa.",
        recipe={"train.precision": "fp32"}, chosen=(Condition("precision", "is", "fp32"),), arguments=_fp32,
        source="NVIDIA H100 data sheet; torch.backends.cuda.matmul",
    ),
    Technique(
        name="amp-bf16", page="precision",
        saves="Activations in bf16: half of fp32's. States stay 16 bytes a parameter.",
        costs="A bf16 copy of each weight per forward pass, kept for the backward one.",
        precision="Products and activations with 8 bits of mantissa; weights and states in fp32.",
        recipe={"train.precision": "amp-bf16"}, chosen=(Condition("precision", "is", "amp-bf16"),),
        arguments=lambda choices, facts: {"bf16": True}, source="torch.autocast",
    ),
    Technique(
        name="amp-fp16", page="precision",
        saves="As `amp-bf16`, on GPUs without bf16.",
        costs="As `amp-bf16`, and a loss scale: a step whose gradient overflows is skipped.",
        precision="Products with 11 bits of mantissa and 5 of exponent.", devices=("cuda",),
        recipe={"train.precision": "amp-fp16"}, chosen=(Condition("precision", "is", "amp-fp16"),),
        arguments=lambda choices, facts: {"fp16": True}, source="torch.amp.GradScaler; arXiv 1710.03740",
    ),
    Technique(
        name="bf16", page="precision",
        saves="Half of everything: 8 bytes a parameter with AdamW, and activations in bf16.",
        costs="Nothing in time.",
        precision="Weights have 8 bits of mantissa: updates below 1/256 of a weight are rounded away.",
        recipe={"train.precision": "bf16"}, chosen=(Condition("precision", "is", "bf16"),),
        arguments=lambda choices, facts: {"bf16": choices.zero > 0},  # DeepSpeed's own switch goes by this one
        source="arXiv 2010.06192",
    ),
)  # fmt: skip
