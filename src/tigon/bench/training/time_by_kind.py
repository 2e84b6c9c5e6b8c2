"""Splits the time of a profiled step by kind.

matmuls     matrix products: cuBLAS, CUTLASS, `aten::mm` and the like
attention   attention and its backward
fused       Triton kernels: tigon's, Liger's, TRL's, torch.compile's. Matmuls inside them count here
optimizer   gradient clipping and AdamW
rest        every other kernel: elementwise operators, copies, embeddings
idle        the step's time without a kernel; not measured on a CPU

On a CPU the times are those of operators, and tigon's ops are made of operators of PyTorch, so `fused` is 0 there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch.autograd.profiler_util import FunctionEvent

from tigon.profiler.render.op_table import is_op, kernel_times

KINDS = ("matmuls", "attention", "fused", "optimizer", "rest", "idle")
_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|sdpa|efficient_attention|flex_attention", re.IGNORECASE)
_OPTIMIZER = re.compile(r"aten::_fused_adam|aten::_foreach_|multi_tensor_apply|FusedAdam", re.IGNORECASE)
_MATMULS = re.compile(
    r"aten::(mm|bmm|addmm|addmv|baddbmm|mkldnn_linear|_scaled_mm|_grouped_mm)$|gemm|cublas|cutlass|nvjet|splitk",
    re.IGNORECASE,
)
# The profiler also files these under the device: waits of the CPU for a full queue or for the GPU, and its own work.
_NO_KERNEL = re.compile(
    r"Command Buffer Full|Activity Buffer Request|Lazy Function Loading|Instrumentation|(Context|Stream|Event) Sync"
    r"|(Stream )?Wait Event"
)
# Names of Triton's kernels are identifiers; those of PyTorch's CUDA kernels are C++ signatures.
_TRITON = re.compile(r"[A-Za-z_]\w*")


def kind_of(operator: str, kernel: str) -> str:
    """The kind of a kernel that an operator launched. Either name may be empty."""
    for kind, pattern in (("attention", _ATTENTION), ("optimizer", _OPTIMIZER), ("matmuls", _MATMULS)):
        if pattern.search(operator) or pattern.search(kernel):
            return kind
    return "fused" if operator.startswith("tigon::") or _TRITON.fullmatch(kernel) else "rest"


def time_by_kind(events: Iterable[FunctionEvent], *, on_cuda: bool, step_ms: float) -> dict[str, float | None]:
    """Milliseconds of each of KINDS in a profiled step.

    Args:
        events: the FunctionEvents of the step. On the CPU their own times count, without the operators they call.
        on_cuda: whether to count kernels; otherwise operators on the CPU.
        step_ms: the step's time without the profiler, from which `idle` is what the kernels leave.
    """
    total_us = dict.fromkeys(KINDS, 0.0)
    events = list(events)
    if on_cuda:
        for (operator, kernel), (time_us, _) in kernel_times(events).items():
            if not _NO_KERNEL.match(kernel):
                total_us[kind_of(operator, kernel)] += time_us
    else:
        for event in events:
            if is_op(event.name):
                total_us[kind_of(event.name, "")] += event.self_cpu_time_total
    times_ms: dict[str, float | None] = {kind: time_us / 1000 for kind, time_us in total_us.items()}
    times_ms["idle"] = max(0.0, step_ms - sum(total_us.values()) / 1000) if on_cuda else None
    return times_ms
