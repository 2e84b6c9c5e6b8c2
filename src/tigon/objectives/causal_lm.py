"""Next-token prediction by the model's own loss. It adds nothing to the model, the records or the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from tigon.data.packing import Collator, Packed, pack
from tigon.data.tokenizer import Encoded
from tigon.models.seams.head.loss import without_logits
from tigon.objectives.base import (
    AddedModules,
    BaseTraining,
    FrozenModel,
    Generation,
    PlannedObjective,
    Reduce,
    Rows,
    TracedModels,
    TrlTraining,
)
from tigon.recipe.keys import DataConfig, ModelConfig, Recipe
from tigon.techniques.keys.settings import Settings


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

    def frozen_models(self, trained: FrozenModel, settings: Settings) -> tuple[FrozenModel, ...]:
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

    def refusals(self, settings: Settings) -> tuple[str, ...]:
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
    def announcement(self) -> str | None:
        return None

    @property
    def trl(self) -> TrlTraining | None:
        return None

    @property
    def base(self) -> BaseTraining | None:
        return None

    @property
    def added(self) -> AddedModules | None:
        return None

    def rows(self, data: DataConfig) -> Rows:
        def packed(encoded: Sequence[Encoded]) -> Packed:
            return pack(
                encoded, data.sequence_length, packing=data.packs, cross_document=data.cross_document_attention,
                too_long=data.too_long,
            )  # fmt: skip

        def collator(pad_id: int, flatten: bool) -> Collator:
            return Collator(pad_id, data.packs, flatten, data.cross_document_attention)

        return Rows(layout=data.format, pack=packed, collator=collator)

    def with_head(self, built: Any) -> Any:
        return built

    def attach(self, built: Any) -> Any:
        return built

    def loss(self, model: Any, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        return of_model()

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        return {}

    def planned(self) -> PlannedObjective:
        return PlannedCausalLM()


OBJECTIVE = CausalLM
