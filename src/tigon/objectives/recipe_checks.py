"""Checks of a recipe's objective that need no transformers: its environment variables follow from the recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe


def without_phases(recipe: Recipe) -> Recipe:
    """The recipe without an earlier training phase, such as the base of Medusa heads."""
    return replace(recipe, heads=replace(recipe.heads, base_steps=0))


def require_heads(path: Path, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe without heads; `tigon medusa` calls it. path: the recipe file."""
    if recipe.heads.stage is None:
        raise RecipeError(
            f"{path}: heads.stage is not given; set it to 1 (only heads) or 2 (model and heads), or use tigon train"
        )
