"""Every allocation on a CUDA device, from the caching allocator's own history.

`torch.cuda.memory._record_memory_history` notes each allocation and release with its Python frames (2 us each);
C++ frames would take minutes to name. Backward runs in C++ and has none, so `watch.py` says which autograd node runs.

The history keeps the bytes that were asked for, while torch.cuda.memory_allocated() counts them in units of 512: here
they count so too. Where the allocator hands out a block with up to 1 MiB more than that, because the rest would be too
small to split off, `allocator_peak_bytes` is larger than the timeline's peak by it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tigon.errors import UsageError
from tigon.profiler.recording.frames import readable
from tigon.profiler.recording.journal import RawEvent, Recorder, Recording
from tigon.profiler.timeline.timeline import Call

# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
_ROUND_BYTES = 512
_MAX_ENTRIES = 2_000_000
"""Of a few KB each in host memory. A run of 32 layers makes some 20 thousand a step."""


class CudaRecorder(Recorder):
    """Of one device, in this process. `snapshot` is where the history goes for PyTorch's own viewer."""

    device_type = "cuda"

    def __init__(self, device: torch.device, snapshot: Path) -> None:
        self._device, self._snapshot = device, snapshot
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._counts: list[int] = []
        self._first = self._base_bytes = 0

    def start(self) -> None:
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise UsageError(f"the allocator {backend} keeps no history: unset PYTORCH_CUDA_ALLOC_CONF's backend")
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES, clear_history=True
        )
        self._base_bytes = torch.cuda.memory_allocated(self._device)
        self._first = self._count()

    def position(self) -> int:
        self._counts.append(self._count())
        return len(self._counts) - 1

    def _count(self) -> int:
        """Allocations and releases so far: the same events that the history keeps, counted by the allocator, so that
        no clock is needed to place something between two of them."""
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]
        return int(counts["allocated"]) + int(counts["freed"])

    def stop(self) -> Recording:
        torch.cuda.synchronize(self._device)
        last = self._count()
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        with self._snapshot.open("wb") as handle:
            pickle.dump(snapshot, handle)
        events = read_snapshot(snapshot, self._index)
        if len(events) != last - self._first:
            raise UsageError(
                f"the allocator's history holds {len(events):,} of {last - self._first:,} events; lower --steps"
            )
        return Recording(
            str(self._device), events, [count - self._first for count in self._counts], self._base_bytes, peak_bytes,
            [
                "Memory that is not the caching allocator's (CUDA context, NCCL) is not in it.",
                "Times are the host's, which is ahead of the device.",
            ],
        )  # fmt: skip


def read_snapshot(snapshot: Mapping[str, Any], device: int) -> list[RawEvent]:
    """The allocations and releases of one device in what `torch.cuda.memory._snapshot()` returned.

    A release counts when it is asked for, as in memory_allocated(); another stream may use the block a little longer.
    """
    known: dict[tuple[tuple[str, int, str], ...], Call] = {}
    found = []
    for entry in snapshot["device_traces"][device]:
        if entry["action"] == "alloc":
            frames = tuple((f["filename"], f["line"], f["name"]) for f in entry.get("frames", ()))
            call = known.get(frames)
            if call is None:
                call = known[frames] = Call(frames=readable(frames))
            found.append(RawEvent(1000 * entry.get("time_us", 0), entry["addr"], _rounded(entry["size"]), call))
        elif entry["action"] == "free_requested":
            found.append(RawEvent(1000 * entry.get("time_us", 0), entry["addr"], -_rounded(entry["size"]), Call()))
    return found


def _rounded(nbytes: int) -> int:
    return max(_ROUND_BYTES, -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES)
