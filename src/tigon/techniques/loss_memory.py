"""A limit for the memory of the fused loss: its logits, and the sum of the head's gradient.

Without activation checkpointing the loss is the peak of a step: all activations exist when its buffers are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Spans, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIB = 1 << 20


def limit_loss_memory(model: PreTrainedModel, memory_mib: int) -> None:
    """Let the head of a patched model compute its loss within `memory_mib`, on this instance only."""
    for layer in model.get_output_embeddings().modules():
        if isinstance(layer, nn.Linear):
            vars(layer)["loss_memory_bytes"] = memory_mib * MIB  # read by models/seams/head/loss.py


def _limit(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    limit_loss_memory(model, settings.train.loss_memory_mib)
    return model


def _trace(model: PreTrainedModel, settings: Settings, spans: Spans) -> None:
    if settings.train.loss_memory_mib:
        limit_loss_memory(model, settings.train.loss_memory_mib)


_LIMITED = Condition("train.loss_memory_mib", "is at least", 1)

DECLARATION = Declaration(
    last=True,
    labels={"train.loss_memory_mib": "loss in {} MiB"},
    techniques=(
        Technique(
            name="loss-memory",
            recipe={"train.loss_memory_mib": 512},
            chosen=(_LIMITED,),
            model=_limit,
            trace=_trace,
        ),
    ),
    exclusions=(
        Exclusion(
            when=(_LIMITED, Condition("model.kernels", "is one of", ("none", "no-flce", "liger"))),
            reason="only tigon's linear cross entropy has this limit",
            instead="model.kernels: tigon, or train.loss_memory_mib: 0",
            source="models/seams/head/loss.py",
        ),
        Exclusion(
            when=(_LIMITED, Condition("train.objective", "is not one of", ("auto", "causal_lm"))),
            reason="this limits the loss of the next token, which this objective does not use",
            instead="train.loss_memory_mib: 0",
            source="models/seams/head/loss.py",
        ),
    ),
)
