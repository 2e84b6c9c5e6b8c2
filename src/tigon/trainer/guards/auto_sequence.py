"""Replaces `sharding.sequence_method: auto` by Ulysses or a ring, once the model's heads are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tigon.recipe.keys import Recipe
from tigon.techniques.head_groups import check_has_attention
from tigon.techniques.sequence_parallel import method
from tigon.techniques.sequence_parallel.method import KEY, METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def resolved(recipe: Recipe, config: PreTrainedConfig) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the choice, and a line that says it if processes share rows by `auto`.

    Raises:
        RecipeError: The processes make no whole groups, the model has no attention, or rows of several documents would
            go round a ring.
    """
    if not method.is_open(recipe):
        return recipe, ()
    method.check_processes(recipe.settings())
    check_has_attention(config, KEY)
    if recipe.data.packs and not recipe.data.cross_document_attention:
        method.check_documents(recipe, config)
    chosen = method.resolved(recipe, config)
    why = method.reason(config, recipe.sharding.sequence)
    return chosen, (f"auto     {METHOD}={chosen.sharding.sequence_method}: {why}",)
