"""Group relative policy optimization (arXiv 2402.03300) and its variants, by TRL's GRPOTrainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tigon.data.preferences import PROMPTS
from tigon.errors import RecipeError
from tigon.integrations.trl.traced import GRPO_OUTPUTS
from tigon.models.loading.presets import PRESETS
from tigon.objectives.base import FrozenModel, PlannedObjective, TracedModels
from tigon.objectives.post_training.objective import PostTraining
from tigon.objectives.post_training.planned import (
    COMPARED,
    UNCOMPARED,
    PlannedWithCompletions,
    PlannedWithReference,
    logprobs_of,
)
from tigon.ops import PrefixGroup, PrefixRow
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class PlannedGRPO(PlannedWithCompletions, PlannedWithReference):
    """One pass over prompts with completions. A sample is a completion; the run writes them before the micro-batches.

    With beta above 0 the reference's log-probabilities are computed before the micro-batches, one of them at a time.
    """

    generations: int = 8
    has_reference: bool = False
    shared_prefix: bool = False

    @property
    def least_batch(self) -> int:
        return self.generations

    @property
    def per_prompt(self) -> int:
        return self.generations

    def batch_refusal(self, batch: int) -> str | None:
        if batch % self.generations == 0:
            return None
        return f"grpo counts completions, so {batch} samples have to be a multiple of generations, {self.generations}"

    def frozen_models(self, trained: FrozenModel, settings: Settings) -> tuple[FrozenModel, ...]:
        return super().frozen_models(trained, settings) if self.has_reference else ()

    def notes(self) -> tuple[str, ...]:
        return (UNCOMPARED if self.shared_prefix else COMPARED,)

    def _row(self, batch: int, prompt: int) -> PrefixRow:
        """The prompts once, without their last token, with which each completion begins."""
        branches = (1 + self.completion_tokens,) * self.generations
        return PrefixRow((PrefixGroup(prompt - 1, branches),) * (batch // self.generations))

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        kept = self.completion_tokens
        row = self._row(*inputs["prompt_ids"].shape) if self.shared_prefix else None
        if self.has_reference:
            self.reference_logprobs(models, ids_BT, ids_BT, kept, row)
        (logprobs_BT, *logged) = logprobs_of(models, models.trained, ids_BT, ids_BT, GRPO_OUTPUTS, kept, row)
        ratio_BT = torch.exp(logprobs_BT - logprobs_BT.detach())
        del logged
        return -torch.min(ratio_BT, ratio_BT.clamp(0.8, 1.2)).mean()


class GRPO(PostTraining):
    """Make the completions with more reward than the others of their prompt more likely."""

    trainer = "GRPOTrainer"
    row_format = PROMPTS

    def check(self, config: PreTrainedConfig) -> None:
        recipe = self.recipe
        whole = not recipe.lora.used and recipe.model.name in PRESETS and not self.own.base_steps
        if self.own.beta and whole:
            raise RecipeError(
                f"post_training.beta is {self.own.beta:g}, for which GRPO loads the model a second time, but the "
                "random weights of a preset are in no file; set beta: 0, base_steps, or lora.rank"
            )

    def planned(self) -> PlannedObjective:
        return PlannedGRPO(
            self.name,
            self.planned_keys(),
            generations=self.own.generations,
            completion_tokens=self.own.completion_length,
            generator=self.generator(),
            other_writer=self.other_writer(),
            has_reference=bool(self.own.beta),
            shared_prefix=self.own.shared_prefix,
        )


OBJECTIVE = GRPO
