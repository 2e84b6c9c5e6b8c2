"""What a run chooses: one field a technique. The recipe, the trainer and the planner share these words."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("fp32", "amp-bf16", "amp-fp16", "bf16")
KERNELS = ("none", "no-flce", "tigon", "liger")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
OFFLOADS = ("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """One run's techniques. The defaults are the recipe's."""

    precision: str = "amp-bf16"
    """`fp32`; `amp-bf16`, `amp-fp16`: autocast over fp32 weights; `bf16`: weights, gradients and states in bf16."""
    optimizer: str = "adamw"
    """A row of the optimizer table."""
    checkpointing: str = "none"
    """`none`; `full`: recompute every layer; `every-N`: recompute one layer in N; `selective`: keep the products,
    recompute the rest; `offload`: `full`, with the layers' inputs kept on the host."""
    kernels: str = "tigon"
    """`none`: the model as transformers has it; `no-flce`: all but the linear cross entropy; `tigon`: every op;
    `liger`: Liger Kernel, for comparison."""
    attention: str = "sdpa"
    lora_rank: int | None = None
    """None: full fine-tuning."""
    quantized: bool = False
    """QLoRA: the frozen weights in NF4. Needs `lora_rank`."""
    gpus: int = 1
    zero: int = 0
    """DeepSpeed's stage: 0 none, 1 optimizer states, 2 gradients too, 3 weights too."""
    fsdp: bool = False
    """PyTorch FSDP2, resharding after forward."""
    offload: str = "none"
    """Where the states that `zero` or `fsdp` partition live: `none` (on the GPU), `cpu`, `nvme`."""
    accumulate: int = 1
    """Micro-batches in an optimizer step."""
