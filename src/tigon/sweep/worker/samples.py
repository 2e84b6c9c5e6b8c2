"""Makes the sequences of a point, at least as many as its steps take.

- recipe: all data that the recipe's `data` names, so that the steps see the same sequences as in `tigon train`.
- random: sequences of exactly `data.sequence_length` tokens drawn from the whole vocabulary. Each is one document, and
  every token is learned. Memory and time do not depend on the tokens, and nothing has to be read or tokenised.
- alpaca: samples in Alpaca's layout (instruction, input, output), made from Python's built-in documentation and
  standard library. Only the output is learned, and samples are packed as the recipe says. The text is no real task.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tigon.data.packing import Collator, Sample, SampleDataset
from tigon.data.source import reading
from tigon.data.source.sources import BUILT_IN
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import RecipeError
from tigon.objectives.base import Objective
from tigon.recipe.keys import DataConfig, Recipe
from tigon.trainer import run_data
from tigon.trainer.guards import auto_packing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ALPACA_FILE = "alpaca.jsonl"
_INPUT_CHARACTERS, _ALPACA_ROWS = 100, 12_000
_ANSWER_CHARACTERS = (120, 240, 480)
"""Used in turns. Several such samples fit into a sequence of 512 tokens, as with Alpaca's."""


def make(
    recipe: Recipe, config: PreTrainedConfig, objective: Objective, how: str, *, processes: int, folder: Path
) -> tuple[SampleDataset, Collator]:
    """(data set, its collator) of a point.

    how: recipe, random or alpaca. processes: number of ranks. folder: where the Alpaca samples are written. Raises
    RecipeError as `tigon train` does.
    """
    train = recipe.train
    assert train.steps is not None, "a sweep counts steps"
    count = train.steps * train.samples_per_step * processes
    takes_flat = recipe.model.flash_attention
    if how == "random":
        drawn = _random(count, recipe.data.sequence_length, config.get_text_config().vocab_size)
        packed = replace(recipe.data, packing=True)
        return SampleDataset(drawn), objective.rows(packed).collator(0, takes_flat)
    if how == "alpaca":
        source = alpaca_file(folder)
        data = replace(
            recipe.data, source=(str(source),), format="alpaca", columns=None, template="plain", too_long="truncate"
        )
        recipe = replace(recipe, data=data)
    samples, pad_id, data = _of_recipe(recipe, config, objective, processes)
    if len(samples) < count:  # repeated, because the last batch of an epoch could be smaller than the others
        samples = [samples[i % len(samples)] for i in range(count)]
    flatten = data.packs and takes_flat
    return SampleDataset(samples), objective.rows(data).collator(pad_id, flatten)


def _random(count: int, length: int, vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    positions_T = torch.arange(length, dtype=torch.int32)
    samples = []
    for _ in range(count):
        tokens_T = torch.randint(vocab_size, (length,), generator=generator, dtype=torch.int32)
        labels_T = tokens_T.clone()
        labels_T[0] = IGNORE_INDEX  # no token before it can predict it
        samples.append(Sample(tokens_T, labels_T, positions_T))
    return samples


def _of_recipe(
    recipe: Recipe, config: PreTrainedConfig, objective: Objective, processes: int
) -> tuple[Sequence[Sample], int, DataConfig]:
    """(samples, id of padding, the recipe's `data` with the choice that `packing: null` stands for)."""
    tokens = run_data.tokenise(recipe, config, objective, run_data.read_documents(recipe, objective))
    chosen, packed, _ = auto_packing.chosen(recipe, config, tokens.train, objective, processes)
    if not packed.samples:
        raise RecipeError(
            f"{recipe.data.source_names}: not enough text for one sequence of {recipe.data.sequence_length} tokens; "
            "name more"
        )
    tok = tokens.tokenizer
    pad_id = tok.pad_token_id if tok.pad_token_id is not None else (tok.eos_token_id or 0)
    return packed.samples, pad_id, chosen.data


def alpaca_file(folder: Path) -> Path:
    """The file of samples in Alpaca's layout, made from the built-in text on the first call."""
    path = folder / ALPACA_FILE
    if not path.exists():
        lines = [json.dumps(row) for row, _ in zip(_alpaca_rows(), range(_ALPACA_ROWS), strict=False)]
        scratch = path.with_name(f".{path.name}.part")
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
        scratch.replace(path)
    return path


def _alpaca_rows() -> Iterator[dict[str, str]]:
    """Cut each document into pieces. The beginning of a piece is the input, the rest is the output."""
    lengths = itertools.cycle(_ANSWER_CHARACTERS)
    for document in reading.read((BUILT_IN,), "auto", 8.0):
        start = 0
        while start + _INPUT_CHARACTERS + max(_ANSWER_CHARACTERS) < len(document.text):
            middle = start + _INPUT_CHARACTERS
            stop = middle + next(lengths)
            if document.text[middle:stop].strip():
                yield {
                    "instruction": f"Continue this passage of {document.origin}.",
                    "input": document.text[start:middle],
                    "output": document.text[middle:stop],
                }
            start = stop
