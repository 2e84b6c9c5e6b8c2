"""Odds ratio preference optimization (arXiv 2403.07691), by TRL's ORPOTrainer: no reference model."""

from __future__ import annotations

from tigon.data.preferences import PAIRS
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section


class ORPO(PostTraining):
    """Learn the chosen answer, and raise its odds against the rejected one."""

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl.experimental.orpo", trainer="ORPOTrainer", config="ORPOConfig", rows=PAIRS,
            options={"max_length": self.recipe.data.sequence_length, **self.given("beta")},
        )  # fmt: skip

    def metric_section(self) -> MetricSection:
        return section(
            "Preferences", "accuracy, reward margin and loss over steps",
            "The reward of an answer is beta times its mean log-probability per token. The accuracy is the share of "
            "pairs whose chosen answer has the larger reward.",
            ("rewards/margins", column("reward margin")),
            ("rewards/accuracies", column("accuracy", "pairs with a positive margin (%)", is_share=True)),
            ("loss", column("loss")),
        )  # fmt: skip


OBJECTIVE = ORPO
