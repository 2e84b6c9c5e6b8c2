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
def test_every_wording_of_out_of_memory_is_recognised(name):
    status, detail = failures.status_of_exception(OUT[name])
    assert status == failures.OUT_OF_MEMORY and detail and len(detail) <= 300


def test_out_of_memory_behind_another_exception_is_recognised():
    try:
        try:
            raise OUT["PyTorch on a GPU"]
        except RuntimeError as inner:
            raise ValueError("the backward failed") from inner
    except ValueError as outer:
        assert failures.status_of_exception(outer) == (
            failures.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate 7.83 GiB."
        )  # fmt: skip


@pytest.mark.parametrize("error", [ValueError("no such option"), RecipeError("the loss is nan"), KeyError("memory")])
def test_other_exceptions_are_failures_and_not_out_of_memory(error):
    assert failures.status_of_exception(error)[0] == failures.FAILED


def test_failed_process_is_reported_with_the_reason_from_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nRuntimeError: later\n")
    assert failures.status_of_exit(1, log, None) == (
        failures.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried"
    )  # fmt: skip
    log.write_text("warning\nRuntimeError: NCCL is unhappy\nmore\n")
    assert failures.status_of_exit(1, log, None) == (failures.FAILED, "exit code 1: RuntimeError: NCCL is unhappy")
    log.write_text("")
    assert failures.status_of_exit(-6, log, None) == (failures.FAILED, "killed by SIGABRT")


# --- kills ----------------------------------------------------------------------------------------------------------


def count(monkeypatch, n_kills):
    monkeypatch.setattr(failures, "kernel_kills", lambda: n_kills)


def test_kill_by_linux_for_memory_is_out_of_memory_and_other_kills_are_failures(tmp_path, monkeypatch):
    """The count of kills for memory tells Linux's kills from those of other senders."""
    log = tmp_path / "log"
    log.write_text("")
    count(monkeypatch, 2)
    assert failures.status_of_exit(-9, log, 1) == (
        failures.OUT_OF_MEMORY,
        "killed by Linux: the host's memory was full",
    )
    other = (failures.FAILED, "killed by SIGKILL, but not by Linux for lack of host memory")
    assert failures.status_of_exit(-9, log, 2) == other
    count(monkeypatch, None)
    status, detail = failures.status_of_exit(-9, log, None)
    assert status == failures.FAILED and detail.startswith("killed by SIGKILL, perhaps because host memory was full")


COUNTERS = {
    "own group": ("0::/a/b", {"cgroup/a/b/memory.events": 3, "cgroup/a/memory.events": 5, "proc/vmstat": 9}, 3),
    "group around": ("0::/a/b", {"cgroup/a/memory.events": 5, "proc/vmstat": 9}, 5),
    "container": ("0::/", {"cgroup/memory.events": 4, "proc/vmstat": 9}, 4),
    "group of another namespace": ("0::/../c", {"cgroup/memory.events": 4, "proc/vmstat": 9}, 4),
    "version 1": ("5:cpu,memory:/a\n0::/", {"cgroup/memory/a/memory.oom_control": 6, "proc/vmstat": 9}, 6),
    "container, version 1": ("5:memory:/docker/a", {"cgroup/memory/memory.oom_control": 7, "proc/vmstat": 9}, 7),
    "machine": ("0::/", {"proc/vmstat": 9}, 9),
    "nowhere": (None, {}, None),
}


@pytest.mark.parametrize(("group", "files", "kills"), COUNTERS.values(), ids=COUNTERS)
def test_counter_of_kills_is_the_one_of_the_nearest_cgroup(group, files, kills, tmp_path, monkeypatch):
    for name, n_kills in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"low 0\noom 1\noom_kill {n_kills}\noom_group_kill 0\n")
    if group:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(f"{group}\n")
    monkeypatch.setattr(failures, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(failures, "_CGROUPS", tmp_path / "cgroup")
    assert failures.kernel_kills() == kills
