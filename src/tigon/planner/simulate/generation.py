"""The memory in which a run writes completions itself, before the micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass

from tigon.models.decoding.memory import FP32, SPARE, cache_bytes, logits_bytes
from tigon.models.decoding.prompt_queue import Room
from tigon.models.decoding.rows import DECODED_KINDS
from tigon.models.kv_cache import kv_widths, queries_per_key
from tigon.objectives.base import Generation
from tigon.objectives.rules.post_training import generator_obstacle
from tigon.planner.request import Request
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import ModelWeights
from tigon.techniques.precision import number_format
from tigon.units import in_bytes

HALF = 2


@dataclass(frozen=True, kw_only=True)
class WholeWeights:
    """Whether the GPUs gather the whole weights once for all completions of a step.

    That is so under ZeRO-3, where TRL gathers them, and under FSDP2 if tigon's generator writes.
    """

    for_generator: bool = False
    for_transformers: bool = False
    each_pass: bool = False
    """Each pass of transformers' `generate` gathers each layer instead."""


ALL_HELD = WholeWeights()
"""The GPU holds the whole weights anyway."""


@dataclass(frozen=True, kw_only=True)
class Completions:
    """How a GPU writes the completions of one optimizer step."""

    generation: Generation
    samples: int
    room: Room
    """Of tigon's generator."""
    why_transformers: str | None
    """Why `auto` leaves them to transformers. None: tigon's generator writes, or the recipe chose transformers."""
    by_generator: bool
    gathered_bytes: int
    """The whole weights, if the GPU holds a part of them otherwise."""
    gathers_each_pass: bool
    """Each pass over a token gathers each layer."""
    peak_bytes: int
    """The memory that the GPU holds at the last token."""


def generate(
    ledger: Ledger, request: Request, model: ModelWeights, whole: WholeWeights = ALL_HELD
) -> Completions | None:
    """Simulate the moment at which completions are longest: the last token of all samples of the optimizer step.

    The forward pass of the prompts is not simulated, because a micro-batch's passes over prompts with completions need
    more. tigon's generator holds a group's prompt once, and at most `MOST_ROWS` completions at a time. Under autocast
    the pass holds 16-bit copies of the trained matrices. Gathered weights have the dtype of the products.

    Args:
        request: With the settings that the GPU computes with.
        whole: Of the engine.

    Returns:
        How the completions are written; None if the objective writes none.
    """
    generation = request.objective.generation(request.seq)
    if generation is None:
        return None
    number = number_format(request.settings)
    itemsize = number.compute_dtype.itemsize
    samples, reason = request.samples_per_step, reason_for_transformers(request)
    prompts = -(-samples // generation.per_prompt)
    room = Room.of(samples, prompts * generation.prompt_tokens, generation.prompt_tokens)
    vocab_size, whole_bytes = model.lm_head_shape[0], itemsize * model.numel
    by_generator = generation.generator != "transformers" and reason is None
    own = cache_bytes(request.config, room, generation.new_tokens, itemsize)
    if by_generator and whole.for_generator and not whole.for_transformers and generation.generator == "auto":
        needed = whole_bytes + sum(own) + sum(logits_bytes(room.rows, vocab_size, itemsize))
        reason = _missing_memory(ledger, needed)
        by_generator = reason is None
    gathers = whole.for_generator if by_generator else whole.for_transformers
    under_autocast = number.autocast is not None
    copies = [HALF * weight.numel for weight in model.trained if len(weight.shape) == 2] if under_autocast else []
    ledger.enter("forward")
    held = [ledger.alloc(whole_bytes, "weights")] if gathers else []
    if by_generator:
        cache = own
    else:
        tokens = generation.prompt_tokens + generation.new_tokens
        cache = [samples * width * itemsize for widths in kv_widths(request.config, tokens) for width in widths]
    held += [ledger.alloc(nbytes, "activations") for nbytes in (*cache, *copies)]
    peak_bytes = ledger.live_bytes
    if not by_generator:
        # A layer's cache grows by concatenation, so its old and new tensors exist together. With a mask, attention
        # repeats keys and values for the queries that share them.
        shared_by, largest = queries_per_key(request.config), sorted(cache)[-2:]
        ledger.alloc_briefly(*largest, *(shared_by * nbytes for nbytes in largest), component="activations")
    # The last token's logits as the model returns them, in fp32, and their probabilities. The generator adds noise to
    # them instead, and captures these tensors in a graph, whose memory is its own.
    # Accelerate turns logits under autocast into fp32.
    logits = logits_bytes(room.rows if by_generator else samples, vocab_size, FP32 if under_autocast else itemsize)
    logits = logits if by_generator else logits[:3]
    ledger.alloc_briefly(*logits, component="logits")
    ledger.free_all(held)
    return Completions(
        generation=generation,
        samples=samples,
        room=room,
        why_transformers=reason,
        by_generator=by_generator,
        gathered_bytes=whole_bytes if gathers else 0,
        gathers_each_pass=whole.each_pass and not by_generator,
        peak_bytes=peak_bytes + sum(logits),
    )


def _missing_memory(ledger: Ledger, needed: int) -> str | None:
    """Why whole weights, keys and values do not fit beside what the GPU holds, as the run will find."""
    limit = ledger.allocator.limit_bytes
    if limit is None or SPARE * needed <= limit - ledger.live_bytes:
        return None
    free = in_bytes(limit - ledger.live_bytes)
    return f"because whole weights, keys and values take {in_bytes(needed)}, and {free} are free"


def reason_for_transformers(request: Request) -> str | None:
    """Why `auto` leaves the completions to transformers on a GPU; None without `auto`, and if it does not."""
    generation = request.objective.generation(request.seq)
    if generation is None or generation.generator != "auto":
        return None
    if obstacle := generator_obstacle(request.settings, "auto"):
        return "because of {}; {} uses tigon's generator".format(*obstacle)
    kinds = set(getattr(request.config.get_text_config(), "layer_types", None) or ())
    return None if kinds <= DECODED_KINDS else f"because of layers of {', '.join(sorted(kinds - DECODED_KINDS))}"
