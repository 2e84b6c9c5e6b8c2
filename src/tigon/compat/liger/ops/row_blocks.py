"""A value per row of two matrices, some rows at a time, so that no temporary of the whole matrices exists.

The backward computes each block again, with autograd inside the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.ops.dispatch import first_order

# N rows, V columns.

BLOCK_BYTES = 1 << 26
"""Most bytes of one fp32 temporary."""

Formula = Callable[[Tensor, Tensor], Tensor]
"""(rows of the student (n, V), rows of the teacher (n, V)), both fp32 or fp64 -> (n,)."""


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor, formula: Formula) -> Tensor:
        ctx.save_for_backward(student_NV, teacher_NV, counts_N)
        ctx.formula = formula
        blocks = _blocks(student_NV, teacher_NV, counts_N)
        values = [formula(*_prepared(*block)).masked_fill(~block[2], 0.0) for block in blocks]
        return torch.cat(values) if values else student_NV.new_zeros(0, dtype=_dtype(student_NV, teacher_NV))

    @staticmethod
    @first_order
    def backward(ctx: Any, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
        student_NV, teacher_NV, counts_N = ctx.saved_tensors
        gradient_NV = torch.empty_like(student_NV, memory_format=torch.contiguous_format)
        start = 0
        for student, teacher, counts in _blocks(student_NV, teacher_NV, counts_N):
            stop = start + len(counts)
            with torch.enable_grad():
                rows, constants = _prepared(student, teacher, counts)
                rows = rows.detach().requires_grad_()
                value = ctx.formula(rows, constants)
            upstream = dvalue_N[start:stop].to(value.dtype).masked_fill(~counts, 0.0)
            (gradient,) = torch.autograd.grad(value, rows, upstream)
            gradient_NV[start:stop] = gradient.masked_fill(~counts.unsqueeze(1), 0.0)
            start = stop
        return gradient_NV, None, None, None


def _dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _blocks(*matrices: Tensor) -> list[tuple[Tensor, ...]]:
    rows = max(1, BLOCK_BYTES // (4 * max(1, matrices[0].shape[1])))
    return list(zip(*(matrix.split(rows) for matrix in matrices), strict=True)) if len(matrices[0]) else []


def _prepared(student: Tensor, teacher: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A block in the dtype of the computation. Rows that do not count are 0, whatever they hold."""
    dtype = _dtype(student, teacher)
    out = ~counts.unsqueeze(1)
    return student.to(dtype).masked_fill(out, 0.0), teacher.to(dtype).masked_fill(out, 0.0)


def per_row(student_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor | None, formula: Formula) -> Tensor:
    """(N,) value of each row, fp32 or fp64; 0, with a gradient of 0, where `counts_N` is False.

    Only the student gets a gradient.
    """
    if counts_N is None:
        counts_N = torch.ones(len(student_NV), dtype=torch.bool, device=student_NV.device)
    values: Tensor = _RowBlocks.apply(student_NV, teacher_NV.detach(), counts_N, formula)
    return values
