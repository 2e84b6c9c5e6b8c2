"""Kahneman-Tversky optimization (arXiv 2402.01306), by TRL's KTOTrainer: single answers, each labelled good or bad."""

from __future__ import annotations

from tigon.data.preferences import UNPAIRED
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section


class KTO(PostTraining):
    """Make good answers more likely and bad ones less likely than they are before training."""

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl", trainer="KTOTrainer", config="KTOConfig", rows=UNPAIRED, takes_reference=True,
            options={
                "max_length": self.recipe.data.sequence_length,
                **self.given("beta", "loss_type", "desirable_weight", "undesirable_weight"),
            },
        )  # fmt: skip

    def metric_section(self) -> MetricSection:
        return section(
            "Preferences", "reward margin, rewards and loss over steps",
            "The reward of an answer is beta times the change of its log-probability. The margin is the mean reward of "
            "the good answers minus that of the bad ones.",
            ("rewards/margins", column("reward margin")),
            ("rewards/chosen", column("reward of good answers")),
            ("rewards/rejected", column("reward of bad answers")),
            ("loss", column("loss")),
        )  # fmt: skip


OBJECTIVE = KTO
