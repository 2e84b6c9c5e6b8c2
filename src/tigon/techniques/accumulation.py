"""Gradient accumulation: several micro-batches per optimizer step, with equal weight for each token."""

from __future__ import annotations

from typing import Any

from tigon.techniques.keys.settings import Settings
from tigon.techniques.mechanisms.fused_embedding import fuse_embeddings
from tigon.techniques.mechanisms.fused_linear import fuse_linears
from tigon.techniques.records.condition import Condition, Exclusion
from tigon.techniques.records.technique import Declaration, RunInfo, Search, Spans, Technique


def fuses(settings: Settings) -> bool:
    """Whether a run uses gradient accumulation fusion. With one micro-batch there is nothing to add to."""
    return settings.train.gradient_accumulation_fusion and settings.train.gradient_accumulation > 1


def _fuse(model: Any, settings: Settings, run_info: RunInfo) -> Any:
    fuse_linears(model)
    fuse_embeddings(model)
    return model


def _trace(model: Any, settings: Settings, spans: Spans) -> None:
    if settings.train.gradient_accumulation_fusion:
        fuse_linears(model)
        fuse_embeddings(model)


_FUSED = Condition("train.gradient_accumulation_fusion", "is", True)

DECLARATION = Declaration(
    pages={"accumulation": "Gradient accumulation"},
    keys=("train.gradient_accumulation", "train.gradient_accumulation_fusion"),
    last=True,
    searches=(Search(key="train.gradient_accumulation", how="split"),),
    labels={
        "train.gradient_accumulation": lambda settings: (
            f"{settings.train.gradient_accumulation} micro-batches" if settings.train.gradient_accumulation > 1 else ""
        ),
        "train.gradient_accumulation_fusion": lambda settings: (
            "gradient accumulation fusion" if settings.train.gradient_accumulation_fusion else ""
        ),
    },
    techniques=(
        Technique(
            name="accumulation", page="accumulation",
            saves="Activations of all micro-batches except one.",
            costs="Each pass has less work. Below a few thousand tokens per micro-batch the GPU idles.",
            effect_on_result="None, except for rounding: losses are sums divided by the trained tokens of the whole "
            "step, so "
            "every split of the step's samples into micro-batches gives the same gradient.",
            recipe={"train.gradient_accumulation": 4},
            chosen=(Condition("train.gradient_accumulation", "is at least", 2),),
            arguments=lambda settings, run_info: {"gradient_accumulation_steps": settings.train.gradient_accumulation},
            source="transformers 5.17 trainer.py: num_items_in_batch",
        ),
        Technique(
            name="accumulation-fusion", page="accumulation",
            saves="The second gradient of a weight: from the second micro-batch on it is not made, cast and added. "
            "With tied embeddings autograd would hold the head's gradient through the whole backward pass.",
            costs="Python code in the forward and the backward pass of each linear layer, which small layers on a GPU "
            "wait for; inside CUDA graphs none. Biases, norms, experts and MLPs in tiles accumulate as before.",
            recipe={"train.gradient_accumulation": 4, "train.gradient_accumulation_fusion": True},
            chosen=(_FUSED, Condition("train.gradient_accumulation", "is at least", 2)), model=_fuse, trace=_trace,
            source="Megatron-LM: gradient_accumulation_fusion",
        ),
    ),
    exclusions=(
        Exclusion(
            when=(_FUSED, Condition("sharding.zero", "is at least", 1)),
            reason="DeepSpeed takes each gradient away in hooks, which must see the gradient of one micro-batch",
            instead="train.gradient_accumulation_fusion: false, or sharding.zero: 0",
            source="deepspeed 0.19 stage_1_and_2.py",
        ),
        Exclusion(
            when=(_FUSED, Condition("lora.rank", "is at least", 1)),
            reason="adapters are small, and their gradients accumulate in the usual way",
            instead="train.gradient_accumulation_fusion: false", source="tigon.ops.linear.lora_linear",
        ),
    ),
)  # fmt: skip
