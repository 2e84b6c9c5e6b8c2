"""Kernel launches that take little CPU time.

At every launch `kernel[grid](...)` binds and specialises the arguments in Python, and its C launcher asks the driver
about every pointer. `launch` keeps the compiled kernels under its own key and passes addresses.
"""

import torch
import triton
from triton import knobs

from tigon.kernels import _device

# The launcher's arguments are known for these versions of Triton only. Other versions, AMD and the interpreter use
# `kernel[grid](...)`.
_DIRECT = torch.version.cuda is not None and triton.__version__.startswith("3.6.")
_compiled = {}
_pointers = {}
# The key holds numbers unchanged, which costs less than Triton's classes (1, a multiple of 16, wide). A number that
# changes with every call would fill the cache, so the cache is emptied at this size. Triton keeps the compiled kernels.
_MOST_KEYS = 1 << 14
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def launch(kernel, grid, x, *, num_warps, **arguments):
    """Launch `kernel[grid](**arguments, num_warps=num_warps)` on x's device and its current stream.

    `arguments` have the names and the order of the kernel's parameters: first tensors (or None), then numbers and
    constexprs. A parameter is always an int or always a float, because 1 and 1.0 are the same key. The key holds
    everything that makes Triton compile a kernel again: dtypes, alignment to 16 bytes, integers and constexprs.
    """
    if not (_DIRECT and x.is_cuda):
        launch_by_triton(kernel, grid, x, num_warps=num_warps, **arguments)
        return
    device = x.get_device()
    values = tuple(arguments.values())
    pointers = _pointers.get(id(kernel)) or _count_pointers(kernel, values)
    numbers = values[pointers:]
    key, addresses = [id(kernel), device, num_warps, numbers], []
    for tensor in values[:pointers]:
        if tensor is None:
            key.append(None)
            addresses.append(None)
        else:
            address = tensor.data_ptr()
            key.append(tensor.dtype)
            key.append(address & 15)
            addresses.append(address)
    key = tuple(key)
    cached = _compiled.get(key)
    if cached is None or knobs.runtime.launch_enter_hook.calls or _current_device() != device:
        compiled = launch_by_triton(kernel, grid, x, num_warps=num_warps, **arguments)
        if cached is None and compiled is not None:
            _keep(key, compiled)
        return
    run, fixed = cached
    run(grid[0], grid[1] if len(grid) == 2 else 1, 1, _raw_stream(device), *fixed, *addresses, *numbers)


def launch_by_triton(kernel, grid, x, *, num_warps, num_stages=None, **arguments):
    """Launch a kernel with Triton's own launcher, which tensor descriptors need."""
    if list(arguments) != kernel.arg_names:
        raise TypeError(f"{kernel.__name__} takes {', '.join(kernel.arg_names)} in this order, not {list(arguments)}.")
    options = {} if num_stages is None else {"num_stages": num_stages}
    with _device.on_device(x):
        return kernel[grid](**arguments, num_warps=_device.clamp_warps(num_warps), **options)


def _count_pointers(kernel, values):
    """How many of the kernel's leading arguments are tensors or None."""
    _pointers[id(kernel)] = count = 1 + max(i for i, a in enumerate(values) if a is None or hasattr(a, "data_ptr"))
    return count


def _keep(key, compiled):
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return
    if len(_compiled) >= _MOST_KEYS:
        _compiled.clear()
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
    _compiled[key] = run.launch, (*fixed, compiled.packed_metadata, None, None, None)
