"""How much memory a device has and holds, in bytes: PyTorch's allocator on CUDA, the whole process on the CPU."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def total_bytes(device: torch.device) -> int:
    """The total memory of the device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(_psutil().virtual_memory().total)


def used_bytes(device: torch.device) -> tuple[int, int]:
    """(now, peak) in bytes: PyTorch's allocations on CUDA, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    now_bytes = int(_psutil().Process().memory_info().rss)
    # Linux updates the two counters at different times, so the peak that it reports can be below the current size.
    return now_bytes, max(now_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)


def host_free_bytes() -> int:
    """Host memory that processes can still allocate."""
    return int(_psutil().virtual_memory().available)


def _psutil() -> Any:
    """Import psutil, which accelerate installs. It has no type annotations."""
    return importlib.import_module("psutil")
