"""Odds ratio preference optimization (arXiv 2403.07691), by TRL's ORPOTrainer: no reference model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from tigon.data.preferences import PAIRS
from tigon.integrations.trl.traced import TracedModel, preference_logprobs
from tigon.objectives.base import TracedModels
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.post_training.planned import PlannedPostTraining, padded


@dataclass(frozen=True)
class PlannedORPO(PlannedPostTraining):
    """Chosen and rejected answers in one pass. The head computes every position, because TRL logs a mean over all."""

    def sequences(self, batch: int) -> int:
        return 2 * batch

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        return padded(2 * batch, seq, "input_ids", "attention_mask", "labels")

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        traced = TracedModel.of(models.trained)
        next_labels_BT = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        logprobs_BT, means_BT = models.call(lambda: preference_logprobs(traced, inputs["input_ids"], next_labels_BT))
        chosen, rejected = logprobs_BT.mean(1).chunk(2)
        del means_BT
        loss: Tensor = -chosen.mean() - F.logsigmoid(chosen - rejected).mean()
        return loss


class ORPO(PostTraining):
    """Learn the chosen answer, and raise its odds against the rejected one."""

    package = "trl.experimental.orpo"
    trainer = "ORPOTrainer"
    row_format = PAIRS
    planned_class = PlannedORPO


OBJECTIVE = ORPO
