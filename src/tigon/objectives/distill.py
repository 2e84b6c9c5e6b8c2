"""On-policy distillation (arXiv 2306.13649), by TRL's DistillationTrainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tigon.data.preferences import PROMPTS
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section
from tigon.recipe.keys import ModelConfig


class Distillation(PostTraining):
    """Match a teacher's next-token distribution on completions that the model itself writes."""

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl", trainer="DistillationTrainer", config="DistillationConfig", rows=PROMPTS,
            teacher=self.teacher,
            options={
                "max_completion_length": self.own.completion_length, **self.given("beta", "temperature"),
            },
        )  # fmt: skip

    def teacher(self, run: Path) -> ModelConfig:
        if self.own.teacher is None:
            return self.trained_first(run)
        return replace(self.recipe.model, name=self.own.teacher, config=None, revision=None)

    def model(self, run: Path) -> ModelConfig:
        return self.recipe.model  # `base/` is the teacher

    def announcement(self) -> str | None:
        teacher = self.own.teacher or f"{self.recipe.model.name} after {self.own.base_steps} steps"
        return f"{self.name:<8} TRL's {self.trl.trainer}, teacher: {teacher}"

    def metric_section(self) -> MetricSection:
        return section(
            "Distillation", "divergence from the teacher and entropy over steps",
            "The divergence from the teacher and the model's entropy are means per token, in nats.",
            ("loss", column("divergence", "divergence (nats)")),
            ("entropy", column("entropy", "entropy (nats)")),
        )  # fmt: skip


OBJECTIVE = Distillation
