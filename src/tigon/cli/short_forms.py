"""The flags that are short forms of `--set`, in one table."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tigon.objectives import post_training_rules
from tigon.recipe.keys import SECTIONS
from tigon.techniques.keys.section import hints
from tigon.techniques.lora.lora import DEFAULT_RANK


@dataclass(frozen=True, kw_only=True)
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


GPUS = ShortForm(flag="gpus", key="sharding.gpus", help="Number of GPUs.")
BATCH = ShortForm(flag="batch", key="train.batch_size", help="Samples per micro-batch on each GPU.")
ACCUMULATE = ShortForm(
    flag="accumulate", key="train.gradient_accumulation", help="Micro-batches per step.", metavar="N"
)  # fmt: skip
LORA = ShortForm(flag="lora", key="lora.rank", help="Train LoRA adapters of rank R.", metavar="R")
QLORA = ShortForm(
    flag="qlora", key="lora.quantize", help="Keep the base weights in 4 bits; without --lora the rank is 16.",
    implies={"lora.rank": DEFAULT_RANK},
)  # fmt: skip
MEDUSA = ShortForm(
    flag="medusa", key="heads.count", help="Train K Medusa heads.", metavar="K", implies={"heads.stage": 1}
)
STAGE = ShortForm(
    flag="stage", key="heads.stage", help="With --medusa: 1 trains only the heads (default), 2 the model too."
)
OBJECTIVE = ShortForm(
    flag="objective", key="train.objective", metavar="NAME",
    help=f"causal_lm, or post-training: {', '.join(post_training_rules.TAKES)}.",
)  # fmt: skip
IMAGES = ShortForm(
    flag="images", key="data.images", help="Rows with up to N images, for a model that reads them.", metavar="N"
)
IMAGE_SIZE = ShortForm(
    flag="image-size", key="data.image_size", help="With --images: the pixels of their longer side.",
    metavar="PIXELS",
)  # fmt: skip
PLAN = (
    BATCH,
    ShortForm(flag="seq", key="data.sequence_length", help="Tokens per sample."),
    ShortForm(flag="precision", key="train.precision", help="fp32, amp-bf16, amp-fp16, bf16 or fp8.",
              predicted=("fp32", "amp-bf16", "amp-fp16", "bf16", "fp8")),
    ShortForm(flag="fp8-scaling", key="train.fp8_scaling", help="tensorwise or rowwise.",
              implies={"train.precision": "fp8"}),
    ShortForm(flag="optimizer", key="train.optimizer", help="docs/techniques/optimizers.md", metavar="NAME"),
    ShortForm(flag="checkpointing", key="train.checkpointing",
              help="auto, none, full, every-N, selective, offload, offload-attention, or STATE:N,STATE:N,..."),
    ShortForm(flag="kernels", key="model.kernels", help="none, no-flce, tigon or liger."),
    ShortForm(flag="attention", key="model.attention", help="sdpa or eager.", predicted=("sdpa", "eager")),
    LORA, QLORA, GPUS,
    ShortForm(flag="zero", key="sharding.zero", help="DeepSpeed ZeRO stage: 0, 1, 2 or 3."),
    ShortForm(flag="fsdp", key="sharding.fsdp", help="PyTorch FSDP2."),
    ShortForm(flag="offload", key="sharding.offload", help="none, cpu or nvme."),
    ACCUMULATE,
    ShortForm(flag="accumulation-fusion", key="train.gradient_accumulation_fusion",
              help="Add weight gradients to .grad in the product."),
    ShortForm(flag="loss-memory-mib", key="train.loss_memory_mib", help="MiB of the fused loss; 0: default.",
              metavar="N"),
    ShortForm(flag="cuda-graphs", key="train.cuda_graphs", help="Launch each decoder layer as a CUDA graph."),
    MEDUSA, STAGE, OBJECTIVE, IMAGES, IMAGE_SIZE,
)  # fmt: skip
"""The flags of `tigon plan` that set recipe keys, in the order of its help."""
FLAG_OF: Mapping[str, ShortForm] = {short.key: short for short in PLAN}


def keys_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe keys that flags set, with their values. A flag that was left out is None, or False for a switch."""
    given = {short.key: flags.get(short.parameter) for short in PLAN}
    return {key: value for key, value in given.items() if value is not None and value is not False}


def assignment(short: ShortForm, value: Any) -> list[str]:
    """A flag as `--set`; nothing if it was left out."""
    return [] if value is None else [f"{short.key}={value}"]
