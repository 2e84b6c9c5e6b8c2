"""Memory layouts: views of tensors as rows, and outputs with the memory order of another tensor.

This module uses torch only, so that an op's composite path and its fake have exactly the layout of its launcher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def outer_order(x: Tensor) -> tuple[int, ...]:
    """All dimensions of `x` but the last, from the largest stride to the smallest; ties keep their order."""
    strides = x.stride()
    if len(strides) == 4:  # the two usual orders of queries and keys, without the 2 us of sorting
        batch, first, second, _ = strides
        if batch >= first >= second:
            return (0, 1, 2)
        if batch >= second > first:
            return (0, 2, 1)
    return tuple(sorted(range(x.ndim - 1), key=lambda dim: -strides[dim]))


def empty_ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """An uninitialised dense tensor of x's shape, dtype and device whose outer dimensions lie in `order`.

    `torch.empty_like` keeps the layout of dense tensors only. `empty().permute()` would return a view, and users cannot
    modify a view from inside an autograd.Function in place.
    """
    return torch.empty_strided(x.shape, ordered_strides(x.shape, order), dtype=x.dtype, device=x.device)


def ordered_strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides of a dense tensor of this shape whose outer dimensions lie in `order`."""
    strides = [1] * len(shape)
    step = shape[-1]
    for dim in reversed(order):
        strides[dim] = step
        # A dimension of size 0 counts as one of size 1, as in PyTorch's own contiguous tensors.
        step = step * max(shape[dim], 1)
    return strides


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
