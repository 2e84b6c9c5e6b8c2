"""Launching a kernel with little host time.

`kernel[grid](...)` binds, specialises and looks up in Python each time, and its C launcher asks the driver about every
pointer. `launch` keeps the compiled kernels under a key of its own and passes addresses.
"""

import torch
import triton
from triton import knobs

from tigon.kernels import _device

# Versions of Triton whose launcher's arguments were read and tried. Others, AMD and the interpreter take the public
# way.
_DIRECT = torch.version.cuda is not None and triton.__version__.startswith("3.6.")
_NARROW = 0x7FFFFFFF
_compiled = {}


def launch(x, kernel, grid, *args, num_warps, **constexprs):
    """`kernel[grid](*args, **constexprs, num_warps=num_warps)` on x's device and its current stream.

    `args` are tensors, ints, floats and None in the kernel's order, and the constexpr parameters come after them.
    What makes Triton compile anew (dtypes, alignment to 16 bytes, an int that is 1, a multiple of 16, or wide) is in
    the key.
    """
    num_warps = _device.clamp_warps(num_warps)
    device = x.device.index
    if not _DIRECT or not x.is_cuda or knobs.runtime.launch_enter_hook.calls or torch.cuda.current_device() != device:
        with _device.on_device(x):
            kernel[grid](*args, num_warps=num_warps, **constexprs)
        return
    key = [kernel.__name__, device, num_warps, *constexprs.values()]
    values = []
    for a in args:
        kind = type(a)
        if kind is int:
            key.append(1 if a == 1 else (not a & 15) + 2 * (-_NARROW <= a <= _NARROW))
            values.append(a)
        elif kind is float or a is None:
            key.append(kind)
            values.append(a)
        else:
            address = a.data_ptr()
            key.append(a.dtype)
            key.append(address & 15)
            values.append(address)
    key = tuple(key)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, num_warps=num_warps, **constexprs)
        run = compiled.run
        if not run.global_scratch_size and not run.profile_scratch_size:
            fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
            _compiled[key] = run.launch, (*fixed, compiled.packed_metadata, None, None, None)
        return
    run, fixed = found
    x_blocks, y_blocks = grid if len(grid) == 2 else (grid[0], 1)
    run(
        x_blocks, y_blocks, 1, torch._C._cuda_getCurrentRawStream(device), *fixed,
        *values, *constexprs.values(),
    )  # fmt: skip
