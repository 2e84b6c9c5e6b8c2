"""Parts of all ops over hidden states and an lm_head: the rows to compute, the dtype, and the matrix products."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops import dispatch
from tigon.ops.dispatch import check_dtype

# N tokens, C tokens of a chunk, H hidden, V vocabulary.

# --- rows ---

_LEFT_OUT = 1 / 64


def worth_gathering(index_N: Tensor, rows: int) -> Tensor | None:
    """`index_N`, or None if it lacks so few rows that computing all rows is cheaper than gathering the others.

    Gathering copies N·H elements, and scattering the gradients copies as many again. In every text the last label is
    ignored, which is about one row in a thousand.
    """
    return index_N if rows - index_N.shape[0] > _LEFT_OUT * rows else None


def may_wait(target: Tensor) -> bool:
    """Whether the host may read `target`: not while compiling, tracing fakes or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or type(target) is not Tensor or target.is_meta or not target.numel():
        return False
    return not (target.is_cuda and torch.cuda.is_current_stream_capturing())


def spread(values: Tensor, index: Tensor | None, rows: int, fill: float) -> Tensor:
    """`values` at their flat positions among `rows`, `fill` elsewhere."""
    return values if index is None else values.new_full((rows,), fill).index_copy_(0, index, values)


def keeps_graph() -> bool:
    """Whether the running backward keeps the graph, so that a second backward may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


# --- arguments ---


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raise unless hidden is (..., H), weight (V, H) and bias (V,), of supported dtypes.

    prefix: what the arguments' names begin with in the messages.
    """
    check_dtype(hidden, weight, bias)
    if hidden.ndim == 0 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or not weight.shape[1]:
        raise ShapeError(
            f"{prefix}hidden is {tuple(hidden.shape)}, {prefix}weight is {tuple(weight.shape)}; they must be (..., H) "
            "and (V, H). "
            "A weight with no elements is sharded: gather it first (inside the lm_head's own forward it is whole)."
        )
    V = weight.shape[0]
    if V == 0:
        raise ShapeError("the vocabulary has 0 classes; V must be at least 1.")
    if bias is not None and bias.shape != (V,):
        raise ShapeError(f"{prefix}bias is {tuple(bias.shape)}; it must be {(V,)}.")


def settle_dtypes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, weight and bias in the dtype of the products; the casts are differentiable."""
    dtype = product_dtype(hidden, weight)
    if dtype is hidden.dtype and dtype is weight.dtype and bias is None:
        return hidden, weight, None  # a cast to the same dtype takes 0.5 us of host time
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype).contiguous()


def product_dtype(hidden: Tensor, *others: Tensor) -> torch.dtype:
    """Autocast's dtype if autocast is on, else the promoted dtype of all tensors."""
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, (t.dtype for t in others), hidden.dtype)


# --- products ---


def logits_buffer(rows: int, vocab: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer for (rows, V) logits, or for their gradient; `like`'s dtype unless another is given.

    For kernels, rows start at a multiple of 16 bytes, because unaligned rows halve the width of every load. On the CPU
    rows are contiguous: its bf16 product (oneDNN for AMX, torch 2.13) multiplies the padding between rows by 0, which
    gives NaN if that memory holds a NaN.
    """
    dtype = like.dtype if dtype is None else dtype
    if dispatch.planned_device(like) == "cpu" and not dispatch.uses_kernel(like):
        return like.new_empty((rows, vocab), dtype=dtype)
    align = 16 // dtype.itemsize
    padded = -(-vocab // align) * align
    return like.new_empty((rows, padded), dtype=dtype)[:, :vocab]


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


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, which would make the fp32 accumulation 16-bit; the caller has already chosen the dtypes.

    A context of autocast takes several microseconds of host time, so there is none if autocast is off.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


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
