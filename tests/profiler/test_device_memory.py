"""The memory that a process holds, as the progress line and the report show it."""

from __future__ import annotations

import resource

import pytest
import torch

from tigon.profiler.recording.device_memory import used_bytes

pytest.importorskip("psutil")


def test_the_peak_on_the_cpu_is_never_below_the_current_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux may report a peak below the current resident set."""
    late = type("Usage", (), {"ru_maxrss": 1})()
    monkeypatch.setattr(resource, "getrusage", lambda who: late)
    now_bytes, peak_bytes = used_bytes(torch.device("cpu"))
    assert peak_bytes == now_bytes > 1024
