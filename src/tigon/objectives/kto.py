"""Kahneman-Tversky optimization (arXiv 2402.01306), by TRL's KTOTrainer: single answers, each labelled good or bad."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.data.preferences import UNPAIRED
from tigon.integrations.trl.traced import KTO_OUTPUTS
from tigon.objectives.base import TracedModels
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.post_training.planned import PlannedWithReference, labels_of, logprobs_of, padded


@dataclass(frozen=True)
class PlannedKTO(PlannedWithReference):
    """Four passes: answers that belong to other prompts, for the KL term, and the answers, by model and reference."""

    @property
    def least_batch(self) -> int:
        return 2

    def batch_refusal(self, batch: int) -> str | None:
        if batch >= 2:
            return None
        return "kto estimates its KL term from the other answers of a micro-batch, which needs 2 or more samples"

    def sequences(self, batch: int) -> int:
        return 2 * batch if self.estimates_kl else batch

    @property
    def estimates_kl(self) -> bool:
        return dict(self.keys).get("loss_type") != "apo_zero_unpaired"

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        names = ("input_ids", "attention_mask", "completion_mask")
        others = tuple(f"KL_{name}" for name in names) if self.estimates_kl else ()
        return padded(batch, seq, *names, *others)

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        others_BT = labels_of(inputs, "KL_") if self.estimates_kl else None
        if others_BT is not None:
            with torch.no_grad():
                logprobs_of(models, models.trained, inputs["KL_input_ids"], others_BT)
        labels_BT = labels_of(inputs)
        logprobs_BT, *logged = logprobs_of(models, models.trained, inputs["input_ids"], labels_BT, KTO_OUTPUTS)
        if others_BT is not None:
            self.reference_logprobs(models, inputs["KL_input_ids"], others_BT)
        reference_BT = self.reference_logprobs(models, inputs["input_ids"], labels_BT)
        del logged
        return (1 - torch.sigmoid(0.1 * (logprobs_BT.sum(1) - reference_BT.sum(1)))).mean()


class KTO(PostTraining):
    """Make good answers more likely and bad ones less likely than they are before training."""

    trainer = "KTOTrainer"
    row_format = UNPAIRED
    planned_class = PlannedKTO
    takes_reference = True


OBJECTIVE = KTO
