"""Facts about the device a kernel is launched on, and the launch tables that depend on it."""

import contextlib
import functools

import torch


@functools.cache
def multiprocessors(index):
    """Number of SMs (CUs on AMD) of a device; 4 for the interpreter, so that persistent loops take several turns."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index is not None else 4


def cdiv(a, b):
    """triton.cdiv and triton.next_power_of_2 are also callable in kernels, for which they take 2 us on the host."""
    return -(-a // b)


def next_power_of_2(n):
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def shared_bytes(index):
    """Most shared memory (LDS) of one program."""
    if index is None:
        return 48 << 10
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def _lanes():
    return 64 if torch.version.hip else 32


def clamp_warps(num_warps):
    """AMD's warps have 64 lanes and a workgroup at most 1024 threads; 32 warps compile there and fail at launch."""
    return min(num_warps, 1024 // _lanes())


def on_device(x):
    """Triton launches on the current device, whatever device the tensors are on."""
    if x.is_cuda and torch.cuda.current_device() != x.device.index:
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
