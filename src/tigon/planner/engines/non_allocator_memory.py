"""GPU memory of a process outside PyTorch's allocator: the CUDA context, loaded kernels, NCCL's buffers.

It was read at the end of 225 training runs on H200s (driver 580.159.04, torch 2.11.0+cu130, deepspeed 0.19.8). The
records in benchmarks/results/nvidia-h200 have it as `non_allocator_bytes`. Medians in GiB:

    one GPU, no engine            0.75
    the same, copies to the host  0.82 to 0.98
    FSDP2's group of one process  1.34
    FSDP2 or DDP on two GPUs      1.57
    DeepSpeed on one GPU          1.71
    DeepSpeed on two GPUs         2.05

The second line is of 5 of these runs and of 7 rows of the case long-rows, on H100s and H200s: activations waited on the
host. The planner counts 0.95 GiB, near the upper end, because such runs fill the GPU. It leaves out two amounts: GaLore
takes up to 0.16 GiB more, and paged optimizers keep 4 and 9 GiB on the GPU while there is room. Nine of the runs read
0.84 GiB more than other runs of their kind, as if another process had a context on the GPU.
"""

from __future__ import annotations

from tigon.planner.engines.choose import engine_of
from tigon.planner.gpus import Gpu
from tigon.planner.simulate.allocator import waits_on_host
from tigon.techniques.keys.settings import Settings


def non_allocator_bytes(gpu: Gpu, settings: Settings) -> int:
    """Memory outside the allocator of one process that trains with these settings."""
    engine = engine_of(settings)
    copies = gpu.host_copies_bytes if waits_on_host(settings) and not engine.joins_a_group else 0
    return gpu.context_bytes + copies + group_bytes(gpu, settings) + engine.library_bytes(gpu)


def allocator_budget_bytes(gpu: Gpu, settings: Settings) -> int:
    """The part of the GPU's memory that is left for the allocator."""
    return gpu.memory_bytes - non_allocator_bytes(gpu, settings)


def group_bytes(gpu: Gpu, settings: Settings) -> int:
    """NCCL's part of the memory outside the allocator."""
    if settings.sharding.gpus > 1:
        return gpu.group_bytes
    return gpu.lone_group_bytes if engine_of(settings).joins_a_group else 0
