"""The largest magnitudes of a tensor that the kernel which wrote it has found, for the FP8 product that reads it next.

The magnitudes are an attribute of the tensor. Autograd keeps the Python object of a gradient on its way from one
function to the next, with its attributes. Views have no such attribute, and a view of all elements takes that of its
base. A hook that returns another gradient, a copy or a saved tensor has none, so its reader looks for the magnitudes
itself.

The writer of a gradient has to know that its reader wants them. An FP8 layer says so by an attribute of its result,
which the function that reads the result, or a view of it, sees in its forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tigon.ops import recomputation

PARTS = 512
"""Numbers among which a kernel shares the largest magnitude; `MOST_PARTS` of kernels/fp8.py is the limit."""
_NAME, _WANTED = "_tigon_amax", "_tigon_wants_amax_of_gradient"


def parts_for(x: Tensor, tensors: int) -> Tensor | None:
    """Zeros on x's device for the magnitudes of this many tensors; None if x is no ordinary tensor."""
    if type(x) not in (Tensor, torch.nn.Parameter, FakeTensor):
        return None
    return torch.zeros(tensors, PARTS, dtype=torch.float32, device=x.device)


def parts_for_result(x: Tensor) -> Tensor | None:
    """As `parts_for`, for one result of a forward pass on x; None if a recomputation has those of the first run."""
    run = recomputation.current()
    return parts_for(x, 1) if run.kept is None or not run.backward_follows else None


def search(parts: Tensor | None, row: int, x: Tensor) -> None:
    """Let the maximum of a row of `parts` be at least that of |x|, as a kernel does while it writes x."""
    if parts is not None and x.numel():
        parts[row, 0] = torch.maximum(parts[row, 0], x.detach().abs().amax())


def note(x: Tensor, parts: Tensor) -> None:
    """Note that the maximum of `parts` is that of |x|. Any later write to x makes the note void."""
    noted: Any = x
    setattr(noted, _NAME, (x._version, parts))


def noted(x: Tensor) -> Tensor | None:
    """Numbers whose maximum is that of |x|, if its writer has noted them."""
    found = getattr(x, _NAME, None)
    if found is None:
        found = getattr(x._base, _NAME, None)
        # A contiguous view of as many elements has them all, because results are dense.
        if found is None or x._base.numel() != x.numel() or not x.is_contiguous():  # type: ignore[union-attr]
            return None
    version, parts = found
    return parts if version == x._version else None


def want_for_gradient(y: Tensor) -> None:
    """Say that the backward pass of y's writer reads the largest magnitudes of y's gradient."""
    wanting: Any = y
    setattr(wanting, _WANTED, True)


def wanted_for_gradient(x: Tensor) -> bool:
    """Whether the writer of x, or of the tensor that x is a view of, wants the magnitudes of x's gradient."""
    return getattr(x, _WANTED, False) or getattr(x._base, _WANTED, False)
