"""The ways to run an op: the PyTorch reference on the CPU, and the kernels on a GPU or in Triton's interpreter.

A machine without a GPU uses the interpreter.

Triton decides when a kernel is decorated whether it will be interpreted. So on a machine without a GPU every kernel
module is imported here, before any test, under TRITON_INTERPRET=1. The variable is then restored, and ops run their
reference until a test asks for `backend`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Before torch: some virtual machines advertise AMX and trap on its first instruction, in a plain bf16 product of
# PyTorch's. One instruction set below it costs the small products of these tests nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # torch.manual_seed queues the seed for each kind of device that is never used, with a stack trace of its caller.
    # Under pytest this takes longer than many a test.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None
HAS_TRITON = importlib.util.find_spec("triton") is not None


@contextmanager
def _interpreter_chosen() -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


if HAS_TRITON and not HAS_GPU:
    with _interpreter_chosen():
        from triton.runtime import interpreter

        if importlib.metadata.version("triton").startswith("3.6."):
            from interpreter import make_faster

            make_faster(interpreter)

        import tigon.kernels

        for module in pkgutil.iter_modules(tigon.kernels.__path__, "tigon.kernels."):
            importlib.import_module(module.name)

from tigon.ops import dispatch  # noqa: E402  (after the kernels, which must see the variable)

dispatch.INTERPRET = False


@dataclass(frozen=True)
class Backend:
    """The device and the implementation with which a test runs an op."""

    name: str
    """"reference" or "kernel"."""
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.name == "kernel" and self.device.type == "cpu"


@contextmanager
def kernels_on_the_cpu() -> Iterator[None]:
    """Ops on CPU tensors run their kernels in the interpreter."""
    # A constexpr function of Triton's reads the variable at every call.
    with _interpreter_chosen():
        dispatch.INTERPRET = True
        try:
            yield
        finally:
            dispatch.INTERPRET = False


@contextmanager
def tens_of_gib() -> Iterator[None]:
    """Only one process of this machine is in here, so that tests that share a GPU fit beside each other.

    For a test that takes more than about 4 GiB. Before it leaves, it gives PyTorch's cached memory back.
    The largest takes 62 GiB (linear_kl with the head of Qwen in fp64), so at most 8 processes share a GPU of 80 GB:
    each of the others needs 0.6 to 3 GiB.
    """
    if not HAS_GPU:
        yield
        return
    import fcntl

    with open(os.path.join(tempfile.gettempdir(), "tigon-tests-large"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            torch.cuda.empty_cache()
