"""How much memory a device has and holds, in bytes: PyTorch's allocator on CUDA, the whole process on the CPU."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def total_bytes(device: torch.device) -> int:
    """What the device was built with."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(_psutil().virtual_memory().total)


def used_bytes(device: torch.device) -> tuple[int, int]:
    """(now, peak): allocated by PyTorch on CUDA; the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    return _psutil().Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def host_free_bytes() -> int:
    """What the machine's processes could still have of its memory."""
    return int(_psutil().virtual_memory().available)


def _psutil() -> Any:
    """psutil comes with accelerate; it carries no types."""
    return importlib.import_module("psutil")
