"""Direct preference optimization (arXiv 2305.18290) and its variants, by TRL's DPOTrainer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from tigon.data.preferences import PAIRS
from tigon.integrations.trl.traced import DPO_OUTPUTS
from tigon.objectives.base import TracedModels
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.post_training.planned import PlannedWithReference, labels_of, logprobs_of, padded


@dataclass(frozen=True)
class PlannedDPO(PlannedWithReference):
    """Chosen and rejected answers in one pass of the model, then the same sequences in one of the reference.

    The variants of the loss differ in a few numbers per pair, so the sigmoid stands for all of them.
    """

    def sequences(self, batch: int) -> int:
        return 2 * batch

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        return padded(2 * batch, seq, "input_ids", "attention_mask", "completion_mask")

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        labels_BT = labels_of(inputs)
        logprobs_BT, *logged = logprobs_of(models, models.trained, inputs["input_ids"], labels_BT, DPO_OUTPUTS)
        reference_BT = self.reference_logprobs(models, inputs["input_ids"], labels_BT)
        chosen, rejected = (logprobs_BT.sum(1) - reference_BT.sum(1)).chunk(2)
        del logged
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class DPO(PostTraining):
    """Prefer the chosen answer to the rejected one, more than the model before training does."""

    trainer = "DPOTrainer"
    row_format = PAIRS
    planned_class = PlannedDPO
    takes_reference = True


OBJECTIVE = DPO
