"""Memory layouts: views of tensors as rows, and outputs with the memory order of another tensor.

This module uses torch only, so that an op's composite path and its fake have exactly the layout of its launcher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def outer_order(x: Tensor) -> list[int]:
    """All dimensions of `x` but the last, from the largest stride to the smallest; ties keep their order."""
    return sorted(range(x.ndim - 1), key=lambda dim: -x.stride(dim))


def empty_ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """An uninitialised dense tensor of x's shape, dtype and device whose outer dimensions lie in `order`.

    `torch.empty_like` keeps the layout of dense tensors only. `empty().permute()` would return a view, and users cannot
    modify a view from inside an autograd.Function in place.
    """
    strides = [1] * x.ndim
    step = x.shape[-1]
    for dim in reversed(order):
        strides[dim] = step
        # A dimension of size 0 counts as one of size 1, as in PyTorch's own contiguous tensors.
        step = step * max(x.shape[dim], 1)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def rows_of(x: Tensor, width: int) -> tuple[Tensor, int, int]:
    """The rows of `x` for a kernel: (a tensor, the number of rows, the elements from one row to the next)."""
    if x.is_contiguous():  # saves the 1 us of CPU time that a view takes
        return x, x.numel() // max(width, 1), width
    x = row_view(x, width)
    return x, x.shape[0], x.stride(0)


def row_view(x: Tensor, width: int) -> Tensor:
    """`x` (..., width) as (M, width) with unit stride along the row; a copy only if no view exists."""
    x = x.reshape(-1, width)
    return x if x.stride(1) == 1 or width == 1 else x.contiguous()
