"""How far a configuration reaches: the largest batch at its sequence, the longest sequence at its batch.

Allocated memory is piecewise affine in either, so a straight line through two points finds the next place to look; the
answer is always a place that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tigon.planner.engines.non_allocator_memory import room_bytes
from tigon.planner.estimate import estimate
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, text_config
from tigon.planner.search.pool import Beside

MAX_LOOKS = 10
FRAGMENTS = 0.98
SHORTEST = 128


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Predicted to fit; 0 where not even the smallest does."""

    largest_batch: int
    """Rows of a micro-batch, at the request's sequence: exact up to 50 rows, then to 4%."""
    longest_sequence: int
    """Tokens, at the request's batch: a multiple of 128, to 4%; never beyond the model's positions."""


def extents(request: Request, gpu: Gpu) -> Extents:
    """Solve for both, with a few traces each: the batch in a process beside this one, where processes can be forked."""
    beside = Beside(largest_batch, request, gpu)
    return Extents(longest_sequence=longest_sequence(request, gpu), largest_batch=beside.result())


def largest_batch(request: Request, gpu: Gpu) -> int:
    """Rows of a micro-batch."""
    return largest(
        lambda n: _room(request, gpu, batch=n), start=request.batch, limit=1 << 16, empty=_empty(request, gpu)
    )


def longest_sequence(request: Request, gpu: Gpu) -> int:
    """Tokens in a row."""
    limit = int(getattr(text_config(request.config), "max_position_embeddings", None) or 1 << 20)
    return SHORTEST * largest(
        lambda n: _room(request, gpu, seq=min(n * SHORTEST, limit)), start=max(1, request.seq // SHORTEST),
        limit=max(1, limit // SHORTEST), empty=_empty(request, gpu),
    )  # fmt: skip


def _room(request: Request, gpu: Gpu, **changes: Any) -> tuple[bool, int]:
    asked = replace(request, choices=replace(request.choices, accumulate=1), **changes)
    found = estimate(asked, gpu=gpu, evaluation=False)
    return found.device_bytes <= gpu.memory_bytes, room_bytes(gpu, request.choices) - found.peak_allocated_bytes


def _empty(request: Request, gpu: Gpu) -> int:
    at_rest = estimate(replace(request, choices=replace(request.choices, accumulate=1)), gpu=gpu, evaluation=False)
    held = at_rest.components["weights"] + at_rest.components["optimizer"]
    return room_bytes(gpu, request.choices) - held


def largest(room: Callable[[int], tuple[bool, int]], *, start: int, limit: int, empty: int) -> int:
    """The largest n from 1 to `limit` that fits; beyond 50 to 4%. 0: not even 1.

    room(n): whether n fits, and the bytes that what is allocated leaves of the device, which fall with n and at n = 0
    are `empty`. The two differ by what the caching allocator cannot reuse, so that a straight line through the bytes
    leads close to the answer, and halving the rest of the way leads there.
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
        # The line says no more once fragments decide; nor twice in a row after it cut off less than half.
        halve = high <= limit and (known[high] >= 0 or (not halve and len(known) > 2 and high - low > span // 2))
        guess = _between(low, high) if halve else _end_of_line(known, low, high)
        guess = min(max(guess, low + unit), high - 1)
    return low


def _between(low: int, high: int) -> int:
    """The geometric middle of a wide stretch, the arithmetic one of a narrow one."""
    return math.isqrt(max(low, 1) * high) if high > 4 * low else (low + high) // 2


def _end_of_line(known: dict[int, int], low: int, high: int) -> int:
    """Where a line through the last place that fits and the first that does not, or through the last two that fit,
    meets no room, less what fragments take as a rule."""
    a, b = (low, high) if high in known else sorted(known)[-2:]
    slope = (known[b] - known[a]) / (b - a)
    return int(FRAGMENTS * (a - known[a] / slope)) if slope < 0 else 2 * b
