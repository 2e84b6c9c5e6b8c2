"""What a process holds of a GPU beside PyTorch's allocator: its context, the kernels it has loaded, NCCL's buffers.

Read at the end of 222 training runs on H200s (driver 580.159.04, torch 2.11.0+cu130, deepspeed 0.19.8), as
`outside_bytes` in benchmarks/results/nvidia-h200: 0.73 to 0.75 GiB alone, 1.31 with FSDP2's group of one, 1.57 with two
ranks (DDP, FSDP2), 1.71 with DeepSpeed alone and 2.05 on two GPUs. Copies to the host and GaLore take up to 0.1 GiB
more, which is left out; so is what paged optimizers keep on the GPU as long as there is room.
"""

from __future__ import annotations

from tigon.memory.gpus import Gpu
from tigon.techniques.choices import Choices


def outside_bytes(gpu: Gpu, choices: Choices) -> int:
    """Of one process that trains with these choices."""
    if choices.gpus == 1 and not choices.zero and not choices.fsdp:
        return gpu.context_bytes
    group_bytes = gpu.lone_group_bytes if choices.gpus == 1 else gpu.group_bytes
    return gpu.context_bytes + group_bytes + (gpu.deepspeed_bytes if choices.zero else 0)
