"""What a recipe asks of its objective; without transformers, whose settings follow from the recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe


def without_phases(recipe: Recipe) -> Recipe:
    """The recipe without training that comes first."""
    return replace(recipe, heads=replace(recipe.heads, base_steps=0))


def require_heads(path: Path, recipe: Recipe) -> None:
    """Refuse a recipe without heads, for `tigon medusa`. path: the recipe's."""
    if recipe.heads.stage is None:
        raise RecipeError(
            f"{path}: heads.stage is not given; set it to 1 (only heads) or 2 (model and heads), or use tigon train"
        )
