"""Ops that are wrong on this machine, and tried as on a GPU. A conftest that wants the fixture imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends import HAS_GPU, kernels_on_the_cpu
from tigon.ops import OPS, dispatch
from tigon.trainer.guards import self_test

WRONG = {"geglu", "swiglu"}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """WRONG's results are off by a hundredth, and kernels are tried as on a GPU; yields (op, dtype) of those tried."""
    pytest.importorskip("triton")
    for name in WRONG:
        op = OPS[name]

        def call(*, op: Any = op, **inputs: Any) -> Any:
            return op.call(**inputs) * 1.01

        monkeypatch.setitem(OPS, name, replace(op, call=call))
    monkeypatch.setattr(dispatch, "uses_kernel", lambda tensor: True)
    tried: list[tuple[Any, ...]] = []
    check: Any = self_test.check_op
    monkeypatch.setattr(self_test, "check_op", lambda *which: tried.append(which) or check(*which))
    with contextlib.nullcontext() if HAS_GPU else kernels_on_the_cpu():
        yield tried
