"""Replaces the attention function of a transformers model while a trace runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "tigon_traced"


@contextlib.contextmanager
def attention_replaced(model: PreTrainedModel, attend: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Let `model` call `attend` instead of its attention function, and `mask` instead of its mask function.

    attend: (module, query, key, value, attention_mask, **keywords) -> (output (B, T, heads, D), None).
    mask: (the keywords that transformers passes to a mask function) -> a mask or None.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registries = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs]
    for registry, function in zip(registries, (attend, mask), strict=True):
        registry._global_mapping[NAME] = function
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        for registry in registries:
            registry._global_mapping.pop(NAME, None)
