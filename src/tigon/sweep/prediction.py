"""The planner's prediction for a point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tigon.recipe.keys import Recipe
from tigon.sweep.worker.limit import gpu_row
from tigon.trainer import model as models
from tigon.trainer.guards import prediction


def predict(recipe: Recipe, device: str, memory_bytes: int) -> dict[str, Any]:
    """Predict a recipe's memory peaks and step time on a GPU.

    device: the driver's name of the GPU. memory_bytes: its memory, or the sweep's limit if that is lower. Raises
    TigonError if the planner refuses the recipe.
    """
    config = models.load_config(recipe.model)
    gpu = replace(gpu_row(device, memory_bytes), memory_bytes=memory_bytes)
    predicted = prediction.predict(recipe, config, recipe.settings(), gpu, evaluated=False)
    return predicted.as_mapping()
