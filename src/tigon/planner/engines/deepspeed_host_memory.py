"""Host memory and file space of DeepSpeed's offload for one process, from the allocations in deepspeed 0.19.8.

Most allocations are pinned. PyTorch's caching host allocator rounds them up to powers of two and never frees them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tigon.planner.simulate.model_states import ModelWeights, Weight
from tigon.planner.simulate.optimizer_cost import Parameter
from tigon.techniques.keys.settings import Settings
from tigon.techniques.sharding.deepspeed_config import ADAM_TENSORS, nvme_buffers, nvme_group_size
from tigon.techniques.technique import RunInfo

GROUP_ELEMENTS = 10**9  # deepspeed/runtime/zero/config.py, sub_group_size: elements that stage 3 updates at a time


def pinned(nbytes: int) -> int:
    """Bytes that the caching host allocator takes: the next power of two (c10/core/CachingHostAllocator.h)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def zero_host_bytes(
    settings: Settings, model: ModelWeights, slices: Sequence[Parameter], moments_bytes: int
) -> tuple[int, int]:
    """Returns (bytes on the host, bytes in files). slices: the optimizer's flat slices; moments_bytes: its state."""
    itemsize, flat = model.weights[0].itemsize, sum(piece.nbytes for piece in slices)
    computed_with = [piece.numel * itemsize for piece in slices]
    if (
        settings.sharding.zero < 3
    ):  # stage_1_and_2.py: weights and gradients in the optimizer's dtype, weights in the GPU's
        largest = max((weight.numel for weight in model.trained), default=0)
        copies = sum(2 * pinned(piece.nbytes) for piece in slices) + sum(map(pinned, computed_with))
        return moments_bytes + copies + pinned(largest * itemsize), 0
    gradients = pinned(sum(computed_with))  # stage3.py: grad_partitions_flat_buffer
    parts = [_part(weight, settings) * weight.itemsize for weight in model.weights]
    widest = slices[0].itemsize if slices else 0
    if settings.sharding.offload == "nvme":
        run_info = RunInfo(
            shapes={weight.name: weight.shape for weight in model.weights}, processes=settings.sharding.gpus
        )
        buffers = nvme_buffers(settings, run_info)
        group = max(_groups(settings, model, nvme_group_size(run_info)), default=0)
        weights = buffers["buffer_size"] * buffers["buffer_count"] * itemsize
        host = weights + group * (ADAM_TENSORS * widest + itemsize) + gradients
        return host, moments_bytes + 2 * flat + sum(parts)
    # partition_parameters.py: each weight has a pinned tensor, which is copied into one flat tensor; its block stays.
    weights = sum(map(pinned, computed_with)) + sum(map(pinned, parts))
    waiting = sum(pinned(numel * widest) for numel in _groups(settings, model, GROUP_ELEMENTS))
    return weights + moments_bytes + flat + waiting + gradients, 0


def _part(weight: Weight, settings: Settings) -> int:
    """Elements of a weight that this process holds."""
    return -(-weight.numel // settings.sharding.gpus)


def _groups(settings: Settings, model: ModelWeights, wanted: int) -> list[int]:
    """Elements of this process's part of each sub-group.

    Weights that decay come first, then the others. A group ends when it reaches `wanted` elements (stage3.py:
    _create_fp16_sub_groups).
    """
    groups = []
    for decays in (True, False):
        group = 0
        for weight in model.trained:
            if (len(weight.shape) >= 2) == decays:
                group += _part(weight, settings)
                if group >= wanted:
                    groups.append(group)
                    group = 0
        groups.append(group)
    return [group for group in groups if group]
