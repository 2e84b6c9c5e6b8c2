"""The largest magnitudes of a tensor that the kernel which wrote it has found, for the FP8 product that reads it next.

They are an attribute of the tensor. Autograd keeps the Python object of a gradient on its way from one function to the
next, with its attributes. A hook that returns another gradient, a view, a copy or a saved tensor has no such attribute,
so its reader looks for the magnitudes itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

PARTS = 512
"""Numbers among which a kernel shares the largest magnitude; `MOST_PARTS` of kernels/fp8.py is the limit."""
_NAME = "_tigon_amax"


def parts_for(x: Tensor, tensors: int) -> Tensor | None:
    """Zeros on x's device for the magnitudes of this many tensors; None if x is no ordinary tensor."""
    if type(x) not in (Tensor, torch.nn.Parameter, FakeTensor):
        return None
    return torch.zeros(tensors, PARTS, dtype=torch.float32, device=x.device)


def note(x: Tensor, parts: Tensor) -> None:
    """Note that the maximum of `parts` is that of |x|. Any later write to x makes the note void."""
    noted: Any = x
    setattr(noted, _NAME, (x._version, parts))


def noted(x: Tensor) -> Tensor | None:
    """Numbers whose maximum is that of |x|, if its writer has noted them."""
    found = getattr(x, _NAME, None)
    if found is None:
        return None
    version, parts = found
    return parts if version == x._version else None
