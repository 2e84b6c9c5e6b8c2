"""Simulates PyTorch's caching allocator, to predict how much memory it reserves for a sequence of allocations.

Rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11) with default settings: no limit on
splitting. A request gets the best-fitting free block of its stream. Free segments of any stream return to the device
only if a new segment would not fit otherwise.

With expandable segments, free pages return to the device before a request fails, wherever they are. So what has to fit
is the memory in use, and the rest of the pages that it touches. This is what the simulation then gives as reserved; a
run may hold more while there is room.

`tigon train` switches them on for runs that keep activations or frozen layers on the host (`sets_expandable_segments`).
"""

from __future__ import annotations

import bisect
import os
import sys
from collections import defaultdict
from dataclasses import dataclass

from tigon.planner.gpus import Gpu
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST, OFFLOAD
from tigon.techniques.keys.settings import Settings

ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
_NAMES = ("PYTORCH_ALLOC_CONF", ALLOCATOR_SETTINGS)
"""The variables that PyTorch reads; the first one that is set counts."""
EXPANDABLE = "expandable_segments:True"
_PAGES = 65 / 64
"""Bytes of the pages in use per byte in use, with expandable segments. Long rows on an H100 held 0.6 to 1.5 % more than
was in use (benchmarks/results/nvidia-h100/planner). One that ran out of memory held 1.2 % more."""
MIN_BLOCK = 512
SMALL = 1 << 20
"""Requests up to this come from the pool of small segments."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
"""Segment for requests below MIN_LARGE."""
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


def given_settings() -> str | None:
    """PyTorch's allocator settings in this process's environment; None if there are none."""
    return next((os.environ[name] for name in _NAMES if os.environ.get(name)), None)


def has_expandable_segments() -> bool:
    """Whether PyTorch's setting in this process's environment switches expandable segments on."""
    return EXPANDABLE in (given_settings() or "")


def sets_expandable_segments(settings: Settings, gpu: Gpu | None) -> bool:
    """Whether `tigon train` switches expandable segments on for a run with these settings.

    It does so on one NVIDIA GPU if activations or frozen layers wait on the host. Such runs have long rows, whose large
    tensors leave large gaps: 7 to 13 % of the plans for README.md's lengths. Settings of the user's own stay.

    Args:
        settings: The run's techniques.
        gpu: The planner's row; None: an NVIDIA GPU.
    """
    alone = settings.sharding.gpus == 1 and not settings.sharding.divides_states
    nvidia = gpu is None or gpu.arch >= (7, 0)
    return waits_on_host(settings) and alone and nvidia and sys.platform != "win32" and given_settings() is None


def waits_on_host(settings: Settings) -> bool:
    """Whether activations or frozen layers wait in host memory for their use."""
    return settings.train.checkpointing in (OFFLOAD, KEPT_ON_HOST) or settings.lora.base_offload


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
            self.reserved_bytes = -(-int(_PAGES * self.allocated_bytes) // ROUND_LARGE) * ROUND_LARGE
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
