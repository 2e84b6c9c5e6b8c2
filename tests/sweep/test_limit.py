"""The memory that a process may have of a larger GPU."""

from __future__ import annotations

import pytest
import torch

from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.gpus import find_gpu
from tigon.sweep.worker.limit import cap
from tigon.techniques.keys.settings import Settings

H200 = find_gpu("h200")


@pytest.mark.parametrize(
    "settings",
    [Settings.of({}), Settings.of({"sharding.zero": 3}), Settings.of({"sharding.fsdp": True, "sharding.gpus": 2})],
    ids=str,
)
def test_allocator_is_limited_to_what_a_smaller_gpu_would_leave_it(settings, monkeypatch):
    allowed = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (H200.memory_bytes, H200.memory_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: allowed.append(share))
    cap(torch.device("cuda", 0), 24 << 30, settings)
    (share,) = allowed
    assert share * H200.memory_bytes == pytest.approx((24 << 30) - non_allocator_bytes(H200, settings), abs=1)
