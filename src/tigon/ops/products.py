"""Matrix products into given memory, and the dtype they have: for all ops over hidden states and weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops import dispatch

# N tokens, C tokens of a chunk, H hidden, V vocabulary.


def keeps_graph() -> bool:
    """Whether the running backward keeps the graph, so that a second backward may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


_WORTH_SPLITTING = 1024
"""Fewest elements of a dimension worth splitting; a smaller product ends before a second one is launched."""


def _whole_lines(size: int, like: Tensor) -> int:
    """The largest part of `size` elements that fills whole lines of 16 bytes; all in fp32, where it gains nothing."""
    line = 16 // like.element_size()
    return size // line * line if like.element_size() == 2 and size >= _WORTH_SPLITTING else size


def product_into(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (+)= a @ b, summed in out's dtype, which may be fp32 over 16-bit factors.

    If a dimension is not a multiple of 8, such as GPT-2's vocabulary of 50257, cuBLAS uses kernels that load element by
    element, even if rows are padded. They are 1.6 to 8 times slower on an H200. The remainder therefore gets a separate
    product. For one token, the weight gradient is a column times a row, and gets such a kernel too. It takes 829 us for
    128256 x 4096; writing the result alone takes 250 us. Padding both factors with zeros avoids it.
    """
    if (trace := dispatch.planned()) is not None:  # cuBLAS does not cast the factors, as the CPU's product would
        trace.count(flops=2.0 * math.prod(a.shape) * b.shape[1], dtype=a.dtype)
        return
    if a.shape[1] == 1:
        line = 16 // a.element_size()
        a, b = F.pad(a, (0, line - 1)), F.pad(b, (0, 0, 0, line - 1))
    (M, K), N = a.shape, b.shape[1]
    m = _whole_lines(M, a) if a.stride(0) == 1 else M
    n = _whole_lines(N, a) if b.stride(1) == 1 or out.dtype == a.dtype else N
    k = _whole_lines(K, a) if a.stride(1) == 1 or b.stride(0) == 1 else K
    if k < K:
        # The few remaining columns go first, so that their 16-bit sum is rounded at its own size, not at the total's.
        product_into(a[:, k:], b[k:], out, accumulate)
        product_into(a[:, :k], b[:k], out, accumulate=True)
    elif m < M:
        product_into(a[:m], b, out[:m], accumulate)
        product_into(a[m:], b, out[m:], accumulate)
    elif n < N:
        product_into(a, b[:, :n], out[:, :n], accumulate)
        product_into(a, b[:, n:], out[:, n:], accumulate)
    else:
        _product_into(a, b, out, accumulate)


def _product_into(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    if a.dtype != out.dtype and a.is_cuda:
        # cuBLAS multiplies 16-bit matrices into an fp32 C; casting the factors would cost an fp32 product.
        if accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        return
    if a.dtype is not out.dtype or b.dtype is not out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if accumulate:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the logits of hidden states of `dtype`: fp32 for 16-bit ones.

    A logit of 100 in bf16 is off by up to 0.25, and a probability that follows from it by a quarter. The sums of the
    product are fp32 already, and are only stored without rounding.
    """
    return torch.promote_types(dtype, torch.float32)


_CPU_ELEMENTS = 1 << 20
"""Elements of the weight that the CPU has in fp32 at once."""


def logits_into(x_CH: Tensor, weight_VH: Tensor, bias: Tensor | None, out_CV: Tensor) -> None:
    """out = x @ weight.T + bias. out has the dtype of x, or a wider one."""
    if out_CV.dtype != x_CH.dtype:
        _wide_logits_into(x_CH, weight_VH, bias, out_CV)
    elif bias is None:
        product_into(x_CH, weight_VH.t(), out_CV, accumulate=False)
    elif x_CH.is_cuda:
        v = _whole_lines(len(bias), x_CH)  # see product_into
        torch.addmm(bias[:v], x_CH, weight_VH[:v].t(), out=out_CV[:, :v])
        if v < len(bias):
            torch.addmm(bias[v:], x_CH, weight_VH[v:].t(), out=out_CV[:, v:])
    else:
        # The CPU's addmm rounds the product to 16 bits before it adds the bias; F.linear rounds after.
        out_CV.copy_(F.linear(x_CH, weight_VH, bias))


def _wide_logits_into(x_CH: Tensor, weight_VH: Tensor, bias: Tensor | None, out_CV: Tensor) -> None:
    """As `logits_into` for an `out` that is wider than x. The CPU casts the weight a part at a time."""
    if bias is not None:
        out_CV.copy_(bias.unsqueeze(0).expand_as(out_CV))
    V, H = weight_VH.shape
    v = _whole_lines(V, x_CH) if x_CH.is_cuda else max(_CPU_ELEMENTS // H, 1)
    for start in range(0, V, v):
        part = slice(start, min(start + v, V))
        product_into(x_CH, weight_VH[part].t(), out_CV[:, part], accumulate=bias is not None)


def column_sum(g_CV: Tensor) -> Tensor:
    return g_CV.sum(0, dtype=torch.promote_types(g_CV.dtype, torch.float32))
