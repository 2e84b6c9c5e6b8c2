"""Whether a model decodes by the generator as by its own forward.

The generator relies on how most families of transformers are written: layers hand keys and values to a cache, and call
an attention function of the interface. A few steps show whether a model is so, whatever its family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tigon.errors import one_line
from tigon.models.decoding.generator import evaluating, generate
from tigon.models.decoding.rows import DECODED_KINDS, Limits
from tigon.models.decoding.sampling import Sampling
from tigon.models.hybrid_layers import counts_of
from tigon.models.patch import unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = (5, 3)
NEW_TOKENS = 3
TOLERANCE = 0.1
"""Of log-probabilities, relative to the spread of the logits. In bf16 they differ by some percent."""


def refusal(model: PreTrainedModel) -> str | None:
    """The reason why the generator cannot write this model's completions, in one clause; None if it can.

    It writes a few tokens, and compares their log-probabilities with those of one forward pass without a cache.
    """
    inner: Any = unwrap(model)
    config = inner.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - DECODED_KINDS
    if kinds or counts_of(inner):
        others = ", ".join(sorted(kinds)) or "state space"
        return f"it has layers that attend neither to all earlier tokens nor to a window ({others})"
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]
    prompts.append(prompts[0])
    try:
        written = generate(model, prompts, Limits(new_tokens=NEW_TOKENS), Sampling(), graphs=False)
        each = zip(prompts, written.tokens, written.logprobs, strict=True)
        worst = max(_error(model, prompt, tokens, logprobs) for prompt, tokens, logprobs in each)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a family's forward may raise anything for a cache that it does not take
        return f"its forward does not take the generator's cache ({one_line(error)})"
    if worst <= TOLERANCE:
        return None
    return f"its log-probabilities differ from those of its own forward by {worst:.0%} of the logits' spread"


def _error(model: PreTrainedModel, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
    """The mean difference from one forward pass over prompt and completion, in standard deviations of the logits."""
    ids = torch.tensor([prompt + tokens], device=next(model.parameters()).device)
    with evaluating(model), torch.no_grad():
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected_T = torch.log_softmax(logits_TV, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    error = (torch.tensor(logprobs, device=ids.device) - expected_T).abs().mean()
    return float(error / logits_TV.std(-1).mean().clamp(min=1e-6))
