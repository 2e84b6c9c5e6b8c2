"""Cosine similarity of a student's and a teacher's logits per token, without the logits.

With the student's logits s = W_s h_s + b_s and the teacher's t = W_t h_t + b_t, cos = s·t / (|s| |t|). Each of the
three inner products is a quadratic form of the hidden states, whose matrix W_sᵀ W_t has the size of the hidden states
instead of the vocabulary:

    s·t = h_sᵀ (W_sᵀ W_t) h_t + h_s · (W_sᵀ b_t) + h_t · (W_tᵀ b_s) + b_s · b_t

The matrices are summed over the vocabulary in fp32, or in fp64 if an input is fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.compat.liger.chunked_loss.reference import Head
from tigon.ops.dispatch import first_order

# N tokens, H and G hidden, V vocabulary.

BLOCK_ROWS = 16384
"""Head of a head's weight that are converted to fp32 at a time."""
EPS = 1e-8
"""The smallest norm of logits, as in `torch.nn.functional.cosine_similarity`."""


def _sum_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class _Gram(torch.autograd.Function):
    """aᵀ b of a (V, H) and b (V, G), summed in fp32 over blocks of rows.

    Each row of a gradient is one product, written once in the dtype of its input: no sum of rounded parts.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        dtype = _sum_dtype(a, b)
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


def _inner(p: Head, q: Head) -> Tensor:
    """(N,) inner products of the logits of p and q."""
    dtype = _sum_dtype(p.hidden, p.weight, q.hidden, q.weight)

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


def cosine_of_logits(student: Head, teacher: Head, mask: Tensor) -> Tensor:
    """(N,) cosine similarity of the logits of each token whose mask is True. The value of other tokens is finite.

    It takes V · (H² + H·G + G²) multiplications. The logits take N · V · (H + G), which is more if
    N > (H² + H·G + G²) / (H + G), for example with 1.5 tokens for each hidden unit if H = G.
    """
    student = student._replace(hidden=student.hidden.masked_fill(~mask.unsqueeze(1), 0.0))
    teacher = teacher._replace(hidden=teacher.hidden.masked_fill(~mask.unsqueeze(1), 0.0))
    # PyTorch's limit for each norm, which keeps value and gradient finite if a side's logits are all 0.
    inverse = [_inner(side, side).clamp(min=EPS**2).rsqrt() for side in (student, teacher)]
    return _inner(student, teacher) * inverse[0] * inverse[1]
