"""The cache of keys and values: its size while a model writes text, the argument of a forward that takes it, and the
setting that makes a forward fill it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def kv_widths(config: PreTrainedConfig, tokens: int) -> list[tuple[int, int]]:
    """(elements of the keys, elements of the values) that the cache of each layer holds for one sequence.

    Layers without attention count as layers with attention, so that the size is an upper bound.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None) or tokens
    widths = []
    for kind, layer in zip(kinds, layer_configs(text), strict=True):
        kept = min(tokens, window - 1) if kind == "sliding_attention" else tokens
        width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        each = (getattr(layer, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
        keys, values = (_key_heads(layer) * size * kept for size in each)
        widths.append((keys, values))
    return widths


def queries_per_key(config: PreTrainedConfig) -> int:
    """The most query heads that share the keys and values of one key head."""
    return max(int(layer.num_attention_heads // _key_heads(layer)) for layer in layer_configs(config.get_text_config()))


def layer_configs(text: PreTrainedConfig) -> list[Any]:
    """The config of each layer of a language model.

    Layers of Gemma 4 differ in their heads. transformers then refuses to read these numbers from the whole config.
    """
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * text.num_hidden_layers


def _key_heads(layer: PreTrainedConfig) -> int:
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names of the argument that takes the cache. From transformers 5.24 on it is `cache` in most forwards, which accept
the former `past_key_values` and `cache_params` too. BLOOM's and Falcon's layers keep `layer_past`."""


def cache_argument(function: Callable[..., Any]) -> str | None:
    """The argument of a function or method of transformers that takes the cache, or None."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a call, under any of its names; None if there is none."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def without_cache(model: PreTrainedModel) -> Callable[[], None]:
    """Set `use_cache: false` in every config that a forward of the model reads. Returns a function that undoes it.

    With a cache, transformers ignores the document boundaries in position_ids. The part of a composite model that reads
    text reads the setting in the config of its own part.
    """
    of_modules = (module.config for module in model.modules() if hasattr(module, "config"))
    configs = {id(config): config for config in (*_parts(model.config), *of_modules)}.values()
    before = [(config, config.use_cache) for config in configs if hasattr(config, "use_cache")]
    for config, _ in before:
        config.use_cache = False

    def undo() -> None:
        for config, value in before:
            config.use_cache = value

    return undo


@contextmanager
def cache_as_in(model: PreTrainedModel, original: PreTrainedModel) -> Iterator[None]:
    """Give the model's configs the `use_cache` of another config of its family, so that they are saved with it.

    Args:
        model: A transformers model.
        original: The config as it was loaded. It may be that of a composite model of which `model` is the text part.
    """
    wanted = {type(part): vars(part)["use_cache"] for part in _parts(original) if "use_cache" in vars(part)}
    before = [(part, vars(part).copy()) for part in _parts(model.config)]
    for part, values in before:
        if type(part) in wanted:
            part.use_cache = wanted[type(part)]
        elif "use_cache" in values:  # the Trainer sets it in a config that has no such field
            del part.use_cache
    try:
        yield
    finally:
        for part, values in before:
            if "use_cache" in values:
                part.use_cache = values["use_cache"]


def _parts(config: PreTrainedConfig) -> Iterator[Any]:
    """A config, and those of the parts of a composite model."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if hasattr(part, "model_type"):
            yield from _parts(part)
