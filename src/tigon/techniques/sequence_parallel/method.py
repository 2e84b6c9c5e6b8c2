"""Which attention shares rows if `sharding.sequence_method` is `auto`: Ulysses if it can divide the heads, else a ring.

Ulysses keeps packed documents apart, and took less time than a ring wherever both were measured
(docs/techniques/sequence-parallel.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from tigon.errors import RecipeError
from tigon.techniques.head_groups import key_heads, text_config
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.sharding import AUTO_METHOD, RING, ULYSSES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY, METHOD = "sharding.sequence", "sharding.sequence_method"
WORDS = {ULYSSES: "Ulysses", RING: "a ring"}
S = TypeVar("S", bound=Settings)


def check_processes(settings: Settings) -> None:
    """Raise RecipeError if the run's processes do not make whole groups that share rows."""
    size, gpus = settings.sharding.sequence, settings.sharding.gpus
    if gpus % size:
        raise RecipeError(
            f"{KEY} is {size}, and sharding.gpus {gpus} is not a multiple of it; set sharding.gpus to "
            f"{-(-gpus // size) * size}"
        )


def divisible_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns the numbers of heads and key heads of a transformers config, which Ulysses divides over processes."""
    return int(text_config(config).num_attention_heads), key_heads(config)


def chosen(config: PreTrainedConfig, size: int) -> str:
    """Returns the method for `size` processes per row of a model with this transformers config.

    A model without attention gets Ulysses too. The checks of `sharding.sequence` refuse it.
    """
    if not getattr(text_config(config), "num_attention_heads", None):
        return ULYSSES
    return ULYSSES if all(number % size == 0 for number in divisible_heads(config)) else RING


def reason(config: PreTrainedConfig, size: int) -> str:
    """Returns why `chosen` takes its method, as the end of a sentence."""
    heads, of_keys = divisible_heads(config)
    verb = "divide" if chosen(config, size) == ULYSSES else "cannot divide"
    return f"{size} processes {verb} {heads} heads and {of_keys} key heads"


def note(settings: Settings, config: PreTrainedConfig) -> str:
    """Returns which method shares the rows and why, in one sentence. settings: without `auto`."""
    method, size = settings.sharding.sequence_method, settings.sharding.sequence
    words = f"{WORDS[method]}: {reason(config, size)}"
    if method != (best := chosen(config, size)):
        words = f"{WORDS[method]} as asked; {METHOD}: {AUTO_METHOD} takes {best}, because {reason(config, size)}"
    return f"Rows are shared by {words}."


def is_open(settings: Settings) -> bool:
    """Returns whether processes share rows by a method that is still to be chosen."""
    return settings.sharding.sequence > 1 and settings.sharding.sequence_method == AUTO_METHOD


def resolved(settings: S, config: PreTrainedConfig) -> S:
    """Returns the settings, or the recipe, with a method in place of `auto` if processes share rows."""
    if not is_open(settings):
        return settings
    return settings.having({METHOD: chosen(config, settings.sharding.sequence)})


def check_documents(settings: Settings, config: PreTrainedConfig) -> None:
    """Raise RecipeError if `auto` is a ring, which has no mask that separates packed documents.

    The checks of a recipe refuse a ring that it names itself.
    """
    size = settings.sharding.sequence
    if not is_open(settings) or chosen(config, size) == ULYSSES:
        return
    raise RecipeError(
        f"{KEY} is {size}: {reason(config, size)}, so rows go round a ring, which has no mask that separates packed "
        f"documents; set data.cross_document_attention: true, data.packing: false, or "
        f"{instead_of_ring(settings, config)}"
    )


def instead_of_ring(settings: Settings, config: PreTrainedConfig) -> str:
    """Returns the key and value by which rows are shared by Ulysses: the method, or fewer processes per row."""
    if chosen(config, settings.sharding.sequence) == ULYSSES:
        return f"{METHOD}: {ULYSSES}"
    return f"{KEY}: {math.gcd(settings.sharding.gpus, *divisible_heads(config))}"
