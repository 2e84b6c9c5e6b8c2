"""Heads for the planner: attaching them to a traced model, options that they exclude, and their recipe keys."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tigon.errors import UsageError
from tigon.medusa.attach import attach, scoring
from tigon.medusa.heads import MedusaHeads, MtpHeads
from tigon.medusa.record import HeadMetrics
from tigon.medusa.spec import HeadsSpec, Objective, shares_head
from tigon.models.loading.config import build_on_meta
from tigon.techniques.choices import LIMITS, Choices
from tigon.techniques.condition import Condition

_LORA = Condition("lora_rank", "is at least", 1)
# (stages, kinds, choices, reason): combinations that are refused. recipe/keys.py has the same rules with recipe keys.
_EXCLUSIONS: tuple[tuple[tuple[int, ...], tuple[str, ...], tuple[Condition, ...], str], ...] = (
    ((1,), ("medusa", "mtp"), (_LORA,), "stage 1 freezes the model, so adapters would not learn; use stage 2"),
    (
        (1,), ("medusa", "mtp"), (Condition("checkpointing", "is not", "none"),),
        "stage 1 keeps no activations of the model, so checkpointing would save nothing; use checkpointing none",
    ),
    (
        (2,), ("medusa", "mtp"), (_LORA, Condition("zero", "is", 3)),
        "adapters and heads together are not written from sharded weights; use ZeRO-2 or less",
    ),
    (
        (2,), ("medusa", "mtp"), (_LORA, Condition("fsdp", "is", True)),
        "adapters and heads together are not written from sharded weights; use ZeRO-2 or less",
    ),
    (
        (2,), ("mtp",), (_LORA,),
        "MTP modules start from a copy of the last layer, whose weights LoRA freezes; use Medusa heads",
    ),
    (
        (1, 2), ("medusa", "mtp"), (Condition("optimizer", "is", "galore-layerwise"),),
        "galore-layerwise has one learning rate for model and heads; use galore",
    ),
    (
        (1, 2), ("medusa", "mtp"), (Condition("kernels", "is", "liger"),),
        "Liger Kernel lacks a loss for several heads; use kernels tigon, no-flce or none",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Attachment:
    """Heads that can be attached to a traced model."""

    spec: HeadsSpec
    objective: Objective

    def __call__(self, model: Any) -> MedusaHeads | MtpHeads:
        return attach(model, self.spec, self.objective)

    def scoring(self, model: Any) -> AbstractContextManager[HeadMetrics]:
        """Context in which `model`, in evaluation, computes the heads' losses (`tigon.medusa.attach.scoring`)."""
        return scoring(model)

    def __str__(self) -> str:
        what = "MTP modules" if self.spec.kind == "mtp" else "Medusa heads"
        output = "the model's lm_head" if self.spec.shared else "an output weight each"
        return f"{self.spec.count} {what} with {output}, stage {self.objective.stage}"

    def refusals(self, choices: Choices) -> tuple[str, ...]:
        """The reasons why heads cannot be trained with these choices, one sentence each."""
        return tuple(
            f"heads: {reason}"
            for stages, kinds, when, reason in _EXCLUSIONS
            if self.objective.stage in stages and self.spec.kind in kinds and all(c.holds(choices) for c in when)
        )

    def recipe_keys(self) -> Mapping[str, Any]:
        """Dotted recipe keys -> values that define these heads."""
        spec = self.spec
        output = "shared" if spec.shared else "separate"
        own = {} if spec.kind == "mtp" else {"heads.layers": spec.layers, "heads.output": output}
        return {
            "heads.stage": self.objective.stage, "heads.kind": spec.kind, "heads.count": spec.count, **own
        }  # fmt: skip


def planned(name: str, config: Any, count: int, stage: int) -> Attachment:
    """The Medusa heads of a recipe that sets only `heads.count` and `heads.stage`.

    Raises UsageError if count or stage is out of range.
    """
    least, most = LIMITS["heads"]
    if count < least or (most is not None and count > most):
        raise UsageError(f"--medusa is {count}; it must be {least} to {most} heads.")
    if stage not in (1, 2):
        raise UsageError(f"--stage is {stage}; it must be 1 (only the heads learn) or 2 (model and heads).")
    model: Any = build_on_meta(name, config)
    numel = sum(p.numel() for p in model.parameters())
    shared = shares_head("auto", "medusa", count, numel, model.get_output_embeddings().weight.numel())
    return Attachment(HeadsSpec(count=count, shared=shared), Objective(stage=stage))
