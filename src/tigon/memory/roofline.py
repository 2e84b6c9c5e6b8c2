"""How long a step takes: products at the rate a GPU reaches, all else at its bandwidth, and the host's launches.

The host runs ahead of the device, so a micro-batch takes the longer of the two. The shares below were fitted to
fourteen measured steps of Llama-3.2-1B and Llama-3.1-8B on an H200.
"""

from __future__ import annotations

from tigon.memory.gpus import Gpu
from tigon.memory.tape import Cost, Tape

HOST_S = 8e-6
"""Host time of an operator with its autograd, eager PyTorch; fitted to measured steps of Llama-3.2-1B on an H200."""
LAUNCH_S = 2e-6
"""From the end of one kernel to the start of the next."""
PRODUCT_SHARE = 0.93
"""Products in a model are smaller than the 8192³ one that the rate was measured with."""
COPY_SHARE = 0.80
"""Of the bandwidth of a large copy that elementwise kernels reach."""


def micro_s(tape: Tape, gpu: Gpu) -> float:
    """Seconds of one micro-batch: forward and backward."""
    cost = Cost()
    for segment in tape.segments:
        cost.add(segment.cost)
    products_s = cost.flops / (gpu.matmul_flops * PRODUCT_SHARE) + cost.fp32_flops / (gpu.fp32_flops * PRODUCT_SHARE)
    moved_s = cost.moved_bytes / (gpu.copy_bytes_s * COPY_SHARE)
    return max(products_s + moved_s + cost.launches * LAUNCH_S, cost.host_calls * HOST_S)


def update_s(touched_bytes: int, gpu: Gpu) -> float:
    """Seconds of clipping and of the optimizer's step, which touch so many bytes of device memory."""
    return touched_bytes / (gpu.copy_bytes_s * COPY_SHARE)
