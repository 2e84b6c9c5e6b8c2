"""The module below a model's head, and its decoder layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def trunk_of(model: Any) -> Any:
    """The module below the head; the model itself if it has no head.

    Llama 4's `base_model_prefix` names no attribute of its text model, so its `base_model` is the model itself.
    """
    trunk = getattr(model, "base_model", model)
    return getattr(model, "model", model) if trunk is model else trunk


def decoder_stack(model: Any) -> nn.ModuleList:
    """The list of the repeated layers: the longest in the trunk; empty if there is none.

    An objective's modules and a vision tower, which may have more layers, are outside.
    """
    trunk = trunk_of(model)
    trunk = getattr(trunk, "language_model", trunk)
    stacks = [module for module in trunk.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=len, default=nn.ModuleList())


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of `decoder_stack`."""
    return list(decoder_stack(model))
