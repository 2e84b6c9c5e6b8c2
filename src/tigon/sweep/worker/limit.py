"""Limits a process's memory, so that a large GPU behaves like a small one."""

from __future__ import annotations

import torch

from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.gpus import row_of
from tigon.techniques.keys.settings import Settings


def cap(device: torch.device, limit_bytes: int | None, settings: Settings) -> None:
    """Limit this process to `limit_bytes`.

    GPU: PyTorch's allocator may reserve the limit minus the memory outside the allocator that the planner expects for
    these settings (planner/engines/non_allocator_memory.py). CPU (Linux): the limit is on the data segment, which is
    heap plus private mappings. Linux counts that memory when it is requested, not when it is first used.
    """
    if limit_bytes is None:
        return
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        row = row_of(torch.cuda.get_device_name(device), total_bytes)
        allowed = limit_bytes - non_allocator_bytes(row, settings)
        torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, allowed / total_bytes)), device)
        return
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
