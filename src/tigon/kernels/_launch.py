"""Kernel launches that take little CPU time, and the limits of the device that they are for.

At every launch `kernel[grid](...)` binds and specialises the arguments in Python, and its C launcher asks the driver
about every pointer. A `Launch` keeps the compiled kernels under its own key and passes addresses.
"""

import contextlib
import functools

import torch
import triton
from triton import knobs

# The launcher's arguments are known for these versions of Triton only. Other versions, AMD and the interpreter use
# `kernel[grid](...)`.
_MINOR = tuple(map(int, triton.__version__.split(".")[:2]))
_DIRECT = torch.version.cuda is not None and (3, 6) <= _MINOR <= (3, 9)
# Triton 3.6 compiles a launcher for each signature. It takes the kernel's arguments one by one. From 3.7 on, all
# kernels share one launcher. It takes the arguments as a tuple, and descriptions of their types.
_ONE_BY_ONE = _MINOR < (3, 7)
_launches = {}
_pointers = {}
# A number that changes with every call would fill the cache, so the cache is emptied at this size. Triton keeps the
# compiled kernels.
_MOST_LAUNCHES = 1 << 14
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Launch:
    """A kernel with its grid, numbers and constexprs; each call launches it with other tensors.

    The arguments are under the names of the kernel's parameters, in their order: first tensors (or None), then numbers
    and constexprs. The device, a tensor's dtype and its alignment to 16 bytes also make Triton compile again, so they
    are the key of the compiled kernels.
    """

    __slots__ = ("_compiled", "_grid", "_kernel", "_num_warps", "_numbers", "_values")

    def __init__(self, kernel, grid, *, num_warps, **numbers):
        self._kernel, self._num_warps, self._numbers = kernel, num_warps, numbers
        self._grid = (grid[0], grid[1] if len(grid) == 2 else 1, 1)
        self._values = tuple(numbers.values())
        self._compiled = {}

    def __call__(self, x, **tensors):
        """Launch on x's device and its current stream."""
        self.run(x, tensors.values(), tensors)

    def run(self, x, tensors, arguments):
        """Launch with `tensors`, which are the first of `arguments`."""
        device = x.get_device()
        if device < 0 or not _DIRECT:
            self._by_triton(x, arguments)
            return
        key, addresses = [device], []
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                addresses.append(None)
            else:
                address = tensor.data_ptr()
                addresses.append(address)
                key.append((tensor.dtype,) if address & 15 else tensor.dtype)
        key = tuple(key)
        cached = self._compiled.get(key)
        if cached is None or knobs.runtime.launch_enter_hook.calls or _current_device() != device:
            compiled = self._by_triton(x, arguments)
            if cached is None and compiled is not None:
                self._keep(key, compiled)
            return
        run, fixed = cached
        if _ONE_BY_ONE:
            run(*self._grid, _raw_stream(device), *fixed, *addresses, *self._values)
        else:
            run(*self._grid, _raw_stream(device), *fixed, (*addresses, *self._values))

    def _by_triton(self, x, arguments):
        return launch_by_triton(
            self._kernel, self._grid, x, num_warps=self._num_warps, **{**arguments, **self._numbers}
        )

    def _keep(self, key, compiled):
        run = compiled.run
        # gsan is Triton's race detector, whose launches have more arguments.
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            return
        handle, no_scratch, no_hooks = compiled.function, (None, None), (None, None, None)
        about = (run.launch_cooperative_grid, run.launch_pdl)
        if _ONE_BY_ONE:
            fixed = (handle, *about, *no_scratch, compiled.packed_metadata, *no_hooks)
        else:
            types = (run.arg_annotations, run.kernel_signature)
            fixed = (handle, *about, compiled.packed_metadata, *no_hooks, *no_scratch, *types)
        self._compiled[key] = run.launch, fixed


def launch(kernel, grid, x, *, num_warps, **arguments):
    """Launch `kernel[grid](**arguments, num_warps=num_warps)` on x's device and its current stream.

    A number is always an int or always a float, because 1 and 1.0 are the same key.
    """
    values = tuple(arguments.values())
    pointers = _pointers.get(id(kernel)) or _count_pointers(kernel, values)
    key = (id(kernel), grid, num_warps, values[pointers:])
    prepared = _launches.get(key)
    if prepared is None:
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        numbers = dict(tuple(arguments.items())[pointers:])
        prepared = _launches[key] = Launch(kernel, grid, num_warps=num_warps, **numbers)
    prepared.run(x, values[:pointers], arguments)


def launch_by_triton(kernel, grid, x, *, num_warps, num_stages=None, **arguments):
    """Launch a kernel with Triton's own launcher, which tensor descriptors need.

    Products and sums are fused (FMA), as the ops' recorded errors assume. Triton 3.10 no longer does so by default, and
    3.9 warns about it.
    """
    if list(arguments) != kernel.arg_names:
        raise TypeError(f"{kernel.__name__} takes {', '.join(kernel.arg_names)} in this order, not {list(arguments)}.")
    options = {} if num_stages is None else {"num_stages": num_stages}
    with on_device(x):
        return kernel[grid](**arguments, num_warps=clamp_warps(num_warps), enable_fp_fusion=True, **options)


def _count_pointers(kernel, values):
    """How many of the kernel's leading arguments are tensors or None."""
    _pointers[id(kernel)] = count = 1 + max(i for i, a in enumerate(values) if a is None or hasattr(a, "data_ptr"))
    return count


# --- the device ---


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
