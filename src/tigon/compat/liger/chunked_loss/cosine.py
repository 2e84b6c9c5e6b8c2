"""Cosine similarity of a student's and a teacher's logits per token, without the logits.

With the student's logits s = W_s h_s + b_s and the teacher's t = W_t h_t + b_t, cos = s·t / (|s| |t|). Each of the
three inner products is a quadratic form of the hidden states, whose matrix W_sᵀ W_t has the size of the hidden states
instead of the vocabulary:

    s·t = h_sᵀ (W_sᵀ W_t) h_t + h_s · (W_sᵀ b_t) + h_t · (W_tᵀ b_s) + b_s · b_t

The matrices are summed over the vocabulary in fp32, whatever the dtype of the heads is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.dispatch import first_order

# N tokens, H and G hidden, V vocabulary.

BLOCK_ROWS = 16384
"""Rows of a head that are converted to fp32 at a time."""


class Rows(NamedTuple):
    """Hidden states (N, H) and the head that maps them to logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def _accurate(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class _Gram(torch.autograd.Function):
    """aᵀ b of a (V, H) and b (V, G), summed in fp32 over blocks of rows. Each row of a gradient is computed once."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        dtype = _accurate(a, b)
        total = a.new_zeros(a.shape[1], b.shape[1], dtype=dtype)
        for a_block, b_block in zip(a.split(BLOCK_ROWS), b.split(BLOCK_ROWS), strict=True):
            total.addmm_(a_block.to(dtype).t(), b_block.to(dtype))
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        da = _rows_times(b, grad.t(), a.dtype) if ctx.needs_input_grad[0] else None
        db = _rows_times(a, grad, b.dtype) if ctx.needs_input_grad[1] else None
        return da, db


def _rows_times(x: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    result = x.new_empty(len(x), matrix.shape[1], dtype=dtype)
    for block, into in zip(x.split(BLOCK_ROWS), result.split(BLOCK_ROWS), strict=True):
        into.copy_(block.to(matrix.dtype) @ matrix)
    return result


def _inner(p: Rows, q: Rows) -> Tensor:
    """(N,) inner products of the logits of p and q."""
    dtype = _accurate(p.hidden, p.weight, q.hidden, q.weight)

    def gram(a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = _Gram.apply(a, b)
        return product.to(dtype)

    p_NH, q_NG = p.hidden.to(dtype), q.hidden.to(dtype)
    value = ((p_NH @ gram(p.weight, q.weight)) * q_NG).sum(-1)
    if q.bias is not None:
        value = value + p_NH @ gram(p.weight, q.bias.unsqueeze(1)).squeeze(1)
    if p.bias is not None:
        value = value + q_NG @ gram(q.weight, p.bias.unsqueeze(1)).squeeze(1)
    if p.bias is not None and q.bias is not None:
        value = value + p.bias.to(dtype).dot(q.bias.to(dtype))
    return value


def cosine_of_logits(student: Rows, teacher: Rows, mask: Tensor) -> Tensor:
    """(N,) cosine similarity of the logits of each token; masked tokens have hidden states of 0, and some value.

    It takes V · (H² + H·G + G²) multiplications, fewer than the logits if there are more tokens than hidden units.
    """
    student = student._replace(hidden=student.hidden.masked_fill(~mask.unsqueeze(1), 0.0))
    teacher = teacher._replace(hidden=teacher.hidden.masked_fill(~mask.unsqueeze(1), 0.0))
    squares = _inner(student, student) * _inner(teacher, teacher)
    # If all logits are 0, the similarity is 0 and so is its gradient.
    return _inner(student, teacher) * squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt()
