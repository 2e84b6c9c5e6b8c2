"""Limits of the device that a kernel is launched on."""

import contextlib
import functools

import torch


@functools.cache
def multiprocessors(index):
    """Number of SMs (CUs on AMD) of a device. The interpreter has 4, so that persistent loops run several turns."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index is not None else 4


def cdiv(a, b):
    """ceil(a / b). triton.cdiv and triton.next_power_of_2 take 2 us of CPU time because kernels can call them too."""
    return -(-a // b)


def next_power_of_2(n):
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def shared_bytes(index):
    """The most bytes of shared memory (LDS on AMD) that one program may use."""
    if index is None:
        return 48 << 10
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def lanes():
    """Threads of a warp: 64 on AMD's Instinct, 32 on its Radeon and on NVIDIA."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).warp_size if torch.version.hip else 32


def clamp_warps(num_warps):
    """`num_warps`, at most 1024 threads. With warps of 64 lanes (AMD Instinct), 32 warps compile but fail at launch."""
    return min(num_warps, 1024 // lanes())


def on_device(x):
    """Makes x's device the current one, because Triton launches on the current device, not on the tensors' device."""
    if x.is_cuda and torch.cuda.current_device() != x.device.index:
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
