"""On-policy distillation (arXiv 2306.13649), by TRL's DistillationTrainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tigon.data.preferences import PROMPTS
from tigon.errors import UsageError
from tigon.integrations.trl.traced import TracedModel, divergence
from tigon.models.loading.config import load_config
from tigon.objectives.base import FrozenModel, PlannedObjective, TracedModels
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.post_training.planned import (
    UNCOMPARED,
    PlannedTeacher,
    PlannedWithCompletions,
)
from tigon.recipe.keys import ModelConfig
from tigon.techniques.keys.settings import Settings


@dataclass(frozen=True)
class PlannedDistillation(PlannedWithCompletions):
    """One pass of the student and one of the teacher over the student's completions, then their divergence."""

    beta: float = 1.0
    teacher: PlannedTeacher | None = None
    """None: the model itself, after other training."""

    def frozen_models(self, trained: FrozenModel, settings: Settings) -> tuple[FrozenModel, ...]:
        if self.teacher is None:
            return (trained,)
        theirs, ours = (one.get_text_config().vocab_size for one in (self.teacher.config, trained.config))
        if theirs != ours:
            raise UsageError(
                f"post_training.teacher: {self.teacher.name} has a vocabulary of {theirs}, but {trained.name} has "
                f"{ours}; name a teacher with the model's tokenizer."
            )
        return (FrozenModel(name=self.teacher.name, config=self.teacher.config),)

    def description(self) -> str:
        own = super().description()
        return own if self.teacher is not None else f"{own}, a teacher of the model's shape"

    def notes(self) -> tuple[str, ...]:
        own = "TRL's distillation runs without autocast on one process: amp-bf16 and amp-fp16 compute in fp32."
        return (UNCOMPARED, own)

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        student, teacher = (TracedModel.of(model) for model in (models.trained, *models.frozen))
        # TRL replaces the forward that Accelerate put under autocast, so with one process neither model runs under it.
        return divergence(student, teacher, ids_BT, self.completion_tokens, self.beta).mean()


class Distillation(PostTraining):
    """Match a teacher's next-token distribution on completions that the model itself writes."""

    trainer = "DistillationTrainer"
    row_format = PROMPTS
    has_teacher = True

    def teacher(self, run: Path) -> ModelConfig:
        if self.own.teacher is not None:
            return replace(self.recipe.model, name=self.own.teacher, config=None, revision=None)
        return self.recipe.model if self.base is None else self.base.trained(self.recipe.model, run)

    @property
    def announcement(self) -> str | None:
        teacher = self.own.teacher or f"{self.recipe.model.name} after {self.own.base_steps} steps"
        return f"{self.name:<8} TRL's {self.trl.trainer}, teacher: {teacher}"

    def planned(self) -> PlannedObjective:
        own = self.own
        return PlannedDistillation(
            self.name,
            self.planned_keys(),
            completion_tokens=own.completion_length,
            generator=self.generator(),
            other_writer=self.other_writer(),
            beta=1.0 if own.beta is None else own.beta,
            teacher=None if own.teacher is None else PlannedTeacher.of(own.teacher, load_config(own.teacher)),
        )


OBJECTIVE = Distillation
