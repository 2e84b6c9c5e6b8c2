"""The memory in which a run writes completions itself, before the micro-batches of a step."""

from __future__ import annotations

from tigon.models.decoding.prompt_queue import Room
from tigon.models.decoding.rows import DECODED_KINDS
from tigon.models.kv_cache import kv_widths, queries_per_key
from tigon.objectives.rules.post_training import generator_obstacle
from tigon.planner.request import Request
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import ModelWeights
from tigon.techniques.precision import number_format

HALF, FP32 = 2, 4
SAMPLED_COPIES = 3
"""fp32 copies of the logits that the generator holds at once: scaled, noise, and their sum."""


def generate(ledger: Ledger, request: Request, model: ModelWeights) -> None:
    """Simulate the moment at which completions are longest: the last token of all samples of the optimizer step.

    The forward pass of the prompts is not simulated, because a micro-batch's passes over prompts with completions need
    more. tigon's generator holds a group's prompt once, and at most `MOST_ROWS` completions at a time. Under autocast
    the pass holds 16-bit copies of the trained matrices.
    """
    generation = request.objective.generation(request.seq)
    if generation is None:
        return
    samples = request.samples_per_step
    uses_generator = generation.generator != "transformers" and reason_for_transformers(request) is None
    itemsize = number_format(request.settings).compute_dtype.itemsize
    if uses_generator:  # its pool keeps all tokens of a layer with a window too
        prompts = -(-samples // generation.per_prompt)
        room = Room.of(samples, prompts * generation.prompt_tokens, generation.prompt_tokens)
        samples = room.rows
        tokens = room.prompt_tokens + samples * generation.new_tokens
        cache = [tokens * width * itemsize for widths in kv_widths(request.config, 1) for width in widths]
    else:
        tokens = generation.prompt_tokens + generation.new_tokens
        cache = [samples * width * itemsize for widths in kv_widths(request.config, tokens) for width in widths]
    copies = [HALF * weight.numel for weight in model.trained if len(weight.shape) == 2]
    under_autocast = number_format(request.settings).autocast is not None
    ledger.enter("forward")
    held = [ledger.alloc(nbytes, "activations") for nbytes in cache]
    if under_autocast:
        held += [ledger.alloc(nbytes, "activations") for nbytes in copies]
    if not uses_generator:
        # A layer's cache grows by concatenation, so its old and new tensors exist together. With a mask, attention
        # repeats keys and values for the queries that share them.
        shared_by, largest = queries_per_key(request.config), sorted(cache)[-2:]
        ledger.alloc_briefly(*largest, *(shared_by * nbytes for nbytes in largest), component="activations")
    # The last token's logits as the model returns them, in fp32, and their probabilities. The generator adds noise to
    # them instead, and captures these tensors in a graph, whose memory is its own.
    # Accelerate turns logits under autocast into fp32.
    logits = samples * model.lm_head_shape[0]
    in_fp32 = SAMPLED_COPIES if uses_generator else 2
    ledger.alloc_briefly(
        logits * (FP32 if under_autocast else itemsize), *[logits * FP32] * in_fp32, component="logits"
    )
    ledger.free_all(held)


def reason_for_transformers(request: Request) -> str | None:
    """Why `auto` leaves the completions to transformers on a GPU; None without `auto`, and if it does not."""
    generation = request.objective.generation(request.seq)
    if generation is None or generation.generator != "auto":
        return None
    if obstacle := generator_obstacle(request.settings, "auto"):
        return "because of {}; {} uses tigon's generator".format(*obstacle)
    kinds = set(getattr(request.config.get_text_config(), "layer_types", None) or ())
    return None if kinds <= DECODED_KINDS else f"because of layers of {', '.join(sorted(kinds - DECODED_KINDS))}"
