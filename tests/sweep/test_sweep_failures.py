"""Out of memory in all its words, and nothing else, is out of memory."""

from __future__ import annotations

import pytest
import torch

from tigon.errors import RecipeError
from tigon.sweep import failures

OUT = {
    "PyTorch on a GPU": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1 is free."
    ),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "the CUDA runtime": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "ROCm": RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB."),
    "PyTorch on a CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "Python": MemoryError(),
}


@pytest.mark.parametrize("name", OUT)
def test_out_of_memory_counts_as_a_failure(name):
    status, detail = failures.of_exception(OUT[name])
    assert status == failures.OUT_OF_MEMORY and detail and len(detail) <= 300


def test_out_of_memory_behind_another_exception_counts_as_a_failure():
    try:
        try:
            raise OUT["PyTorch on a GPU"]
        except RuntimeError as inner:
            raise ValueError("the backward failed") from inner
    except ValueError as outer:
        assert failures.of_exception(outer) == (
            failures.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate 7.83 GiB."
        )  # fmt: skip


@pytest.mark.parametrize("error", [ValueError("no such option"), RecipeError("the loss is nan"), KeyError("memory")])
def test_failure_counts_as_out_of_memory(error):
    assert failures.of_exception(error)[0] == failures.FAILED


def test_end_of_a_process_loses_its_reason(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nRuntimeError: later\n")
    assert failures.of_exit(1, log, None) == (
        failures.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried"
    )  # fmt: skip
    log.write_text("warning\nRuntimeError: NCCL is unhappy\nmore\n")
    assert failures.of_exit(1, log, None) == (failures.FAILED, "exit code 1: RuntimeError: NCCL is unhappy")
    assert failures.of_exit(-9, tmp_path / "none", None) == (failures.FAILED, "killed by SIGKILL")


def test_kill_by_linux_for_memory_counts_as_a_failure(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n")
    monkeypatch.setattr(failures, "_KERNEL_KILLS", events)
    assert failures.of_exit(-9, tmp_path / "none", 1)[0] == failures.OUT_OF_MEMORY
    assert failures.of_exit(-9, tmp_path / "none", 2)[0] == failures.FAILED
