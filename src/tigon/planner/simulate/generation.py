"""The memory in which a run writes completions itself, before the micro-batches of a step."""

from __future__ import annotations

from typing import Any

from tigon.planner.request import Request, text_config
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import ModelWeights

HALF, FP32 = 2, 4


def generate(ledger: Ledger, request: Request, model: ModelWeights) -> None:
    """Simulate the moment at which completions are longest: the last token of all samples of the optimizer step.

    The forward pass of the prompts is not simulated, because a micro-batch's passes over prompts with completions need
    more. Under autocast the pass holds 16-bit copies of the trained matrices.
    """
    generation = request.objective.generation(request.seq)
    if generation is None:
        return
    samples = request.batch * request.choices.accumulate
    tokens = generation.prompt_tokens + generation.new_tokens
    itemsize = FP32 if request.choices.precision == "fp32" else HALF
    cache = [
        samples * width * itemsize for widths in kv_widths(request.config, tokens) for width in widths
    ]  # fmt: skip
    copies = [HALF * weight.numel for weight in model.trained if len(weight.shape) == 2]
    ledger.enter("forward")
    held = [ledger.alloc(nbytes, "activations") for nbytes in cache]
    if request.choices.precision.startswith("amp"):
        held += [ledger.alloc(nbytes, "activations") for nbytes in copies]
    # A layer's cache grows by concatenation, so its old and new tensors exist together. With a mask, attention repeats
    # keys and values for each query head.
    text = text_config(request.config)
    shared_by = text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    largest = sorted(cache)[-2:]
    ledger.alloc_briefly(*largest, *(shared_by * nbytes for nbytes in largest), component="activations")
    vocab = model.lm_head_shape[0]
    # The last token's logits as the model returns them, in fp32, and their probabilities.
    ledger.alloc_briefly(samples * vocab * itemsize, *[samples * vocab * FP32] * 2, component="logits")
    ledger.free_all(held)


def kv_widths(config: Any, tokens: int) -> list[tuple[int, int]]:
    """(elements of the keys, elements of the values) that the cache of each layer holds for one sequence."""
    text = text_config(config)
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_width, value_width = getattr(text, "qk_head_dim", None) or width, getattr(text, "v_head_dim", None) or width
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    window = getattr(text, "sliding_window", None) or tokens
    kept = [min(tokens, window - 1) if kind == "sliding_attention" else tokens for kind in kinds]
    return [(key_heads * key_width * n, key_heads * value_width * n) for n in kept]
