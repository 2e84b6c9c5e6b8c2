"""`AutoModelForCausalLM`: transformers' class of that name, then `patch`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tigon.models.patch import patch

FLAGS = tuple(p.name for p in inspect.signature(patch).parameters.values() if p.kind is p.KEYWORD_ONLY)


class AutoModelForCausalLM:
    """Loads a causal language model with transformers and patches it.

    The flags of `tigon.patch` are accepted as keywords; everything else goes to transformers unchanged, which raises
    for what it does not know. A model that cannot be patched raises PatchError; load it with transformers instead.
    """

    def __init__(self) -> None:
        raise TypeError("use AutoModelForCausalLM.from_pretrained(...) or AutoModelForCausalLM.from_config(...)")

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """`transformers.AutoModelForCausalLM.from_pretrained`, patched: a folder or hub id -> model."""
        return _build("from_pretrained", pretrained_model_name_or_path, *args, **kwargs)

    @staticmethod
    def from_config(config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """`transformers.AutoModelForCausalLM.from_config`, patched: a config -> randomly initialised model."""
        return _build("from_config", config, *args, **kwargs)


def _build(constructor: str, *args: Any, **kwargs: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM as HuggingFaceAuto

    flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
    built = getattr(HuggingFaceAuto, constructor)(*args, **kwargs)
    # from_pretrained(output_loading_info=True) returns a pair.
    patch(built[0] if isinstance(built, tuple) else built, **flags)
    return built  # type: ignore[no-any-return]
