"""The size of the cache of keys and values that a model fills while it writes text, from its config."""

from __future__ import annotations

from typing import Any


def kv_widths(config: Any, tokens: int) -> list[tuple[int, int]]:
    """(elements of the keys, elements of the values) that the cache of each layer holds for one sequence.

    Layers without attention count as layers with attention, so that the size is an upper bound.
    """
    text = config.get_text_config()
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_width, value_width = getattr(text, "qk_head_dim", None) or width, getattr(text, "v_head_dim", None) or width
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    window = getattr(text, "sliding_window", None) or tokens
    kept = [min(tokens, window - 1) if kind == "sliding_attention" else tokens for kind in kinds]
    return [(_key_heads(text) * key_width * n, _key_heads(text) * value_width * n) for n in kept]


def queries_per_key(config: Any) -> int:
    """How many query heads share the keys and values of one key head."""
    text = config.get_text_config()
    return int(text.num_attention_heads // _key_heads(text))


def _key_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
