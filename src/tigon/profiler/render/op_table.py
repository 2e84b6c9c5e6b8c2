"""Adds up the profiler's events of one step by operator name: time, share of the time, launches, and FLOPs.

On CUDA an operator's time is that of the kernels that it launched. A kernel that no operator launched (Triton's, called
without the dispatcher) has a row under the kernel's name, so the rows sum to the total kernel time. On the CPU the time
is that of the operator itself, without the operators that it calls.

FLOPs are counted for matrix products and attention only, from the shapes of an operator's arguments. If such an
operator calls another one, the inner one alone counts, in whose row the time is. Triton kernels that no operator
launches have no shapes, so on a GPU the products in tigon's kernels for the loss and for experts count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType

Shape = Sequence[int]


def _matmul_flops(a: Shape, b: Shape) -> int:
    """FLOPs of (..., M, K) by (..., K, N) or by (K,). With rows in groups, (S, K) by (E, K, N), S counts once."""
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _linear_flops(x: Shape, weight_NK: Shape) -> int:
    return 2 * math.prod(x) * weight_NK[0]


def _grouped_flops(a: Shape, b: Shape) -> int:
    """FLOPs of PyTorch's grouped product. (E, M, K) by (K, S) has the columns S in groups."""
    return 2 * math.prod(a[1:]) * b[1] if len(a) > len(b) else _matmul_flops(a, b)


def _attention_flops(q_BHTD: Shape, k_BHTD: Shape, v_BHTD: Shape) -> int:
    """FLOPs of the scores and of their product with the values. The half that a causal mask skips is counted too."""
    return 2 * math.prod(q_BHTD[:3]) * k_BHTD[2] * (q_BHTD[3] + v_BHTD[3])


def _attention_backward_flops(q_BHTD: Shape, k_BHTD: Shape, v_BHTD: Shape) -> int:
    """FLOPs of the recomputed scores, and of the gradients of values, scores, queries and keys."""
    return 2 * math.prod(q_BHTD[:3]) * k_BHTD[2] * (3 * q_BHTD[3] + 2 * v_BHTD[3])


def _tokens_first(flops: Callable[..., int]) -> Callable[..., int]:
    """`flops` for (B, T, h, D). Packed documents, (T, h, D), count nothing: their lengths are not in the shapes."""

    def of_shapes(*shapes: Shape) -> int:
        if any(len(shape) != 4 for shape in shapes):
            return 0
        return flops(*((B, h, T, D) for B, T, h, D in shapes))

    return of_shapes


def _expert_flops(x: Shape, weight_EOI: Shape, bias: Shape, low: Shape, low_weight_EOR: Shape, order_S: Shape) -> int:
    """FLOPs of `tigon::grouped_product`: S rows by their experts' matrices, and by those of the adapters if any."""
    inner = weight_EOI[2] + (low_weight_EOR[2] if low_weight_EOR else 0)
    return 2 * order_S[0] * weight_EOI[1] * inner


def _expert_gradient_flops(a_SO: Shape, b_SI: Shape) -> int:
    return 2 * math.prod(a_SO) * b_SI[1]


