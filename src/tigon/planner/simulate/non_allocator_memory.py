"""What a process holds of a GPU beside PyTorch's allocator: its context, the kernels it has loaded, NCCL's buffers.

Read at the end of 225 training runs on H200s (driver 580.159.04, torch 2.11.0+cu130, deepspeed 0.19.8), as
`outside_bytes` in benchmarks/results/nvidia-h200; the medians are 0.75 GiB alone, 1.34 with FSDP2's group of one, 1.57
with two ranks of FSDP2 or DDP, 1.71 with DeepSpeed alone and 2.05 on two GPUs. Copies to the host and GaLore take up to
0.16 GiB more, which is left out; so is what paged optimizers keep on the GPU as long as there is room (4 and 9 GiB).
Nine of the runs read 0.84 GiB more than others of their kind, as with another process's context on the card.
"""

from __future__ import annotations

from tigon.planner.gpus import Gpu
from tigon.techniques.choices import Choices


def outside_bytes(gpu: Gpu, choices: Choices) -> int:
    """Of one process that trains with these choices."""
    return gpu.context_bytes + group_bytes(gpu, choices) + (gpu.deepspeed_bytes if choices.zero else 0)


def room_bytes(gpu: Gpu, choices: Choices) -> int:
    """What is left of the GPU for the allocator."""
    return gpu.memory_bytes - outside_bytes(gpu, choices)


def group_bytes(gpu: Gpu, choices: Choices) -> int:
    """NCCL's part of it."""
    if choices.gpus > 1:
        return gpu.group_bytes
    return gpu.lone_group_bytes if choices.zero or choices.fsdp else 0
