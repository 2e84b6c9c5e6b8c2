"""The largest batch of a configuration at its sequence length, and its longest sequence at its batch size.

Allocated memory is piecewise linear in both, so a straight line through two estimates leads to the next guess. The
result is always a size that was estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tigon.planner.engines.non_allocator_memory import allocator_budget_bytes
from tigon.planner.estimate import estimate
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, text_config
from tigon.planner.search.pool import ForkedCall

MAX_LOOKS = 10
FRAGMENTS = 0.98
SHORTEST = 128


@dataclass(frozen=True, kw_only=True)
class MaxSizes:
    """The largest sizes that are predicted to fit; 0 if the smallest does not fit."""

    largest_batch: int
    """Samples per micro-batch at the request's sequence length. Below 50, one more sample is predicted not to fit. From
    50 on, the largest batch that fits may be up to 4% larger. The search stops after `MAX_LOOKS` estimates."""
    longest_sequence: int
    """Tokens per sample at the request's batch size; a multiple of 128, and at most the model's positions. Below 50 x
    128 tokens, 128 more are predicted not to fit. From there on, the longest that fits may be up to 4% longer."""


def max_sizes(request: Request, gpu: Gpu) -> MaxSizes:
    """Search for both with a few traces each. A forked process searches for the batch if the system can fork."""
    batch_call = ForkedCall(largest_batch, request, gpu)
    return MaxSizes(longest_sequence=longest_sequence(request, gpu), largest_batch=batch_call.result())


def largest_batch(request: Request, gpu: Gpu) -> int:
    """The most samples per micro-batch that fit, as a multiple of the objective's least batch; or 0."""
    unit = request.objective.least_batch
    return unit * largest(
        lambda n: _room(replace(request, batch=n * unit), gpu),
        start=max(1, request.batch // unit),
        limit=max(1, request.objective.most_batch // unit),
        empty=_empty(request, gpu),
    )


def longest_sequence(request: Request, gpu: Gpu) -> int:
    """The most tokens per sample that fit, or 0."""
    limit = int(getattr(text_config(request.config), "max_position_embeddings", None) or 1 << 20)
    limit -= request.objective.sequence_tokens(request.seq) - request.seq
    return SHORTEST * largest(
        lambda n: _room(replace(request, seq=min(n * SHORTEST, limit)), gpu),
        start=max(1, request.seq // SHORTEST),
        limit=max(1, limit // SHORTEST),
        empty=_empty(request, gpu),
    )


def _room(request: Request, gpu: Gpu) -> tuple[bool, int]:
    prediction = estimate(_one_micro_batch(request), gpu=gpu, evaluation=False)
    return prediction.device_bytes <= gpu.memory_bytes, allocator_budget_bytes(
        gpu, request.settings
    ) - prediction.peak_allocated_bytes


def _one_micro_batch(request: Request) -> Request:
    return replace(request, settings=request.settings.having({"train.gradient_accumulation": 1}))


def _empty(request: Request, gpu: Gpu) -> int:
    at_rest = estimate(_one_micro_batch(request), gpu=gpu, evaluation=False)
    held = at_rest.components["weights"] + at_rest.components["optimizer"]
    return allocator_budget_bytes(gpu, request.settings) - held


def largest(room: Callable[[int], tuple[bool, int]], *, start: int, limit: int, empty: int) -> int:
    """The largest n from 1 to `limit` that fits, to 4% from 50 on; 0 if 1 does not fit.

    room(n) returns whether n fits, and the bytes of the device that remain after allocated memory. These bytes fall
    with n; at n = 0 they are `empty`. A straight line through them leads close to the result. The last steps halve the
    range, because the caching allocator cannot reuse some memory.
    """
    known = {0: empty}
    low, high, halve = 0, limit + 1, False
    guess = min(start, limit)
    for _ in range(MAX_LOOKS):
        span = high - low
        fits, known[guess] = room(guess)
        low, high = (guess, high) if fits else (low, guess)
        unit = max(1, low // 25)
        if high - low <= unit:
            break
        # Halve the range if fragmentation decides, because the line does not predict it. Halve it also after the line
        # has cut off less than half of it.
        halve = high <= limit and (known[high] >= 0 or (not halve and len(known) > 2 and high - low > span // 2))
        guess = _between(low, high) if halve else _end_of_line(known, low, high)
        guess = min(max(guess, low + unit), high - 1)
    return low


def _between(low: int, high: int) -> int:
    """The geometric mean of the ends of a wide range, the arithmetic mean of those of a narrow one."""
    return math.isqrt(max(low, 1) * high) if high > 4 * low else (low + high) // 2


def _end_of_line(known: dict[int, int], low: int, high: int) -> int:
    """The n at which a line through two known sizes reaches 0 bytes, reduced by the usual fragmentation.

    The two sizes are the largest that fits and the smallest that does not, or the two largest that fit.
    """
    a, b = (low, high) if high in known else sorted(known)[-2:]
    slope = (known[b] - known[a]) / (b - a)
    return int(FRAGMENTS * (a - known[a] / slope)) if slope < 0 else 2 * b
