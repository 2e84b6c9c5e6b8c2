"""Next-token prediction with images: the model's own loss on the answers of rows with images (`data.images`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tigon.data import images
from tigon.data.documents import RowReader
from tigon.data.packing import Collator, Packed
from tigon.data.tokenizer import Encoded
from tigon.errors import RecipeError
from tigon.models.loading.auto_class import reads_images
from tigon.objectives.causal_lm import CausalLM
from tigon.recipe.keys import DataConfig, Recipe


@dataclass
class VisionLanguage(CausalLM):
    """Trains a vision-language model on the answers of rows with images."""

    data: DataConfig = field(default_factory=DataConfig)
    processor: Any = None

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> VisionLanguage | None:
        if not recipe.data.images:
            return None
        if not reads_images(config):
            raise RecipeError(
                f"data.images is {recipe.data.images}, but {recipe.model.name} ({config.model_type}) reads text alone; "
                "name a vision-language model, or set data.images: 0"
            )
        return cls(recipe.model, recipe.data)

    @property
    def name(self) -> str:
        return "images"

    def announcement(self) -> str | None:
        each = f"up to {self.data.images} per row" if self.data.images > 1 else "one per row"
        return f"images   {each}, read by {type(self.processor).__name__}"

    def rows(self, data: DataConfig) -> str | RowReader:
        return images.PicturedRows(data.images, data.format)

    def load_processor(self) -> Any:
        self.processor = images.load_processor(
            self.config.name, revision=self.config.revision, trust_remote_code=self.config.trust_remote_code
        )
        return self.processor

    def samples(self, encoded: Sequence[Encoded], data: DataConfig) -> Packed:
        return images.samples(encoded, data.sequence_length, too_long=data.too_long)

    def collator(self, data: DataConfig, *, pad_id: int, flatten: bool) -> Collator:
        return images.PicturedCollator(pad_id, packing=False, processor=self.processor, size=data.image_size)


OBJECTIVE = VisionLanguage
