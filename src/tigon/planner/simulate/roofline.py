"""How long a step takes: products at the rate a GPU reaches, all else at its bandwidth, and the host's launches.

The host runs ahead of the device, so a micro-batch takes the longer of the two. The shares below were fitted to
fourteen measured steps of Llama-3.2-1B and Llama-3.1-8B on an H200, the host's time to later ones.
"""

from __future__ import annotations

from tigon.planner.gpus import Gpu
from tigon.planner.trace.tape import SegmentCost, Tape

HOST_S = 3e-6
"""Host time of an operator with its autograd, in eager PyTorch. Fitted to Llama-3.2-1B on 512 tokens, which leaves the
GPU idle (benchmarks/results/nvidia-h200/planner/runs.json). The runs with 2,048 tokens and QLoRA's allow at most 5e-6.
Two runs of 4 x 1024 tokens from another day are predicted too fast with it; 8e-6 fitted those."""
LAUNCH_S = 2e-6
"""From the end of one kernel to the start of the next."""
PRODUCT_SHARE = 0.93
"""Products in a model are smaller than the 8192³ one that the rate was measured with."""
COPY_SHARE = 0.80
"""Elementwise kernels reach this share of the bandwidth of a large copy."""


def micro_s(tape: Tape, gpu: Gpu, *, copied_bytes: int = 0, host_calls: int = 0) -> float:
    """Seconds of one micro-batch: forward and backward. copied_bytes, host_calls: of an engine around the model."""
    cost = SegmentCost(moved_bytes=copied_bytes, host_calls=host_calls)
    for segment in tape.segments:
        cost.add(segment.cost)
    products_s = cost.flops / (gpu.matmul_flops * PRODUCT_SHARE) + cost.fp32_flops / (gpu.fp32_flops * PRODUCT_SHARE)
    moved_s = cost.moved_bytes / (gpu.copy_bytes_s * COPY_SHARE)
    return max(products_s + moved_s + cost.launches * LAUNCH_S, cost.host_calls * HOST_S)


def update_s(touched_bytes: float, host_calls: float, sm_s: float, gpu: Gpu, *, waits: bool = False) -> float:
    """Seconds of clipping and of the optimizer's step, which touch so many bytes of device memory.

    sm_s: seconds that one multiprocessor computes besides. The Trainer reads the loss before the step, so the host
    does not run ahead into it. waits: nor from one parameter to the next.
    """
    device_s = touched_bytes / (gpu.copy_bytes_s * COPY_SHARE) + sm_s / gpu.sm_count
    host_s = host_calls * HOST_S
    return device_s + host_s if waits else max(device_s, host_s)
