"""Reward models (arXiv 2203.02155), by TRL's RewardTrainer: one score for a prompt with its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from tigon.data.preferences import PAIRS
from tigon.errors import RecipeError, UsageError
from tigon.models.loading.classifier import labels_of, task_of
from tigon.models.loading.reward_model import with_score
from tigon.objectives.base import TracedModels
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.post_training.planned import UNCOMPARED, PlannedPostTraining, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PlannedReward(PlannedPostTraining):
    """Chosen and rejected answers in one pass of a model with one score in place of the logits."""

    def attach(self, model: PreTrainedModel) -> Any:
        scored = with_score(model)
        config = scored.config.get_text_config()
        config.pad_token_id = config.pad_token_id or 0  # the run takes the tokenizer's
        return scored

    def head(self, model: PreTrainedModel) -> Any:
        return model.score

    def sequences(self, batch: int) -> int:
        return 2 * batch

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        return padded(2 * batch, seq, "input_ids", "attention_mask")

    def notes(self) -> tuple[str, ...]:
        return (UNCOMPARED,)

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        outputs = models.call(lambda: models.trained(input_ids=inputs["input_ids"], use_cache=False))
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()


class Reward(PostTraining):
    """Give the chosen answer a larger score than the rejected one."""

    trainer = "RewardTrainer"
    row_format = PAIRS
    planned_class = PlannedReward
    writes_text = False

    def with_head(self, built: PreTrainedModel) -> Any:
        if task_of(built.config) is not None and len(labels_of(built.config)) != 1:
            raise RecipeError(
                f"train.objective: reward trains one score, and {self.config.name} is a classifier of "
                f"{len(labels_of(built.config))} labels; name the model from before its classification"
            )
        try:
            return with_score(built)
        except UsageError as error:
            raise RecipeError(f"train.objective: reward: {error}") from None


OBJECTIVE = Reward
