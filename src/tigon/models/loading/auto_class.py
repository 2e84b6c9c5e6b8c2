"""The class of transformers that loads a config's model: one for text, or one for text and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tigon.errors import RecipeError, one_line
from tigon.models.loading.classifier import auto_classifier, task_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def auto_class(config: PreTrainedConfig) -> Any:
    """`AutoModelForCausalLM`, or `AutoModelForImageTextToText` for a model that only that class loads and reloads.

    A config that declares a classification head has the class of that head.

    For some composite configs, such as Qwen3.5's and Llama 4's, `AutoModelForCausalLM` makes a model of the text part
    alone, which is saved with the config of that part. The part of Mllama and Emu3 has a config that
    `AutoModelForCausalLM` does not take, so what a run saved could not be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if (task := task_of(config)) is not None:
        return auto_classifier(task)
    of_text, of_images = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    if type(config) not in of_images:
        return AutoModelForCausalLM
    if type(config) not in of_text:
        return AutoModelForImageTextToText
    own = getattr(of_text[type(config)], "config_class", type(config))
    return AutoModelForCausalLM if own in of_text else AutoModelForImageTextToText


def reads_images(config: PreTrainedConfig) -> bool:
    """Whether tigon trains the model that `auto_class` loads on images.

    It does not if transformers has another class of the family for text alone.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(config)
    of_text, of_images = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    return kind in of_images and (kind not in of_text or of_text[kind] is of_images[kind])


def text_part(config: PreTrainedConfig) -> str | None:
    """The model type of the part that `auto_class` loads of a composite config; None if it loads the whole model."""
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM._model_mapping.get(type(config), None)
    part = getattr(own, "config_class", None)
    if auto_class(config) is not AutoModelForCausalLM or part is not type(config.get_text_config()):
        return None
    return None if part is type(config) else str(part.model_type)


def refuse_attention(name: str, attention: str, error: Exception) -> None:
    """Raise a RecipeError if `error` says that transformers has no such attention for the model.

    name: the model, for the message. attention: the recipe's `model.attention`.
    """
    if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
        raise RecipeError(f"model.attention: transformers has no sdpa for {name}; set model.attention: eager") from None
    text = str(error).replace(name, "").lower()  # a model may be named Flash
    if attention != "sdpa" and ("attn_implementation" in text or "flash" in text):
        raise RecipeError(
            f"model.attention: {attention} does not run for {name}: {one_line(error)}; set model.attention: sdpa"
        ) from None
