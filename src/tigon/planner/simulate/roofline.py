"""The time of a step: matrix products at the GPU's measured rate, other operators at its bandwidth, and the launches.

The CPU runs ahead of the GPU, so a micro-batch takes the longer of the two times. The shares below were fitted to
fourteen measured steps of Llama-3.2-1B and Llama-3.1-8B on an H200, `HOST_S` and `Gpu.host_s` to later steps.
"""

from __future__ import annotations

from tigon.planner.gpus import Gpu
from tigon.planner.trace.tape import SegmentCost, Tape

HOST_S = 3e-6
"""CPU time of an operator with its autograd, in eager PyTorch, on an H200's host. It was fitted to Llama-3.2-1B on 512
tokens, a CPU-bound run (benchmarks/results/nvidia-h200/planner/runs.json). The runs with 2,048 tokens and with QLoRA
allow at most 5e-6. For two runs of 4 x 1024 tokens from another day it predicts too little time; 8e-6 fitted those.
`Gpu.host_s` is the time of the hosts of one kind of GPU. They differ by a third."""
LAUNCH_S = 2e-6
"""Seconds from the end of one kernel to the start of the next."""
MATMUL_EFFICIENCY = 0.93
"""Share of the measured matmul rate that a model's products reach; they are smaller than the 8192³ product measured."""
COPY_SHARE = 0.80
"""Share of the bandwidth of a large copy that elementwise kernels reach."""


def micro_s(tape: Tape, gpu: Gpu, *, copied_bytes: int = 0, engine_calls: int = 0) -> float:
    """Seconds of one micro-batch, forward and backward. copied_bytes, engine_calls: the engine's part of the work."""
    cost = SegmentCost(moved_bytes=copied_bytes)
    for segment in tape.segments:
        cost.add(segment.cost)
    products_s = cost.flops / (gpu.matmul_flops * MATMUL_EFFICIENCY)
    products_s += cost.fp32_flops / (gpu.fp32_flops * MATMUL_EFFICIENCY)
    if cost.fp8_flops:
        products_s += cost.fp8_flops / (gpu.fp8_flops * MATMUL_EFFICIENCY)
    moved_s = cost.moved_bytes / (gpu.copy_bytes_s * COPY_SHARE)
    device_s = products_s + moved_s + cost.launches * LAUNCH_S
    return max(device_s, cost.host_calls * gpu.host_s + engine_calls * gpu.engine_s)


def update_s(touched_bytes: float, host_calls: float, sm_s: float, gpu: Gpu, *, waits: bool = False) -> float:
    """Seconds of clipping and of the optimizer's step.

    touched_bytes: device memory that is read and written. host_calls: operators that the CPU launches; it starts them
    only when the GPU has finished, because the Trainer reads the loss before the step. sm_s: additional seconds of one
    multiprocessor. waits: whether the CPU also waits for the GPU after each parameter.
    """
    device_s = touched_bytes / (gpu.copy_bytes_s * COPY_SHARE) + sm_s / gpu.sm_count
    host_s = host_calls * gpu.host_s
    return device_s + host_s if waits else max(device_s, host_s)
