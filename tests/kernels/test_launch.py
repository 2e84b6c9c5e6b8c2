"""The launches that go past Triton's Python code pass its launcher what Triton passes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="triton is not installed: there are no kernels on this platform")

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

from tigon.kernels import _launch

KNOWN = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
pytestmark = pytest.mark.skipif(not KNOWN, reason="this version of Triton is launched by its own code only")

GRID, STREAM, HANDLE = (5, 3, 1), 77, 88


class OnDevice:
    """A tensor on device 0, at an address."""

    def __init__(self, address: int) -> None:
        self.address, self.dtype = address, torch.bfloat16

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def passed() -> list[tuple[Any, ...]]:
    """The arguments of each call of the launcher that Triton has compiled."""
    return []


@pytest.fixture
def compiled(passed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A kernel as Triton compiles it, with a launcher that keeps its arguments instead of launching."""
    run = CudaLauncher.__new__(CudaLauncher)
    run.num_ctas = 1
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.launch_cooperative_grid, run.launch_pdl = False, True
    run.gsan_enabled = False
    run.arg_annotations, run.kernel_signature = ["annotations"], b"signature"
    run.launch = lambda *arguments: passed.append(arguments)
    monkeypatch.setattr(_launch, "_DIRECT", True)
    monkeypatch.setattr(_launch, "_current_device", lambda: 0)
    monkeypatch.setattr(_launch, "_raw_stream", lambda device: STREAM)
    return SimpleNamespace(run=run, function=HANDLE, packed_metadata=(8, 1, 4096))


@pytest.fixture
def launch_twice(compiled: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """launch_twice(**tensors): who launched; the first launch compiles the kernel."""
    launched_by: list[str] = []

    def compile_and_launch(self: _launch.Launch, x: Any, arguments: Any) -> SimpleNamespace:
        launched_by.append("Triton")
        return compiled

    def launch(**tensors: Any) -> list[str]:
        prepared = _launch.Launch(None, GRID[:2], num_warps=8, N=7, eps=0.5, BLOCK=1024)
        for _ in range(2):
            prepared(tensors["X"], **tensors)
        return launched_by

    monkeypatch.setattr(_launch.Launch, "_by_triton", compile_and_launch)
    return launch


def test_second_launch_passes_what_triton_passes(
    compiled: SimpleNamespace, passed: list[tuple[Any, ...]], launch_twice: Callable[..., list[str]]
) -> None:
    assert launch_twice(X=OnDevice(4096), Bias=None, Out=OnDevice(8192)) == ["Triton"]
    # Triton's newer launchers read the active driver before they look whether they need it.
    with patch.object(type(driver), "active", SimpleNamespace()):
        compiled.run(*GRID, STREAM, HANDLE, compiled.packed_metadata, None, None, None, 4096, None, 8192, 7, 0.5, 1024)
    ours, tritons = passed
    assert ours == tritons


@pytest.mark.parametrize("state", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_kernel_that_needs_more_arguments_is_always_launched_by_triton(
    compiled: SimpleNamespace, passed: list[tuple[Any, ...]], launch_twice: Callable[..., list[str]], state: str
) -> None:
    setattr(compiled.run, state, 1)
    assert launch_twice(X=OnDevice(4096)) == ["Triton", "Triton"]
    assert not passed


def test_products_and_sums_are_fused_whatever_tritons_default_is() -> None:
    options: dict[str, Any] = {}

    class Kernel(dict[Any, Any]):
        arg_names = ["X", "N"]

        def __missing__(self, grid: Any) -> Callable[..., None]:
            return lambda **given: options.update(given)

    _launch.launch_by_triton(Kernel(), GRID, torch.zeros(1), num_warps=4, X=None, N=7)
    assert options == {"X": None, "N": 7, "num_warps": 4, "enable_fp_fusion": True}
