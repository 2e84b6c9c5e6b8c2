"""The number formats of weights, gradients, optimizer states and matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tigon.errors import RecipeError
from tigon.ops.linear.fp8 import has_fp8
from tigon.techniques.condition import Condition, Exclusion, Switch
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Search, Technique


@dataclass(frozen=True)
class NumberFormat:
    """The dtypes that a value of `train.precision` names."""

    weights: torch.dtype
    """The dtype of trained weights, their gradients and the optimizer's states."""
    compute_dtype: torch.dtype
    """The dtype of matmuls' inputs before any cast to FP8, and of quantised weights when they are dequantised."""
    eps: float
    """The machine epsilon of matmuls' inputs: the distance from 1 to the next number in their format."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast over fp32 weights; None: the run has none."""
        return None if self.compute_dtype == self.weights else self.compute_dtype


NUMBER_FORMATS: Mapping[str, NumberFormat] = {
    "fp32": NumberFormat(torch.float32, torch.float32, 2**-23),
    "amp-bf16": NumberFormat(torch.float32, torch.bfloat16, 2**-7),
    "amp-fp16": NumberFormat(torch.float32, torch.float16, 2**-10),
    "bf16": NumberFormat(torch.bfloat16, torch.bfloat16, 2**-7),
    "fp8": NumberFormat(torch.bfloat16, torch.bfloat16, 2**-3),
}


def number_format(settings: Settings) -> NumberFormat:
    """The number format of a run."""
    return NUMBER_FORMATS[settings.train.precision]


def check_gpu(settings: Settings, device: torch.device) -> None:
    """Raise RecipeError if the GPU lacks the run's precision."""
    precision = settings.train.precision
    if device.type != "cuda":
        return
    if precision in ("amp-bf16", "bf16") and not torch.cuda.is_bf16_supported(False):
        raise RecipeError(f"train.precision is {precision}, which {torch.cuda.get_device_name()} lacks; use amp-fp16")
    if precision == "fp8" and not has_fp8(device):
        raise RecipeError(
            f"train.precision is fp8, whose products {torch.cuda.get_device_name()} lacks (NVIDIA's GPUs from Ada, 8.9 "
            "on have them); use bf16"
        )


def _tf32_argument(settings: Settings, run_info: RunInfo) -> Mapping[str, Any]:
    return {"tf32": settings.train.tf32} if run_info.device == "cuda" else {}


_IS_FP8 = Condition("train.precision", "is", "fp8")
DECLARATION = Declaration(
    machine=check_gpu,
    searches=(
        # fp32 is slower and larger than amp-bf16, and every GPU of the planner's table has bf16. fp8 rounds the inputs
        # of most decoder layers' matmuls to 3 or 4 significant bits, so it is not a candidate.
        Search(key="train.precision", how="run", candidates=lambda config: ("amp-bf16", "bf16")),
    ),
    labels={
        "train.precision": lambda settings: settings.train.precision,
        "train.fp8_scaling": lambda settings: (
            "rowwise" if settings.train.in_fp8 and settings.train.fp8_scaling == "rowwise" else ""
        ),
    },
    techniques=(
        Technique(
            name="fp32",
            recipe={"train.precision": "fp32"},
            chosen=(Condition("train.precision", "is", "fp32"),),
            arguments=_tf32_argument,
        ),
        Technique(
            name="amp-bf16",
            recipe={"train.precision": "amp-bf16"},
            chosen=(Condition("train.precision", "is", "amp-bf16"),),
            arguments=lambda settings, run_info: {"bf16": True},
        ),
        Technique(
            name="amp-fp16",
            devices=("cuda",),
            recipe={"train.precision": "amp-fp16"},
            chosen=(Condition("train.precision", "is", "amp-fp16"),),
            arguments=lambda settings, run_info: {"fp16": True},
        ),
        Technique(
            name="bf16",
            effect_on_result="Weights are bf16: an update below 1/512 of a weight is always rounded away, one "
            "above 1/256 never.",
            recipe={"train.precision": "bf16"},
            chosen=(Condition("train.precision", "is", "bf16"),),
            change_rank=3,
            # DeepSpeed reads its bf16 mode from this argument.
            arguments=lambda settings, run_info: {"bf16": settings.sharding.zero > 0},
        ),
        Technique(
            name="fp8",
            effect_on_result="The factors of the decoder layers' matmuls are rounded to FP8: 3 bits of mantissa, or 2 "
            "in gradients with one scale per tensor. The first and the last layer, attention, the head and the updates "
            "are as in `bf16`. On the CPU the same numbers are computed without FP8 hardware, for tests.",
            recipe={"train.precision": "fp8"},
            chosen=(_IS_FP8,),
            change_rank=5,
        ),
    ),
    exclusions=(
        Exclusion(
            when=(_IS_FP8, Condition("sharding.zero", "is at least", 1)),
            reason="tigon has not tried FP8 matmuls with the weights that DeepSpeed manages",
            instead="sharding.fsdp: true, or train.precision: bf16",
            source="docs/techniques/precision.md",
        ),
        Exclusion(
            when=(_IS_FP8, Condition("lora.quantize", "is", True)),
            reason="a 4-bit weight would be dequantised and then cast to FP8 for each product, which tigon has not "
            "tried",
            instead="lora.quantize: false, or train.precision: bf16",
            source="docs/techniques/precision.md",
        ),
    ),
    switches=(
        Switch(
            ("train.fp8_scaling", "train.fp8_bf16_layers"),
            "train.precision",
            _IS_FP8.holds,
            "train.precision: fp8",
        ),
    ),
)
