"""Group relative policy optimization (arXiv 2402.03300) and its variants, by TRL's GRPOTrainer."""

from __future__ import annotations

from typing import Any

from tigon.data.preferences import PROMPTS
from tigon.errors import RecipeError
from tigon.models.loading.presets import PRESETS
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section


class GRPO(PostTraining):
    """Make the completions with more reward than the others of their prompt more likely."""

    def check(self, config: Any) -> None:
        recipe = self.recipe
        whole = recipe.lora.rank is None and recipe.model.name in PRESETS and not self.own.base_steps
        if self.own.beta and whole:
            raise RecipeError(
                f"post_training.beta is {self.own.beta:g}, for which GRPO loads the model a second time, but the "
                "random weights of a preset are in no file; set beta: 0, base_steps, or lora.rank"
            )

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl", trainer="GRPOTrainer", config="GRPOConfig", rows=PROMPTS, rewards=self.own.rewards,
            options={
                "num_generations": self.own.generations, "max_completion_length": self.own.completion_length,
                **self.given("beta", "loss_type", "temperature"),
            },
        )  # fmt: skip

    def metric_section(self) -> MetricSection:
        return section(
            "Rewards", "reward, completion length and entropy over steps",
            "The reward is the sum of the reward functions, its mean over completions. The entropy is per token, in "
            "nats.",
            ("reward", column("reward", "mean reward")),
            ("completions/mean_length", column("completion length", "tokens per completion")),
            ("entropy", column("entropy", "entropy (nats)")),
        )  # fmt: skip


OBJECTIVE = GRPO
