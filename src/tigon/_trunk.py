"""The module below a model's head, and its decoder layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def trunk_of(model: nn.Module) -> Any:
    """The module below the head, or a model without a head itself.

    Llama 4's `base_model_prefix` names no attribute of its text model, so its `base_model` is the model itself.
    """
    trunk = getattr(model, "base_model", model)
    return getattr(model, "model", model) if trunk is model else trunk


def language_model(model: nn.Module) -> Any:
    """The trunk, or the part of it that reads text if the model has towers for images too."""
    trunk = trunk_of(model)
    towers = (getattr(trunk, name, None) for name in _LANGUAGE_MODELS)
    return next((tower for tower in towers if isinstance(tower, nn.Module)), trunk)


_LANGUAGE_MODELS = ("language_model", "text_model")
"""The names that models of text and images have for the part that reads text."""


def decoder_stack(model: nn.Module) -> nn.ModuleList:
    """The list of the repeated layers: the longest in the trunk; empty if there is none.

    An objective's modules and a vision tower, which may have more layers, are outside.
    """
    trunk = language_model(model)
    stacks = [module for module in trunk.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=len, default=nn.ModuleList())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of `decoder_stack`."""
    return list(decoder_stack(model))
