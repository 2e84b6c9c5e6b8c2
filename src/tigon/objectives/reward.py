"""Reward models (arXiv 2203.02155), by TRL's RewardTrainer: one score for a prompt with its answer."""

from __future__ import annotations

from typing import Any

from tigon.data.preferences import PAIRS
from tigon.errors import RecipeError, UsageError
from tigon.models.loading.reward_model import with_score
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section


class Reward(PostTraining):
    """Give the chosen answer a larger score than the rejected one."""

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl", trainer="RewardTrainer", config="RewardConfig", rows=PAIRS, writes_text=False,
            options={"max_length": self.recipe.data.sequence_length},
        )  # fmt: skip

    def attach(self, built: Any) -> Any:
        try:
            return with_score(built)
        except UsageError as error:
            raise RecipeError(f"train.objective: reward: {error}") from None

    def metric_section(self) -> MetricSection:
        return section(
            "Scores", "margin, accuracy and loss over steps",
            "The margin is the score of the chosen answer minus that of the rejected one. The accuracy is the share of "
            "pairs with a positive margin.",
            ("margin", column("margin")),
            ("accuracy", column("accuracy", "pairs with a positive margin (%)", is_share=True)),
            ("loss", column("loss")),
        )  # fmt: skip


OBJECTIVE = Reward
