"""Records every allocation on a CUDA device, from the history of the caching allocator.

`torch.cuda.memory._record_memory_history` notes each allocation and release with its Python frames (2 us each).
Resolving C++ frames would take minutes. Backward runs in C++ without Python frames, so `watch.py` records which
autograd node runs.

The history has the requested bytes. This module rounds them up to multiples of 512, as torch.cuda.memory_allocated()
does. The allocator may also return a block that is up to 1 MiB larger, because it does not split off small remainders.
`allocator_peak_bytes` exceeds the timeline's peak by these remainders.
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
"""Limit on the history. An event takes a few KB of host memory; 32 layers make about 20 thousand per step."""
_NOTES = [
    "Memory outside the caching allocator (CUDA context, NCCL) is not recorded.",
    "Times are those of the host, which runs ahead of the device.",
]


class CudaRecorder(Recorder):
    """Records one device in this process. The history is written to `snapshot` for PyTorch's memory viewer."""

    device_type = "cuda"

    def __init__(self, device: torch.device, snapshot: Path) -> None:
        self._device, self._snapshot = device, snapshot
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._counts: list[int] = []
        self._first = self._base_bytes = 0

    def start(self) -> None:
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise UsageError(f"the allocator {backend} records no history; unset backend in PYTORCH_CUDA_ALLOC_CONF")
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
        """Allocations and releases so far, counted by the allocator.

        These are the events of the history, so that the count gives a place between two events without a clock.
        """
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
        positions = [count - self._first for count in self._counts]
        return Recording(str(self._device), events, positions, self._base_bytes, peak_bytes, _NOTES)


def read_snapshot(snapshot: Mapping[str, Any], device: int) -> list[RawEvent]:
    """The allocations and releases of one device in a `torch.cuda.memory._snapshot()`.

    A release counts when it is requested, as in memory_allocated(). Another stream may use the block a little longer.
    """
    known: dict[tuple[tuple[str, int, str], ...], Call] = {}
    events = []
    for entry in snapshot["device_traces"][device]:
        if entry["action"] == "alloc":
            frames = tuple((f["filename"], f["line"], f["name"]) for f in entry.get("frames", ()))
            call = known.get(frames)
            if call is None:
                call = known[frames] = Call(frames=readable(frames))
            events.append(RawEvent(1000 * entry.get("time_us", 0), entry["addr"], _rounded(entry["size"]), call))
        elif entry["action"] == "free_requested":
            events.append(RawEvent(1000 * entry.get("time_us", 0), entry["addr"], -_rounded(entry["size"]), Call()))
    return events


def _rounded(nbytes: int) -> int:
    return max(_ROUND_BYTES, -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES)
