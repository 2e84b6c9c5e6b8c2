"""`AutoModelForCausalLM`: loads a model with transformers' class of the same name, then patches it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from tigon.models.patch import patch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLAGS = tuple(p.name for p in inspect.signature(patch).parameters.values() if p.kind is p.KEYWORD_ONLY)


class AutoModelForCausalLM:
    """Loads a causal language model with transformers and patches it.

    The flags of `tigon.patch` are accepted as keywords. All other arguments go to transformers unchanged, which raises
    for unknown ones. If the model cannot be patched, PatchError is raised; load it with transformers instead.
    """

    def __init__(self) -> None:
        raise TypeError("use AutoModelForCausalLM.from_pretrained(...) or AutoModelForCausalLM.from_config(...)")

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: object, *args: object, **kwargs: object) -> nn.Module:
        """Load a folder or hub id with `transformers.AutoModelForCausalLM.from_pretrained`, and patch the model."""
        return _build("from_pretrained", pretrained_model_name_or_path, *args, **kwargs)

    @staticmethod
    def from_config(config: PreTrainedConfig, *args: object, **kwargs: object) -> nn.Module:
        """Build a random model with `transformers.AutoModelForCausalLM.from_config`, and patch it."""
        return _build("from_config", config, *args, **kwargs)


def _build(constructor: str, *args: Any, **kwargs: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM as HuggingFaceAuto

    flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
    built = getattr(HuggingFaceAuto, constructor)(*args, **kwargs)
    # from_pretrained(output_loading_info=True) returns a pair.
    patch(built[0] if isinstance(built, tuple) else built, **flags)
    return built  # type: ignore[no-any-return]
