"""Generates text with the model of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end an answer: those of the generation config, and the tokenizer's."""
    # A reward model has no generation config.
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]


def generated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: list[int], n_tokens: int, **options: Any
) -> list[int]:
    """The tokens after `prompt`. options: More options of the model's `generate`."""
    device, was_training = next(model.parameters()).device, model.training
    pads = (tokenizer.pad_token_id, *end_tokens(model, tokenizer), 0)
    options["pad_token_id"] = next(i for i in pads if i is not None)
    model.eval()
    with torch.no_grad():
        ids = model.generate(
            input_ids=torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=n_tokens,
            use_cache=True,
            **options,
        )
    model.train(was_training)
    return list(ids[0, len(prompt) :].tolist())
