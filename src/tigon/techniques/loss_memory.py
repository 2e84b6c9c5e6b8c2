"""A limit for the memory of the fused loss: its logits, and the sum of the head's gradient.

Without activation checkpointing the loss is the peak of a step: all activations exist when its buffers are added.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion, KeyExclusion
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, RunInfo, Technique

MIB = 1 << 20


def limit_loss_memory(model: Any, memory_mib: int) -> None:
    """Let the head of a patched model compute its loss within `memory_mib`, on this instance only."""
    for layer in model.get_output_embeddings().modules():
        if isinstance(layer, nn.Linear):
            vars(layer)["loss_memory_bytes"] = memory_mib * MIB  # read by models/seams/head/loss.py


def _limit(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    limit_loss_memory(model, choices.loss_memory_mib)
    return model


_LIMITED = Condition("loss_memory_mib", "is at least", 1)
_MEMORY = Setting(
    field="loss_memory_mib", key="train.loss_memory_mib",
    help="MiB that the fused loss may hold for logits and for the gradient of the head; 0: no limit. Without a limit a "
    "head of 128,256 x 2,048 takes up to 2,004 MiB.",
    minimum=0, traced=True, flag=Flag(name="loss-memory-mib", metavar="N", help="MiB of the fused loss; 0: default."),
    label=lambda choices: f"loss in {choices.loss_memory_mib} MiB" if choices.loss_memory_mib else "",
)  # fmt: skip

DECLARATION = Declaration(
    settings=(_MEMORY,),
    techniques=(
        Technique(
            name="loss-memory", page="tiling",
            saves="Logits and the sum of the head's gradient, which are the peak of a step without activation "
            "checkpointing. The loss takes the fastest chunks that fit into the limit.",
            costs="Smaller chunks: each adds to the sum of the head's gradient, and products of less than 2,048 tokens "
            "are slower. If the fp32 sum does not fit, up to 7 chunks are summed in bf16, within twice the usual "
            "error.",
            recipe={"train.loss_memory_mib": 512}, chosen=(_LIMITED,), model=_limit,
            source="ops/head/plan.py",
        ),
    ),
    exclusions=(
        Exclusion(
            when=(_LIMITED, Condition("kernels", "is one of", ("none", "no-flce", "liger"))),
            reason="only tigon's linear cross entropy has this limit",
            instead="model.kernels: tigon, or train.loss_memory_mib: 0", source="models/seams/head/loss.py",
        ),
    ),
    key_exclusions=(
        KeyExclusion(
            when=_LIMITED, key="train.objective", test="is not one of", wanted=("auto", "causal_lm"),
            reason="train.loss_memory_mib limits the loss of the next token, which this train.objective does not use; "
            "set train.loss_memory_mib: 0",
        ),
    ),
)  # fmt: skip
