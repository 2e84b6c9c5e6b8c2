"""The memory in which a run writes completions itself, before the micro-batches of a step."""

from __future__ import annotations

from tigon.models.kv_cache import kv_widths, queries_per_key
from tigon.planner.request import Request
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import ModelWeights
from tigon.techniques.precision import format_of

HALF, FP32 = 2, 4


def generate(ledger: Ledger, request: Request, model: ModelWeights) -> None:
    """Simulate the moment at which completions are longest: the last token of all samples of the optimizer step.

    The forward pass of the prompts is not simulated, because a micro-batch's passes over prompts with completions need
    more. Under autocast the pass holds 16-bit copies of the trained matrices.
    """
    generation = request.objective.generation(request.seq)
    if generation is None:
        return
    samples = request.batch * request.settings.train.gradient_accumulation
    tokens = generation.prompt_tokens + generation.new_tokens
    itemsize = format_of(request.settings).products.itemsize
    cache = [samples * width * itemsize for widths in kv_widths(request.config, tokens) for width in widths]
    copies = [HALF * weight.numel for weight in model.trained if len(weight.shape) == 2]
    ledger.enter("forward")
    held = [ledger.alloc(nbytes, "activations") for nbytes in cache]
    if format_of(request.settings).autocast is not None:
        held += [ledger.alloc(nbytes, "activations") for nbytes in copies]
    # A layer's cache grows by concatenation, so its old and new tensors exist together. With a mask, attention repeats
    # keys and values for the queries that share them.
    shared_by, largest = queries_per_key(request.config), sorted(cache)[-2:]
    ledger.alloc_briefly(*largest, *(shared_by * nbytes for nbytes in largest), component="activations")
    vocab = model.lm_head_shape[0]
    # The last token's logits as the model returns them, in fp32, and their probabilities.
    ledger.alloc_briefly(samples * vocab * itemsize, *[samples * vocab * FP32] * 2, component="logits")
    ledger.free_all(held)
