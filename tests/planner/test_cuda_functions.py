"""What a trace counts for functions of PyTorch whose memory on CUDA differs from that on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from planner_helpers import H200
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from backends import HAS_TRITON
from tigon.ops import dispatch
from tigon.planner.trace.cuda_scratch import no_launches, planned_for_cuda, scratch_bytes
from tigon.planner.trace.dispatch_recorder import TraceRecorder


def traced(run: Callable[[], Tensor]) -> TraceRecorder:
    recorder = TraceRecorder(scratch_bytes(H200.sm_count), {})
    with FakeTensorMode(), planned_for_cuda(recorder, arch=H200.arch, ignored=0), recorder:
        run().sum().backward()
    assert dispatch.planned() is None
    return recorder


def test_dropout_mask_has_one_byte_per_element() -> None:
    recorder = traced(lambda: torch.nn.Dropout(0.1)(torch.empty(64, 32, requires_grad=True)))
    assert recorder.tape.sizes.count(64 * 32) == 1


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has no product of experts")
def test_product_of_experts_in_fp32_is_counted_expert_by_expert() -> None:
    def run() -> Tensor:
        rows, weight = torch.empty(64, 32, requires_grad=True), torch.empty(4, 32, 16, requires_grad=True)
        return functional.grouped_mm(rows, weight, offs=torch.empty(4, dtype=torch.int32))

    segments = traced(run).tape.segments
    assert sum(segment.cost.fp32_flops for segment in segments) == 3 * 2 * 64 * 32 * 16


def doubled(X: object) -> None:
    """The body of a kernel, whose launch never comes to it."""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_no_triton_kernel_is_launched_with_fake_tensors() -> None:
    """Liger's kernels were, on an H200: an illegal memory access ended every later CUDA call of the process."""
    from triton.runtime.jit import JITFunction  # loads triton

    launched: list[object] = []
    before = JITFunction.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JITFunction, "run", lambda self, x, **_: launched.append(x))
        with no_launches(), FakeTensorMode(), pytest.raises(RuntimeError, match=r"doubled is a Triton kernel"):
            JITFunction(doubled)[(1,)](torch.empty(4))
        assert not launched
        JITFunction(doubled)[(1,)](None)
    assert launched == [None]
    assert JITFunction.run is before
