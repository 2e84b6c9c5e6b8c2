"""What a run chooses: one field a technique. The recipe, the trainer and the planner share these words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PRECISIONS = ("fp32", "amp-bf16", "amp-fp16", "bf16")
KERNELS = ("none", "no-flce", "tigon", "liger")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
OFFLOADS = ("none", "cpu", "nvme")
LORA_TARGETS = ("linear", "head", "embeddings")
CHECKPOINTINGS = ("none", "full", "selective", "offload", "every-N")
# Least and most of the numbers that a recipe and a plan share; None: no limit but what tensors have.
LIMITS: Mapping[str, tuple[int, int | None]] = {
    "batch": (1, None), "seq": (8, None), "gpus": (1, 64), "accumulate": (1, None), "lora_rank": (1, 4096),
    "galore_rank": (1, None), "heads": (1, 16),
}  # fmt: skip
CHECKPOINTING_PATTERN = r"none|full|selective|offload|every-[1-9][0-9]{0,3}"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """One run's techniques. The defaults are the recipe's."""

    precision: str = "amp-bf16"
    """`fp32`; `amp-bf16`, `amp-fp16`: autocast over fp32 weights; `bf16`: weights, gradients and states in bf16."""
    optimizer: str = "adamw"
    """A row of the optimizer table."""
    galore_rank: int = 128
    """Rank of the subspace, when the optimizer is a GaLore one."""
    checkpointing: str = "none"
    """`none`; `full`: recompute every layer; `every-N`: recompute one layer in N; `selective`: keep the products,
    recompute the rest; `offload`: `full`, with the layers' inputs kept on the host."""
    mlp_tile_tokens: int = 0
    """Tokens that an MLP takes at a time, forward and backward; 0: all."""
    kernels: str = "tigon"
    """`none`: the model as transformers has it; `no-flce`: all but the linear cross entropy; `tigon`: every op;
    `liger`: Liger Kernel, for comparison."""
    attention: str = "sdpa"
    attention_groups: int = 1
    """Groups of key heads, with their query heads, that attention takes one after the other."""
    lora_rank: int | None = None
    """None: full fine-tuning."""
    lora_targets: tuple[str, ...] = ("linear",)
    """Where adapters go, when `lora_rank` is set: the layers' linear modules, the head, the embeddings."""
    quantized: bool = False
    """QLoRA: the frozen weights in NF4. Needs `lora_rank`."""
    gpus: int = 1
    zero: int = 0
    """DeepSpeed's stage: 0 none, 1 optimizer states, 2 gradients too, 3 weights too."""
    fsdp: bool = False
    """PyTorch FSDP2."""
    reshard: bool = True
    """FSDP2 frees the gathered weights of a layer after its forward pass, and gathers them again for the backward."""
    offload: str = "none"
    """Where the states that `zero` or `fsdp` partition live: `none` (on the GPU), `cpu`, `nvme`."""
    accumulate: int = 1
    """Micro-batches in an optimizer step."""


# The recipe key behind each field: what messages and documents call it.
RECIPE_KEYS: Mapping[str, str] = {
    "precision": "train.precision",
    "optimizer": "train.optimizer",
    "galore_rank": "train.galore_rank",
    "checkpointing": "train.checkpointing",
    "mlp_tile_tokens": "train.mlp_tile_tokens",
    "kernels": "model.kernels",
    "attention": "model.attention",
    "attention_groups": "train.attention_groups",
    "lora_rank": "lora.rank",
    "lora_targets": "lora.targets",
    "quantized": "lora.quantize",
    "gpus": "sharding.gpus",
    "zero": "sharding.zero",
    "fsdp": "sharding.fsdp",
    "reshard": "sharding.reshard",
    "offload": "sharding.offload",
    "accumulate": "train.gradient_accumulation",
}


def every_n_layers(checkpointing: str) -> int | None:
    """N of `every-N`, None for the other words."""
    found = re.fullmatch(r"every-(\d+)", checkpointing)
    return int(found[1]) if found else None