# The profiler's name of an operator -> (function of shapes that gives its FLOPs, the slice of the operator's arguments
# whose shapes that function takes, as start and end). Variants with `out=` or a dtype have the operator's own name.
_FLOPS_BY_OP: Mapping[str, tuple[Callable[..., int], int, int]] = {
    **{f"aten::{name}": (_matmul_flops, 0, 2) for name in ("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm")},
    **{
        f"aten::{name}{suffix}": (_matmul_flops, 1, 3)
        for name in ("addmm", "baddbmm", "addbmm", "addmv")
        for suffix in ("", "_")
    },
    "aten::_addmm_activation": (_matmul_flops, 1, 3),
    "aten::linear": (_linear_flops, 0, 2),
    "aten::mkldnn_linear": (_linear_flops, 0, 2),
    "aten::_grouped_mm": (_grouped_flops, 0, 2),
    "aten::_scaled_grouped_mm": (_grouped_flops, 0, 2),
    **{
        f"aten::_scaled_dot_product_{kind}": (_attention_flops, 0, 3)
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
    **{
        f"aten::_scaled_dot_product_{kind}_backward": (_attention_backward_flops, 1, 4)
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
    **{f"aten::_{kind}_attention_forward": (_tokens_first(_attention_flops), 0, 3) for kind in ("flash", "efficient")},
    **{
        f"aten::_{kind}_attention_backward": (_tokens_first(_attention_backward_flops), 1, 4)
        for kind in ("flash", "efficient")
    },
    "tigon::grouped_product": (_expert_flops, 0, 6),
    "tigon::grouped_weight_gradient": (_expert_gradient_flops, 0, 2),
}
_MAY_LACK = frozenset({"tigon::grouped_product"})
"""Operators with optional tensors among these arguments, whose shapes are empty if they are not given."""


@dataclass(frozen=True)
class OpRow:
    """One operator, summed over the whole step."""

    name: str
    time_ms: float
    share: float
    """Share of the time of all rows."""
    launches: int
    """Kernels on CUDA, calls on the CPU."""
    flops: float
    """Floating-point operations; 0 for operators other than matrix products and attention."""

    @property
    def flops_per_s(self) -> float:
        return 1000 * self.flops / self.time_ms if self.time_ms else 0.0

    def as_mapping(self) -> dict[str, Any]:
        return {**asdict(self), "flops_per_s": self.flops_per_s}


def op_table(events: Iterable[FunctionEvent], *, on_cuda: bool) -> list[OpRow]:
    """Add up events by operator name.

    Args:
        events: The FunctionEvents of a torch.profiler run with record_shapes=True.
        on_cuda: True: times of kernels. False: times of operators on the CPU.

    Returns:
        A row per operator, and per kernel that no operator launched; the row with the most time first.
    """
    time_us_of: dict[str, float] = {}
    launches: dict[str, int] = {}
    flops: dict[str, float] = {}

    def add(name: str, time_us: float, count: int) -> None:
        time_us_of[name] = time_us_of.get(name, 0.0) + time_us
        launches[name] = launches.get(name, 0) + count

    events = list(events)
    for event in events:
        if event.device_type == DeviceType.CPU:
            flops[event.name] = flops.get(event.name, 0.0) + _flops(event)
            if not on_cuda and is_op(event.name):
                add(event.name, event.self_cpu_time_total, 1)
    if on_cuda:
        for (operator, kernel), (time_us, count) in kernel_times(events).items():
            add(operator or kernel, time_us, count)
    total_us = sum(time_us_of.values()) or 1.0
    rows = [
        OpRow(name, time_us / 1000, time_us / total_us, launches[name], flops.get(name, 0.0))
        for name, time_us in time_us_of.items()
        if time_us > 0
    ]
    return sorted(rows, key=lambda row: -row.time_ms)


def kernel_times(events: Iterable[FunctionEvent]) -> dict[tuple[str, str], tuple[float, int]]:
    """(operator, kernel) -> microseconds and launches. The operator is "" for kernels that no operator launched."""
    times: dict[tuple[str, str], tuple[float, int]] = {}

    def add(operator: str, kernel: str, time_us: float, count: int) -> None:
        sofar_us, sofar = times.get((operator, kernel), (0.0, 0))
        times[operator, kernel] = sofar_us + time_us, sofar + count

    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation:
                add("", event.name, event.time_range.elapsed_us(), 1)
        elif is_op(event.name):
            for kernel in event.kernels:
                add(event.name, kernel.name, kernel.duration, 1)
                add("", kernel.name, -kernel.duration, -1)
    return {names: found for names, found in times.items() if found[1] > 0}


def is_op(name: str) -> bool:
    """Whether this is an operator or autograd function, not a runtime call, a step's range or engine bookkeeping."""
    return not name.startswith(("cuda", "cu", "hip", "ProfilerStep", "autograd::engine", "Optimizer.", "enumerate("))


def _flops(event: FunctionEvent) -> float:
    """FLOPs from the shapes of the arguments; 0 for operators that _FLOPS_BY_OP lacks, or that call one of them."""
    if event.name not in _FLOPS_BY_OP or _calls_counted(event):
        return 0.0
    flops_of, start, end = _FLOPS_BY_OP[event.name]
    shapes = list(event.input_shapes or ())[start:end]
    given = len(shapes) == end - start and (event.name in _MAY_LACK or all(shapes))
    return float(flops_of(*shapes)) if given else 0.0


def _calls_counted(event: FunctionEvent) -> bool:
    return any(child.name in _FLOPS_BY_OP or _calls_counted(child) for child in event.cpu_children)
