"""Fewer calls per time, because no test here judges a speed."""

from __future__ import annotations

import pytest

from tigon.bench import timing


@pytest.fixture(autouse=True)
def few_host_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "HOST_CALLS", 3)
