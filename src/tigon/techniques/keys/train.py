"""The keys of `train` that techniques read."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from tigon.techniques.keys.section import CONFIG, MAX_COUNT, Section, key
from tigon.techniques.optimizers.table import OPTIMIZERS

AUTO = "auto"
STATES = ("full", "mlp", "elementwise", "none")
"""The parts that a layer recomputes, most first.

full         the whole layer; it keeps its input
mlp          the MLP, and the norms; it keeps attention's tensors
elementwise  the norms and the gated unit; it keeps the results of matrix products and attention
none         nothing
"""
_COUNT, _STATE = "[1-9][0-9]{0,3}", f"({'|'.join(STATES)})"


@dataclass(frozen=True, config=CONFIG)
class TrainKeys(Section):
    precision: str = key(
        AUTO, "`amp-bf16`, `amp-fp16`: autocast over fp32 weights; `bf16`: weights, gradients and optimizer in bf16 "
        "too; `fp8`: as `bf16`, with the decoder layers' matmuls in FP8; `auto`: amp-bf16 on a GPU that supports "
        "bf16, otherwise fp32.",
        choices=(AUTO, "fp32", "amp-bf16", "amp-fp16", "bf16", "fp8"), traced=True,
    )  # fmt: skip
    tf32: bool = key(False, "Let the GPU round the inputs of fp32 matmuls to 10 mantissa bits. Faster.", planned=False)
    fp8_scaling: str = key(
        "tensorwise", "With `train.precision: fp8`: `tensorwise`, one scale per tensor; `rowwise`, one per row, which "
        "is more accurate and slower.", choices=("tensorwise", "rowwise"), traced=True,
    )  # fmt: skip
    fp8_bf16_layers: int = key(
        1, "With `train.precision: fp8`: how many decoder layers at each end keep their matmuls in bf16.",
        minimum=0, maximum=1000, traced=True,
    )  # fmt: skip
    optimizer: str = key(
        "adamw", "Optimizer; docs/techniques/optimizers.md compares them.", choices=tuple(OPTIMIZERS)
    )  # fmt: skip
    galore_rank: int = key(
        128, "Rank of the gradients' subspace, for the galore optimizers.", minimum=1, maximum=MAX_COUNT
    )
    galore_gap: int = key(
        200, "Steps between updates of that subspace.", minimum=1, maximum=MAX_COUNT, planned=False
    )  # fmt: skip
    checkpointing: str = key(
        AUTO, "Activation checkpointing: `auto`: on a GPU the fastest that fits, chosen by the planner; on a CPU "
        "`none`. `full`: recompute every layer in the backward pass; `every-N`: one layer in N, e.g. `every-2`; "
        "`selective`: everything except the matmuls; `offload`: every layer, with its input kept on the host; "
        "`offload-attention`: the same, with attention's results kept on the host too; or what each layer recomputes, "
        "such as `full:7,mlp:3,elementwise:4,none:2`.",
        choices=(AUTO, "none", "full", "selective", "offload", "offload-attention", "every-N", "STATE:N,STATE:N,..."),
        pattern=rf"auto|none|full|selective|offload|offload-attention|every-{_COUNT}"
        rf"|{_STATE}:{_COUNT}(,{_STATE}:{_COUNT})*",
        note=f"with N of 1 to 9999 and STATE one of {', '.join(STATES)}", traced=True,
    )  # fmt: skip
    mlp_tile_tokens: int = key(
        0, "Tokens of a micro-batch that a layer's MLP processes at a time, forward and backward; 0: all.",
        minimum=0, maximum=MAX_COUNT, traced=True,
    )  # fmt: skip
    attention_groups: int = key(
        1, "Attention's backward pass computes its heads in this many groups: a divisor of the key heads, or a "
        "multiple of them that divides the query heads.", minimum=1, maximum=MAX_COUNT, traced=True,
    )  # fmt: skip
    gradient_accumulation: int = key(1, "Micro-batches per optimizer step.", minimum=1, maximum=MAX_COUNT)
    gradient_accumulation_fusion: bool = key(
        False, "Add the weight gradients of linear layers and of tigon's loss to `.grad` in the product that computes "
        "them, from the second micro-batch of a step on.", traced=True,
    )  # fmt: skip
    loss_memory_mib: int = key(
        0, "MiB that the fused loss may hold for logits and for the gradient of the head; 0: no limit. Without a "
        "limit a head of 128,256 x 2,048 takes up to 2,004 MiB.", minimum=0, maximum=MAX_COUNT, traced=True,
    )  # fmt: skip
    cuda_graphs: bool = key(
        False, "Launch each decoder layer as a CUDA graph. Needs one GPU, and `train.checkpointing` `full` or `none`."
    )
