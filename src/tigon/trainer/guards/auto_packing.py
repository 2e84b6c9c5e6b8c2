"""Replaces `data.packing: null` by true or false, once the rows are tokens.

Packing makes training on many rows fast. But few rows become few samples, and then the optimizer takes almost no steps.
80 short chats, for example, are 5 samples of 1,024 tokens. So a run of few steps gets one row per sample. So does a run
whose packed rows are too few for one step. A model that would mix the documents of a sample gets one document per
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tigon.data.packing import Packed
from tigon.data.tokenizer import Encoded
from tigon.data.tokens import Tokens
from tigon.models import packed_documents
from tigon.models.hybrid_layers import LayerPath, takes_documents
from tigon.objectives.base import Objective
from tigon.recipe.keys import Recipe
from tigon.techniques.keys.settings import Settings
from tigon.trainer.guards import preflight
from tigon.trainer.guards.recipe_warnings import RunSize, steps_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEAST_STEPS = 100
"""Fewest optimizer steps of a packed run. docs/your-data.md shows what runs of fewer steps learned."""


def chosen(
    recipe: Recipe, config: PreTrainedConfig, encoded: Sequence[Encoded], objective: Objective, data_parallel_size: int
) -> tuple[Recipe, Packed, tuple[str, ...]]:
    """The recipe with true or false for null, its training samples, and a line if the choice is false.

    The choice depends on the data, the epochs and the samples per step alone, so a resumed run makes it again. With
    `train.steps` the number of steps is the user's, and packing stays if the samples are enough for one step.

    Args:
        recipe: The recipe.
        config: The model's config. A model that would mix the documents of a sample gets one document per sample.
        encoded: The documents to train on. Plain text is packed always, because it is one stream.
        objective: Makes the samples.
        data_parallel_size: The number of processes, or of groups that share rows, that read different samples.
    """
    if recipe.data.packing is not None:
        return recipe, objective.rows(recipe.data).pack(encoded), ()
    packs = replace(recipe, data=replace(recipe.data, packing=True))
    apart = replace(recipe, data=replace(recipe.data, packing=False))
    mixes = None if recipe.data.cross_document_attention else preflight.mixes_documents(recipe, config)
    if mixes is not None:
        return apart, objective.rows(apart.data).pack(encoded), (f"packing  off: {mixes}",)
    packed = objective.rows(packs.data).pack(encoded)
    n_steps = steps_of(recipe, RunSize(len(packed.samples), 0, data_parallel_size))
    per_step = recipe.train.samples_per_step * data_parallel_size
    too_few = len(packed.samples) < per_step
    few_steps = recipe.train.epochs is not None and n_steps < LEAST_STEPS
    if not (too_few or few_steps) or Tokens.of(encoded).are_text.any():
        return packs, packed, ()
    padded = objective.rows(apart.data).pack(encoded)
    if len(padded.samples) == len(packed.samples) or not (few_steps or len(padded.samples) >= per_step):
        return packs, packed, ()
    but = f", fewer than the {per_step:,} of a step"
    if not too_few:
        but = f" and the run has {n_steps:,} steps (data.packing: true packs them)"
    line = f"packing  off: packed, {len(padded.samples):,} rows are {len(packed.samples):,} samples{but}"
    return apart, padded, (line,)


def with_slow_layers(
    recipe: Recipe, config: PreTrainedConfig, paths: Sequence[LayerPath]
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe, and a line if layers with a state run each document of a packed sample by itself.

    That is exact and slow. A null `data.packing` is off then, and `data.packing: true` does it.
    """
    if recipe.data.packing is False or recipe.data.cross_document_attention or not packed_documents.has_states(config):
        return recipe, ()
    if preflight.mixes_documents(recipe, config) or takes_documents({path.kind: path.runs for path in paths}):
        return recipe, ()
    names = " and ".join(path.described for path in paths)
    if recipe.data.packing is None:
        line = f"packing  off: each document would run by itself through {names} (data.packing: true packs them)"
        return replace(recipe, data=replace(recipe.data, packing=False)), (line,)
    line = f"packing  each document runs by itself through {names}, slowly if it is short (data.packing: false pads)"
    return recipe, (line,)


def without_graphs(asked: Recipe, decided: Recipe, settings: Settings) -> tuple[Recipe, Settings, tuple[str, ...]]:
    """The recipe with `data.packing` decided, its settings, and a line if its samples are too unlike for CUDA graphs.

    `train.checkpointing: auto` chose the graphs before the rows were read.
    """
    if not decided.train.cuda_graphs or decided.data.packs or asked.data.packing is not None:
        return decided, settings, ()
    plain = replace(decided, train=replace(decided.train, cuda_graphs=False))
    line = "graphs   off: without packing the samples differ in length (train.cuda_graphs)"
    return plain, settings.having({"train.cuda_graphs": False}), (line,)
