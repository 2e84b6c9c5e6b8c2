"""Next-token prediction with images: the model's own loss on the answers of rows with images (`data.images`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from tigon.data import image_rows, images
from tigon.data.images import Layout
from tigon.data.packing import Collator, Packed
from tigon.data.tokenizer import Encoded
from tigon.errors import RecipeError
from tigon.models.loading.auto_class import reads_images
from tigon.objectives.base import Objective, PlannedObjective, Rows
from tigon.recipe.keys import DataConfig, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

PLANNED_SIZE = 1024
"""Pixels of an image's sides in a plan without `data.image_size`."""

MOST_PLANNED_IMAGES = 256
"""The most images of a micro-batch in a plan: models take them apart one by one, and so does the trace."""


@dataclass(frozen=True)
class PlannedVisionLanguage(PlannedObjective):
    """Rows with the most images that the recipe allows, each of them square and as large as it allows."""

    pads: ClassVar[bool] = True
    reads_values: ClassVar[bool] = True
    images: int
    size: int | None
    layout: Layout

    @property
    def most_batch(self) -> int:
        return max(1, MOST_PLANNED_IMAGES // self.images)

    def batch_refusal(self, batch: int) -> str | None:
        if batch <= self.most_batch:
            return None
        return f"a plan has at most {MOST_PLANNED_IMAGES} images in a micro-batch, {self.most_batch} samples here"

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        return self.layout.inputs(batch, seq)

    def ignored_labels(self, batch: int) -> int:
        return batch * len(self.layout.prompt)

    def recipe_keys(self) -> Mapping[str, Any]:
        size = {} if self.size is None else {"data.image_size": self.size}
        return {"data.images": self.images, **size}

    def notes(self) -> tuple[str, ...]:
        side = self.size or PLANNED_SIZE
        each = f"{self.images} images" if self.images > 1 else "one image"
        return (
            f"Every row has {each} of {side} x {side} pixels, with {self.layout.n_image_tokens} tokens in the row. All "
            "tokens after the question are learned.",
            f"Micro-batches are planned up to {MOST_PLANNED_IMAGES} images.",
        )

    def description(self) -> str:
        return f"{self.images} images per row, {self.layout.n_image_tokens} image tokens"


def planned_images(
    name: str, config: PreTrainedConfig, most: int, size: int | None, processor: ProcessorMixin
) -> PlannedVisionLanguage:
    """The objective of a run with `data.images`, for a plan.

    Raises:
        RecipeError: The model reads text alone.
    """
    _check(name, config, most)
    side = size or PLANNED_SIZE
    return PlannedVisionLanguage(most, size, Layout.of(processor, most, side))


def _check(name: str, config: PreTrainedConfig, most: int) -> None:
    if not reads_images(config):
        raise RecipeError(
            f"data.images is {most}, but {name} ({config.model_type}) reads text alone; name a vision-language model, "
            "or set data.images: 0"
        )


@dataclass
class VisionLanguage(Objective):
    """Trains a vision-language model on the answers of rows with images."""

    data: DataConfig = field(default_factory=DataConfig)
    model_config: PreTrainedConfig = None
    processor: ProcessorMixin = None

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: PreTrainedConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> VisionLanguage | None:
        if not recipe.data.images:
            return None
        _check(recipe.model.name, config, recipe.data.images)
        return cls(recipe.model, recipe.data, model_config=config)

    @property
    def name(self) -> str:
        return "images"

    def planned(self) -> PlannedObjective:
        data = self.data
        processor = self.processor or self.load_processor()
        return planned_images(self.config.name, self.model_config, data.images, data.image_size, processor)

    @property
    def announcement(self) -> str | None:
        each = f"up to {self.data.images} per row" if self.data.images > 1 else "one per row"
        return f"images   {each}, read by {type(self.processor).__name__}"

    def rows(self, data: DataConfig) -> Rows:
        def packed(encoded: Sequence[Encoded]) -> Packed:
            return images.samples(encoded, data.sequence_length, too_long=data.too_long)

        def collator(pad_id: int, flatten: bool) -> Collator:
            return images.PicturedCollator(pad_id, packing=False, processor=self.processor, size=data.image_size)

        reader = image_rows.PicturedRows(data.images, data.format)
        return Rows(layout=reader, pack=packed, collator=collator, load_processor=self.load_processor)

    def load_processor(self) -> Any:
        """The model's processor, which the collator and the plan need too.

        Raises:
            RecipeError: The model has none.
        """
        self.processor = images.load_processor(
            self.config.name, revision=self.config.revision, trust_remote_code=self.config.trust_remote_code
        )
        return self.processor


OBJECTIVE = VisionLanguage
