"""The flags that are short forms of `--set`, in one table."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tigon.objectives.rules import post_training as post_training_rules
from tigon.recipe.keys import SECTIONS
from tigon.techniques.keys.section import hints
from tigon.techniques.lora.lora import DEFAULT_RANK


@dataclass(frozen=True)
class ShortForm:
    """A flag that sets a recipe key."""

    flag: str
    """Without the dashes."""
    key: str
    help: str
    metavar: str | None = None
    predicted: tuple[str, ...] = ()
    """The values that the planner can predict, if they are fewer than the recipe's."""
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Other recipe keys that the flag sets unless they are given."""

    @property
    def parameter(self) -> str:
        """The flag as a name of Python."""
        return self.flag.replace("-", "_")

    @property
    def type(self) -> Any:
        """The key's type, without null and lists."""
        section, _, name = self.key.partition(".")
        hint = hints(SECTIONS[section])[name]
        return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


GPUS = ShortForm("gpus", "sharding.gpus", "Number of GPUs.")
BATCH = ShortForm("batch", "train.batch_size", "Samples per micro-batch on each GPU.")
ACCUMULATE = ShortForm("accumulate", "train.gradient_accumulation", "Micro-batches per step.", "N")
LORA = ShortForm("lora", "lora.rank", "Train LoRA adapters of rank R.", "R")
QLORA = ShortForm(
    "qlora",
    "lora.quantize",
    "Keep the base weights in 4 bits; without --lora the rank is 16.",
    implies={"lora.rank": DEFAULT_RANK},
)
MEDUSA = ShortForm("medusa", "heads.count", "Train K Medusa heads.", "K", implies={"heads.stage": 1})
STAGE = ShortForm("stage", "heads.stage", "With --medusa: 1 trains only the heads (default), 2 the model too.")
OBJECTIVE = ShortForm(
    "objective",
    "train.objective",
    f"causal_lm, classify, classify_tokens, or post-training: {', '.join(post_training_rules.TAKES)}.",
    "NAME",
)
IMAGES = ShortForm("images", "data.images", "Rows with up to N images, for a model that reads them.", "N")
IMAGE_SIZE = ShortForm("image-size", "data.image_size", "With --images: the pixels of their longer side.", "PIXELS")
_PRECISIONS = ("fp32", "amp-bf16", "amp-fp16", "bf16", "fp8")
_CHECKPOINTING = "auto, none, full, every-N, selective, offload, offload-attention, or STATE:N,STATE:N,..."
_FUSION = "Add weight gradients to .grad in the product."
PLAN = (
    BATCH,
    ShortForm("seq", "data.sequence_length", "Tokens per sample."),
    ShortForm("precision", "train.precision", "fp32, amp-bf16, amp-fp16, bf16 or fp8.", predicted=_PRECISIONS),
    ShortForm("fp8-scaling", "train.fp8_scaling", "tensorwise or rowwise.", implies={"train.precision": "fp8"}),
    ShortForm("optimizer", "train.optimizer", "docs/techniques/optimizers.md", "NAME"),
    ShortForm("checkpointing", "train.checkpointing", _CHECKPOINTING),
    ShortForm("kernels", "model.kernels", "none, no-flce, tigon or liger."),
    ShortForm("attention", "model.attention", "sdpa or eager.", predicted=("sdpa", "eager")),
    LORA,
    QLORA,
    GPUS,
    ShortForm("zero", "sharding.zero", "DeepSpeed ZeRO stage: 0, 1, 2 or 3."),
    ShortForm("fsdp", "sharding.fsdp", "PyTorch FSDP2."),
    ShortForm("offload", "sharding.offload", "none, cpu or nvme."),
    ACCUMULATE,
    ShortForm("accumulation-fusion", "train.gradient_accumulation_fusion", _FUSION),
    ShortForm("loss-memory-mib", "train.loss_memory_mib", "MiB of the fused loss; 0: default.", "N"),
    ShortForm("cuda-graphs", "train.cuda_graphs", "Launch each decoder layer as a CUDA graph."),
    MEDUSA,
    STAGE,
    OBJECTIVE,
    IMAGES,
    IMAGE_SIZE,
)
"""The flags of `tigon plan` that set recipe keys, in the order of its help."""
FLAG_OF: Mapping[str, ShortForm] = {short.key: short for short in PLAN}


def keys_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe keys that flags set, with their values. A flag that was left out is None, or False for a switch."""
    given = {short.key: flags.get(short.parameter) for short in PLAN}
    return {key: value for key, value in given.items() if value is not None and value is not False}


def assignment(short: ShortForm, value: object) -> list[str]:
    """A flag as `--set`; nothing if it was left out."""
    return [] if value is None else [f"{short.key}={value}"]
