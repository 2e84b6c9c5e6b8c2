"""Direct preference optimization (arXiv 2305.18290) and its variants, by TRL's DPOTrainer."""

from __future__ import annotations

from tigon.data.preferences import PAIRS
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section


class DPO(PostTraining):
    """Prefer the chosen answer to the rejected one, more than the model before training does."""

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl", trainer="DPOTrainer", config="DPOConfig", rows=PAIRS, takes_reference=True,
            options={
                "max_length": self.recipe.data.sequence_length, **self.given("beta", "loss_type", "label_smoothing")
            },
        )  # fmt: skip

    def metric_section(self) -> MetricSection:
        return section(
            "Preferences", "reward margin, accuracy and loss over steps",
            "The reward of an answer is beta times the change of its log-probability. The margin is the reward of the "
            "chosen answer minus that of the rejected one. The accuracy is the share of pairs with a positive margin.",
            ("rewards/margins", column("reward margin")),
            ("rewards/accuracies", column("accuracy", "pairs with a positive margin (%)", is_share=True)),
            ("loss", column("loss")),
        )  # fmt: skip


OBJECTIVE = DPO
