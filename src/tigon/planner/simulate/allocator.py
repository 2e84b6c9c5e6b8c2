"""Simulates PyTorch's caching allocator, to predict how much memory it reserves for a sequence of allocations.

Rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11) with default settings: no limit on
splitting. A request gets the best-fitting free block of its stream. Free segments of any stream return to the device
only if a new segment would not fit otherwise.

With expandable segments, free pages return to the device before a request fails, wherever they are. So what has to fit
is the memory in use. This is what the simulation then gives as reserved; a run may hold more while there is room.
"""

from __future__ import annotations

import bisect
import os
from collections import defaultdict
from dataclasses import dataclass

ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
MIN_BLOCK = 512
SMALL = 1 << 20
"""Requests up to this come from the pool of small segments."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
"""Segment for requests below MIN_LARGE."""
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


def has_expandable_segments() -> bool:
    """Whether PyTorch's setting in this process's environment switches expandable segments on."""
    return "expandable_segments:True" in os.environ.get(ALLOCATOR_SETTINGS, "")


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment."""

    size: int
    address: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None
    stream: int = 0
    """Only requests of the same stream can reuse the block."""


class CachingAllocator:
    """`allocate` returns a handle for `free`; `reserved_bytes` and `peak_reserved_bytes` are its statistics.

    limit_bytes: the device's memory for the allocator; None: no limit. A request that does not fit still succeeds.
    expandable: with expandable segments.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.limit_bytes, self._expandable = limit_bytes, expandable
        self.allocated_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0
        # (size, address, block) by stream and by pool (large or small). The lists are sorted, so the best fit is the
        # first block that is large enough.
        self._pools: defaultdict[tuple[int, bool], list[tuple[int, int, Block]]] = defaultdict(list)
        self._next_address = 0

    def allocate(self, nbytes: int, *, stream: int = 0) -> Block:
        """Allocate `nbytes` (more than 0) from a pool of the stream."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        if self._expandable:
            self.allocated_bytes += size
            self.reserved_bytes = -(-self.allocated_bytes // ROUND_LARGE) * ROUND_LARGE
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            return Block(size, 0, stream=stream)
        small = size <= SMALL
        pool = self._pools[stream, small]
        at = bisect.bisect_left(pool, (size, -1))
        # PyTorch splits the best fit however large its rest is, because max_split_size is unlimited.
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, stream)
        left = block.size - size
        if left >= MIN_BLOCK if small else left > SMALL:
            rest = Block(left, block.address + size, before=block, after=block.after, stream=stream)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._put(rest, small)
        block.free = False
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block, *, small: bool) -> None:
        """Return a block to its pool; free neighbours merge with it. small: whether it is the pool of small blocks."""
        self.allocated_bytes -= block.size
        if self._expandable:
            return
        pool = self._pools[block.stream, small]
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove(pool, before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            self._remove(pool, after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self._put(block, small)

    def _segment(self, size: int, stream: int) -> Block:
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            self.release()
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        # A gap between segments keeps their blocks from merging.
        self._next_address += segment + MIN_BLOCK
        return Block(segment, self._next_address - segment - MIN_BLOCK, stream=stream)

    def release(self) -> None:
        """Return segments that are entirely free to the device, like torch.cuda.empty_cache()."""
        for pool in self._pools.values():
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            pool[:] = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]

    def _put(self, block: Block, small: bool) -> None:
        block.free = True
        bisect.insort(self._pools[block.stream, small], (block.size, block.address, block))

    @staticmethod
    def _remove(pool: list[tuple[int, int, Block]], block: Block) -> None:
        del pool[bisect.bisect_left(pool, (block.size, block.address))]


def is_small(nbytes: int) -> bool:
    """Whether a request of `nbytes` comes from the pool of small segments."""
    return nbytes <= SMALL
