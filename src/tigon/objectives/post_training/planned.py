"""The base of the post-training objectives as the planner traces them. Each objective's file has its own subclass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tigon.integrations.trl.traced import TracedModel, adapters_off, token_logprobs, token_logprobs_of_row
from tigon.objectives.base import FrozenModel, Generation, PlannedObjective, TracedModels
from tigon.objectives.rules import post_training as rules
from tigon.ops import PrefixRow
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# B sequences, T tokens.


UNCOMPARED = "No GPU run of this objective has been compared with its plan yet."
COMPARED = "On a GPU this plan was compared with steps in TRL, full fine-tuning and LoRA (docs/planner-method.md)."
PADDED = (
    "The plan does not know how many tokens sequences share and computes the prompt of each, so with shared_prefix "
    "memory and time are upper bounds."
)


@dataclass(frozen=True)
class PlannedPostTraining(PlannedObjective):
    """The parts that TRL's trainers share. A subclass defines the micro-batch and its forward passes."""

    next_token: ClassVar[bool] = False
    pads: ClassVar[bool] = True
    objective: str
    """The value of `train.objective`."""
    keys: tuple[tuple[str, Any], ...] = field(default=(), hash=False)  # a value may be a mapping
    """The keys of `post_training` that the recipe gives, with their values."""

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def evaluation_passes(self, model: PreTrainedModel) -> tuple[AbstractContextManager[Any], ...]:
        return (nullcontext(),)

    def refusals(self, settings: Settings) -> tuple[str, ...]:
        return tuple(rules.refusals(self.recipe_keys(), settings))

    def recipe_keys(self) -> Mapping[str, Any]:
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in self.keys}
        return {"train.objective": self.objective, **{f"post_training.{name}": value for name, value in given.items()}}

    def notes(self) -> tuple[str, ...]:
        shares = dict(self.keys).get("shared_prefix", False)
        return (
            *((PADDED,) if shares else ()),
            COMPARED if self.objective == "dpo" else UNCOMPARED,
            "Every token after the first counts as an answer's, so the head's memory is an upper bound.",
        )

    def description(self) -> str:
        return ", ".join([f"objective {self.objective}", *(f"{name} {value}" for name, value in self.keys)])


@dataclass(frozen=True)
class PlannedWithReference(PlannedPostTraining):
    """An objective that compares the model with itself before training.

    Adapters are switched off for the reference. Without adapters the run holds a second, frozen model.
    """

    def frozen_models(self, trained: FrozenModel, settings: Settings) -> tuple[FrozenModel, ...]:
        return () if settings.lora.used else (trained,)

    def reference_logprobs(
        self,
        models: TracedModels,
        ids_BT: Tensor,
        labels_BT: Tensor,
        kept: int | None = None,
        row: PrefixRow | None = None,
    ) -> Tensor:
        """The reference's log-probabilities (B, T - 1), without gradients. kept, row: see `logprobs_of`."""
        model = models.frozen[0] if models.frozen else models.trained
        adapters = nullcontext() if models.frozen else adapters_off(model)
        with torch.no_grad(), adapters:
            (logprobs_BT,) = logprobs_of(models, model, ids_BT, labels_BT, kept=kept, row=row)
        return logprobs_BT


@dataclass(frozen=True)
class PlannedWithCompletions(PlannedPostTraining):
    """An objective that trains on completions that the run writes."""

    completion_tokens: int = 64
    generator: str = "auto"
    other_writer: str = ""

    @property
    def per_prompt(self) -> int:
        """Completions of a prompt."""
        return 1

    def sequence_tokens(self, seq: int) -> int:
        return seq + self.completion_tokens

    def generation(self, seq: int) -> Generation:
        return Generation(
            prompt_tokens=seq,
            new_tokens=self.completion_tokens,
            per_prompt=self.per_prompt,
            generator=self.generator,
            other_writer=self.other_writer,
        )

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        prompts = padded(batch, seq, "prompt_ids", "prompt_mask")
        return {**prompts, **padded(batch, self.completion_tokens, "completion_ids", "completion_mask")}


def logprobs_of(
    models: TracedModels,
    model: PreTrainedModel,
    ids_BT: Tensor,
    labels_BT: Tensor,
    outputs: tuple[str, ...] = (),
    kept: int | None = None,
    row: PrefixRow | None = None,
) -> tuple[Tensor, ...]:
    """One forward pass of `model`: the labels' log-probabilities (B, T - 1), and each of `outputs`.

    kept: how many labels of each sequence count; None: all.
    row: the sequences with shared prefixes, computed by one row; the results are (B, `kept`).
    """
    traced = TracedModel.of(model)

    def run() -> tuple[Tensor, ...]:
        if row is None or kept is None:
            return token_logprobs(traced, ids_BT, labels_BT, outputs, kept)
        return token_logprobs_of_row(traced, row, kept, outputs)

    results: tuple[Tensor, ...] = models.call(run)
    return results


def padded(sequences: int, tokens: int, *names: str) -> dict[str, Tensor]:
    """int64 tensors of shape (sequences, tokens), as a collator of TRL makes them."""
    return {name: torch.empty(sequences, tokens, dtype=torch.int64) for name in names}


def labels_of(inputs: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """The ids of the answers' tokens and -100 elsewhere, (B, T)."""
    ids_BT, counts_BT = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
    return ids_BT.masked_fill(counts_BT == 0, -100)


@dataclass(frozen=True)
class PlannedTeacher:
    """A teacher, which is equal to another one with the same name and config."""

    name: str
    shape: str
    """The config as JSON."""
    config: PreTrainedConfig = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, config: PreTrainedConfig) -> PlannedTeacher:
        return cls(name, json.dumps(config.to_dict(), sort_keys=True, default=str), config)
