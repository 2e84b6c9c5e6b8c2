"""Next-token prediction by the model's own loss. It adds nothing to the model, the records or the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tigon.data.documents import RowReader
from tigon.data.packing import Collator, Packed, Sample, pack
from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.models.seams.head.loss import without_logits
from tigon.objectives.base import (
    FinalSave,
    FrozenModel,
    Generation,
    MetricSection,
    Phase,
    PlannedObjective,
    Reduce,
    Step,
    TracedModels,
    TrlTraining,
)
from tigon.recipe.keys import DataConfig, ModelConfig, Recipe
from tigon.techniques.records.choices import Choices


@dataclass(frozen=True)
class PlannedCausalLM:
    """See `tigon.objectives.base.PlannedObjective` for what each method is."""

    @property
    def reads_whole_weights(self) -> bool:
        return False

    @property
    def own_parameters(self) -> str | None:
        return None

    @property
    def next_token(self) -> bool:
        return True

    @property
    def pads(self) -> bool:
        return False

    @property
    def reads_values(self) -> bool:
        return False

    @property
    def least_batch(self) -> int:
        return 1

    @property
    def most_batch(self) -> int:
        return 1 << 16

    def attach(self, model: Any) -> Any:
        return model

    def frozen_models(self, trained: FrozenModel, choices: Choices) -> tuple[FrozenModel, ...]:
        return ()

    def sequences(self, batch: int) -> int:
        return batch

    def sequence_tokens(self, seq: int) -> int:
        return seq

    def inputs(self, batch: int, seq: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(batch, seq, dtype=torch.int64) for name in ("input_ids", "labels")}

    def ignored_labels(self, batch: int) -> int:
        return batch

    def loss(self, models: TracedModels, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        count = torch.empty((), dtype=torch.int64)
        outputs = models.call(lambda: models.trained(**inputs, num_items_in_batch=count, use_cache=False))
        return outputs.loss  # type: ignore[no-any-return]

    def head(self, model: Any) -> Any:
        return model.get_output_embeddings()

    def generation(self, seq: int) -> Generation | None:
        return None

    def batch_refusal(self, batch: int) -> str | None:
        return None

    def evaluation_passes(self, model: Any) -> tuple[AbstractContextManager[Any], ...]:
        return (without_logits(),)

    def refusals(self, choices: Choices) -> tuple[str, ...]:
        return ()

    def recipe_keys(self) -> Mapping[str, Any]:
        return {}

    def notes(self) -> tuple[str, ...]:
        return ()

    def description(self) -> str:
        return ""


@dataclass
class CausalLM:
    """The objective of an ordinary run. `tigon.objectives.base.Objective` documents each method."""

    config: ModelConfig = field(default_factory=ModelConfig)
    """The recipe's model."""

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> CausalLM | None:
        return cls(recipe.model)

    @property
    def name(self) -> str:
        return "causal LM"

    @property
    def trl(self) -> TrlTraining | None:
        return None

    @property
    def reads_whole_weights(self) -> bool:
        return self.planned().reads_whole_weights

    @property
    def reads_plain_head(self) -> bool:
        return False

    def planned(self) -> PlannedObjective:
        return PlannedCausalLM()

    def announcement(self) -> str | None:
        return None

    def no_sample_line(self) -> str:
        return "no text sample"

    def phase(self, choices: Choices, run: Path) -> Phase | None:
        return None

    def model(self, run: Path) -> ModelConfig:
        return self.config

    def attach(self, built: Any) -> Any:
        return built

    def rows(self, data: DataConfig) -> str | RowReader:
        return data.format if self.trl is None else self.trl.rows

    def load_processor(self) -> Any:
        return None

    def samples(self, encoded: Sequence[Encoded], data: DataConfig) -> Packed:
        return pack(
            encoded, data.sequence_length, packing=data.packs, cross_document=data.cross_document_attention,
            too_long=data.too_long,
        )  # fmt: skip

    def collator(self, data: DataConfig, *, pad_id: int, flatten: bool) -> Collator:
        return Collator(pad_id, data.packs, flatten, data.cross_document_attention)

    def group(self, model: Any, optimizer: Any) -> None:
        pass

    def begin_step(self, model: Any, step: Step) -> None:
        pass

    def loss(self, model: Any, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        return of_model()

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        return {}

    def counted(self, model: Any) -> dict[str, Any]:
        return {}

    def resume_counting(self, model: Any, counted: Mapping[str, Any], device: torch.device) -> None:
        pass

    def begin_evaluation(self) -> None:
        pass

    def evaluation_sums(
        self, model: Any, inputs: Mapping[str, Any], counts: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        # With num_items_in_batch 1, the model returns the sum of the losses over its tokens.
        one = torch.ones((), dtype=torch.long, device=inputs["labels"].device)
        # Compute the loss without logits, which would take more memory than a training step.
        with torch.no_grad(), without_logits(), precision():
            loss = model(**inputs, num_items_in_batch=one).loss
        n_learned = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        return torch.stack([loss.double(), n_learned.double()]) * counts

    def count_batch(self) -> None:
        pass

    def evaluation_metrics(self, reduce: Reduce) -> dict[str, float]:
        return {}

    def metric_section(self) -> MetricSection | None:
        return None

    @property
    def saves_all(self) -> bool:
        return True

    def checkpoint_state(self, model: Any, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        return state

    def save_beside(self, model: Any, folder: Path) -> None:
        pass

    def load_beside(self, model: Any, folder: Path) -> None:
        pass

    def save(self, built: Any, final: FinalSave) -> bool:
        final.save_model()
        return True

    def sampled(self, built: Any, samples: Sequence[Sample], eos: int | None) -> dict[str, Any] | None:
        return None

    def sampled_line(self, decoded: Mapping[str, Any]) -> str:
        raise NotImplementedError("this objective decodes nothing except the text sample")


OBJECTIVE = CausalLM
