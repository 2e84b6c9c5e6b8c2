"""The keys of `train` that techniques read."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from tigon.techniques.keys.section import CONFIG, MAX_COUNT, Section, key
from tigon.techniques.optimizers.table import OPTIMIZERS, Optimizer

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
    precision: str = key(AUTO, choices=(AUTO, "fp32", "amp-bf16", "amp-fp16", "bf16", "fp8"), traced=True)
    """`amp-bf16`, `amp-fp16`: autocast over fp32 weights; `bf16`: weights, gradients and optimizer in bf16 too; `fp8`:
    as `bf16`, with the decoder layers' matmuls in FP8; `auto`: amp-bf16 on a GPU that supports bf16, otherwise fp32."""
    tf32: bool = key(False, planned=False)
    """Let the GPU round the inputs of fp32 matmuls to 10 mantissa bits. Faster."""
    fp8_scaling: str = key("tensorwise", choices=("tensorwise", "rowwise"), traced=True)
    """With `train.precision: fp8`: `tensorwise`, one scale per tensor; `rowwise`, one per row, which is more accurate
    and slower."""
    fp8_bf16_layers: int = key(1, minimum=0, maximum=1000, traced=True)
    """With `train.precision: fp8`: how many decoder layers at each end keep their matmuls in bf16."""
    qat: str = key("none", choices=("none", "fp8", "int4", "mxfp4"), traced=True)
    """Quantisation-aware training: compute the forward pass with the decoder layers' weights rounded to this format, as
    `tigon export --format` writes them; with adapters, the merged weights."""
    optimizer: str = key("adamw", choices=tuple(OPTIMIZERS))
    """Optimizer; docs/techniques/optimizers.md compares them."""
    galore_rank: int = key(128, minimum=1, maximum=MAX_COUNT)
    """Rank of the gradients' subspace, for the galore optimizers."""
    galore_gap: int = key(200, minimum=1, maximum=MAX_COUNT, planned=False)
    """Steps between updates of that subspace."""
    checkpointing: str = key(
        AUTO,
        choices=(AUTO, "none", "full", "selective", "offload", "offload-attention", "every-N", "STATE:N,STATE:N,..."),
        pattern=rf"auto|none|full|selective|offload|offload-attention|every-{_COUNT}"
        rf"|{_STATE}:{_COUNT}(,{_STATE}:{_COUNT})*",
        note=f"with N of 1 to 9999 and STATE one of {', '.join(STATES)}",
        traced=True,
    )
    """Activation checkpointing: `auto`: on a GPU the fastest that fits, chosen by the planner; on a CPU `none`. `full`:
    recompute every layer in the backward pass; `every-N`: one layer in N, e.g. `every-2`; `selective`: everything
    except the matmuls; `offload`: every layer, with its input kept on the host; `offload-attention`: the same, with
    attention's results kept on the host too; or what each layer recomputes, such as
    `full:7,mlp:3,elementwise:4,none:2`."""
    mlp_tile_tokens: int = key(0, minimum=0, maximum=MAX_COUNT, traced=True)
    """Tokens of a micro-batch that a layer's MLP processes at a time, forward and backward; 0: all."""
    attention_groups: int = key(1, minimum=1, maximum=MAX_COUNT, traced=True)
    """Attention's backward pass computes its heads in this many groups: a divisor of the key heads, or a multiple of
    them that divides the query heads."""
    gradient_accumulation: int = key(1, minimum=1, maximum=MAX_COUNT)
    """Micro-batches per optimizer step."""
    gradient_accumulation_fusion: bool = key(False, traced=True)
    """Add the weight gradients of linear layers and of tigon's loss to `.grad` in the product that computes them, from
    the second micro-batch of a step on."""
    loss_memory_mib: int = key(0, minimum=0, maximum=MAX_COUNT, traced=True)
    """MiB that the fused loss may hold for logits and for the gradient of the head; 0: no limit. Without a limit a head
    of 128,256 x 2,048 takes up to 2,004 MiB."""
    cuda_graphs: bool | None = key(None)
    """Launch each decoder layer as a CUDA graph. Needs one GPU, and `train.checkpointing` `full` or `none`. `null`:
    only with `train.checkpointing: auto`, if all batches have one shape and the planner finds it faster. If a layer
    cannot be captured, the run goes on without graphs, and a warning says why."""

    @property
    def optimizer_row(self) -> Optimizer:
        """What the table says about the optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def in_fp8(self) -> bool:
        """Whether the decoder layers' matmuls are in FP8."""
        return self.precision == "fp8"

    @property
    def auto_checkpointing(self) -> bool:
        """Whether the planner has yet to choose `checkpointing`."""
        return self.checkpointing == AUTO

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes layers, or parts of them, again."""
        return self.checkpointing != "none"
