"""The largest batch and the longest sequence: found, and the next one is too large."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.planner_helpers import H200, request_of, small_gpu
from tigon.planner.estimate import estimate
from tigon.planner.search.largest_batch import MAX_LOOKS, SHORTEST, largest, max_sizes

ROOMS = {
    "a line": lambda n: 1000 - 7 * n,
    "a line with a bend": lambda n: 1000 - 3 * n - max(0, 9 * (n - 40)),
    "a square": lambda n: 1000 - n * n,
    "steps": lambda n: 1000 - 64 * (n // 3),
    "nothing": lambda n: 3 - 4 * n,
    "exactly one": lambda n: 10 - 10 * n,
}


@pytest.mark.parametrize("start", (1, 8, 500))
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("margin", (0, 20))
def test_largest_size_is_found_within_5_percent(room, start, margin):
    """margin: bytes that are left but of no use, as a fragmented device's."""
    looks = []

    def counted(n):
        looks.append(n)
        return room(n) >= margin, room(n)

    found = largest(counted, start=start, limit=1000, empty=room(0))
    true = max((n for n in range(1, 1001) if room(n) >= margin), default=0)
    assert found <= true <= found + max(1, found // 20) and len(looks) <= MAX_LOOKS
    assert found == 0 or found in looks, "what is reported was looked at"


def test_search_for_the_largest_size_stops_at_the_limit():
    assert largest(lambda n: (True, 10**9), start=3, limit=40, empty=10**9) == 40


def test_batch_and_sequence_found_fit_and_larger_ones_do_not():
    gpu = small_gpu(160)
    request = request_of(batch=4, seq=256, shape={"max_position_embeddings": 1 << 16})
    found = max_sizes(request, gpu)

    def fits(**changes):
        return estimate(replace(request, **changes), gpu=gpu).device_bytes <= gpu.memory_bytes

    batch, seq = found.largest_batch, found.longest_sequence
    assert batch > 8 and fits(batch=batch) and not fits(batch=batch + 1 + batch // 20)
    assert seq > 512 and seq % SHORTEST == 0 and fits(seq=seq) and not fits(seq=seq + SHORTEST + seq // 20)


def test_longest_sequence_stops_at_max_position_embeddings():
    request = request_of(batch=1, seq=64)
    assert max_sizes(request, H200).longest_sequence == request.config.max_position_embeddings
