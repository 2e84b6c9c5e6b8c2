"""Gradient accumulation: several micro-batches per optimizer step, with equal weight for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tigon.techniques.accumulation.fused_embedding import fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Search, Spans, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fuses(settings: Settings) -> bool:
    """Whether a run uses gradient accumulation fusion. With one micro-batch there is nothing to add to."""
    return settings.train.gradient_accumulation_fusion and settings.train.gradient_accumulation > 1


def pays(settings: Settings) -> bool:
    """Whether accumulation fusion makes a run faster, by the measurements of docs/techniques/accumulation.md.

    In bf16 with recomputation, the Python code of each layer costs more than the fused additions save. FP8 and fp32
    were not measured.
    """
    train = settings.train
    kept = train.precision == "bf16" and train.checkpointing == "none"
    return train.gradient_accumulation > 1 and (kept or train.precision.startswith("amp-"))


def fuse(model: PreTrainedModel) -> Callable[[], None]:
    """Let the linear layers and embeddings of a model add to `.grad`. Returns a function that undoes it.

    They do so only inside `ops.accumulation_fusion.accumulation_fusion()`.
    """
    fused = [*fuse_linears(model), *fuse_embeddings(model)]

    def undo() -> None:
        for module in fused:
            del module.forward

    return undo


def _fuse(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    fuse(model)
    return model


def _trace(model: PreTrainedModel, settings: Settings, spans: Spans) -> None:
    if settings.train.gradient_accumulation_fusion:
        fuse(model)


_FUSED = Condition("train.gradient_accumulation_fusion", "is", True)

DECLARATION = Declaration(
    last=True,
    searches=(Search(key="train.gradient_accumulation", how="split"),),
    labels={
        "train.gradient_accumulation": "{} micro-batches",
        "train.gradient_accumulation_fusion": "gradient accumulation fusion",
    },
    techniques=(
        Technique(
            name="accumulation",
            recipe={"train.gradient_accumulation": 4},
            chosen=(Condition("train.gradient_accumulation", "is at least", 2),),
            arguments=lambda settings, run_info: {"gradient_accumulation_steps": settings.train.gradient_accumulation},
        ),
        Technique(
            name="accumulation-fusion",
            recipe={"train.gradient_accumulation": 4, "train.gradient_accumulation_fusion": True},
            chosen=(_FUSED, Condition("train.gradient_accumulation", "is at least", 2)),
            model=_fuse,
            trace=_trace,
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
            instead="train.gradient_accumulation_fusion: false",
            source="tigon.ops.linear.lora_linear",
        ),
    ),
)
