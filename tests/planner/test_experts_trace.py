"""The trace of an experts call counts the products of its sorted tokens."""

from __future__ import annotations

import pytest
import torch
from planner_helpers import H200
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.ops import experts
from tigon.planner.trace.cuda_scratch import planned_for_cuda, scratch_bytes
from tigon.planner.trace.dispatch_recorder import TraceRecorder

T, K, E, H, F = 64, 2, 8, 128, 32


@pytest.mark.parametrize(
    ("frozen", "per_slot"),
    # In products of H · F: gate and up are two, down is one; each has a gradient of its input and one of its weight.
    [((), 3 + 3 + 3), (("gate_up", "down"), 3 + 3), (("hidden",), 3 + 1 + 3)],
    ids=["all", "frozen weights", "frozen hidden"],
)
def test_each_requested_gradient_adds_its_product(frozen: tuple[str, ...], per_slot: int) -> None:
    recorder = TraceRecorder(scratch_bytes(H200.sm_count), {})
    with FakeTensorMode(), planned_for_cuda(recorder, arch=H200.arch, ignored=0):
        shapes = {"hidden": (T, H), "gate_up": (E, 2 * F, H), "down": (E, H, F)}
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, requires_grad=name not in frozen)
            for name, shape in shapes.items()
        }
        index = torch.empty(T, K, dtype=torch.int64)
        weights = torch.empty(T, K, dtype=torch.bfloat16, requires_grad=True)
        with recorder:
            found = experts(top_k_index=index, top_k_weights=weights, **tensors)
            found.backward(torch.empty_like(found))
    assert sum(segment.cost.flops for segment in recorder.tape.segments) == 2 * T * K * H * F * per_slot
