"""Reward models (arXiv 2203.02155), by TRL's RewardTrainer: one score for a prompt with its answer."""

from __future__ import annotations

from typing import Any

from tigon.data.preferences import PAIRS
from tigon.errors import RecipeError
from tigon.objectives.base import MetricSection, TrlTraining
from tigon.objectives.post_training import PostTraining, column, section


class Reward(PostTraining):
    """Give the chosen answer a larger score than the rejected one."""

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package="trl",
            trainer="RewardTrainer",
            config="RewardConfig",
            rows=PAIRS,
            writes_text=False,
            options={"max_length": self.recipe.data.sequence_length},
        )

    def attach(self, built: Any) -> Any:
        """A model with the layers of `built` and one score in place of the logits, for sequence classification."""
        import torch
        from transformers import AutoModelForSequenceClassification

        config = type(built.config).from_dict({**built.config.to_dict(), "num_labels": 1})
        config._attn_implementation = built.config._attn_implementation
        try:
            with torch.device("meta"):
                scored = AutoModelForSequenceClassification.from_config(config)
        except ValueError:
            raise RecipeError(
                f"train.objective: reward: transformers has no sequence classification for {config.model_type} models"
            ) from None
        prefix = scored.base_model_prefix
        weight = built.get_input_embeddings().weight
        score = torch.nn.Linear(weight.shape[1], 1, bias=scored.score.bias is not None)
        score.weight.data.normal_(std=getattr(config, "initializer_range", 0.02))
        setattr(scored, prefix, getattr(built, prefix))
        scored.score = score.to(device=weight.device, dtype=weight.dtype)
        scored.config.use_cache = False
        return scored

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
