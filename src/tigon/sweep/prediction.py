"""What the planner says about a point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tigon.recipe.keys import AUTO_PRECISION, Recipe
from tigon.sweep.limit import gpu_row
from tigon.trainer import model as models
from tigon.trainer.guards import prediction


def predict(recipe: Recipe, device: str, memory_bytes: int) -> dict[str, Any]:
    """Peaks and step time of a recipe on a GPU of that name with that much memory. Raises TigonError."""
    config = models.load_config(recipe.model)
    precision = AUTO_PRECISION if recipe.train.precision == "auto" else recipe.train.precision
    gpu = replace(gpu_row(device, memory_bytes), memory_bytes=memory_bytes)
    found = prediction.predict(recipe, config, recipe.choices(precision=precision), gpu, evaluated=False)
    return found.as_mapping()
