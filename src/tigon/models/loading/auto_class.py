"""The class of transformers that loads a config's model: one for text, or one for text and images."""

from __future__ import annotations

from typing import Any


def auto_class(config: Any) -> Any:
    """`AutoModelForCausalLM`, or `AutoModelForImageTextToText` for a model that only that class loads."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for_images = type(config) in AutoModelForImageTextToText._model_mapping
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if for_images and not known else AutoModelForCausalLM


def reads_images(config: Any) -> bool:
    """Whether the model that `auto_class` loads reads images too. Some families have another class for text alone."""
    from transformers import AutoModelForImageTextToText

    if type(config) not in AutoModelForImageTextToText._model_mapping:
        return False
    mapping = auto_class(config)._model_mapping
    return mapping[type(config)] is AutoModelForImageTextToText._model_mapping[type(config)]
