"""A reward model: the layers of a causal language model with one score in place of the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tigon.errors import UsageError
from tigon.models.kv_cache import without_cache
from tigon.models.loading.classifier import task_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def with_score(built: PreTrainedModel) -> Any:
    """The model of transformers for sequence classification, with the layers of `built` and a new score layer.

    Args:
        built: A causal language model; the result shares its layers. A model with a classification head is returned.

    Returns:
        A model whose output `logits` are scores of shape (B, 1).

    Raises:
        UsageError: transformers has no sequence classification for this type of model, or another one.
    """
    from transformers import AutoModelForSequenceClassification

    if task_of(built.config) is not None:
        return built
    config = type(built.config).from_dict({**built.config.to_dict(), "num_labels": 1})
    config._attn_implementation = built.config._attn_implementation
    try:
        with torch.device("meta"):
            scored = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        raise UsageError(f"transformers has no sequence classification for {config.model_type} models") from None
    prefix, weight = scored.base_model_prefix, built.get_input_embeddings().weight
    if not (isinstance(getattr(scored, "score", None), nn.Linear) and hasattr(built, prefix)):
        raise UsageError(f"the sequence classification of {config.model_type} models has no linear score layer")
    score = nn.Linear(scored.score.in_features, 1, bias=scored.score.bias is not None)
    score.weight.data.normal_(std=getattr(config, "initializer_range", 0.02))
    if score.bias is not None:
        score.bias.data.zero_()
    setattr(scored, prefix, getattr(built, prefix))
    scored.score = score.to(device=weight.device, dtype=weight.dtype)
    without_cache(scored)
    return scored
