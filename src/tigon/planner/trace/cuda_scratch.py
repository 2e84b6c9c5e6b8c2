"""Allocations of CUDA that fake CPU tensors do not show: tigon's ops on a GPU, and the scratch memory of kernels.

Suffixes of names give shapes: S tokens sorted by expert, E experts, I input width, O output width.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tigon.ops import dispatch
from tigon.ops.lm_head import worth_gathering
from tigon.planner.trace.dispatch_recorder import Scratch, TraceRecorder
from tigon.techniques.mechanisms import fused_linear

# Imported by name, because the attribute `tigon.ops.linear_cross_entropy` is the function, not a module.
_LOSS: Any = importlib.import_module("tigon.ops.losses.linear_cross_entropy")
_MULTI_HEAD_LOSS: Any = importlib.import_module("tigon.ops.losses.multi_head")
_LOGPROBS: Any = importlib.import_module("tigon.ops.logprobs.linear_logprobs")


class _ExpertsProduct(torch.autograd.Function):
    """Tokens, sorted by expert, times their expert's weight. CUDA multiplies fp32 expert by expert, into one result.

    A trace lacks the number of tokens per expert, which depends on data. The sizes of the results do not depend on it.
    """

    @staticmethod
    def forward(ctx: Any, rows_SI: Tensor, weight_EIO: Tensor, recorder: TraceRecorder) -> Tensor:
        ctx.save_for_backward(rows_SI, weight_EIO)
        ctx.recorder = recorder
        (S, I), (E, _, O) = rows_SI.shape, weight_EIO.shape
        recorder.count(flops=2.0 * S * I * O, dtype=rows_SI.dtype, launches=E)
        return rows_SI.new_empty(S, O)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_SI, weight_EIO = ctx.saved_tensors
        E, I, O = weight_EIO.shape
        ctx.recorder.count(flops=4.0 * len(rows_SI) * I * O, dtype=rows_SI.dtype, launches=2 * E)
        return torch.empty_like(rows_SI), torch.empty_like(weight_EIO), None


@contextlib.contextmanager
def planned_for_cuda(recorder: TraceRecorder, *, arch: tuple[int, int], ignored: int) -> Iterator[None]:
    """Context in which tigon's ops plan for a GPU of `arch`. ignored: number of ignored labels in a micro-batch.

    It replaces:
    - functions of the losses, of linear_logprobs and of fused linear layers, which depend on values, on
      the device, or on whether a tensor is fake;
    - dropout, whose mask has the input's dtype on a CPU and one byte per element on CUDA;
    - the product of experts, whose fake rejects fp32, which CUDA multiplies expert by expert.
    """
    plain_dropout, plain_grouped_mm = functional.dropout, getattr(functional, "grouped_mm", None)

    def rows_that_count(target: Tensor, *_: Any) -> Tensor | None:
        return torch.empty(target.numel() - ignored, dtype=torch.int64) if ignored else None

    def tokens_that_count(ids_NK: Tensor, _ignore_index: int, weight_VH: Tensor, by: str) -> Tensor | None:
        N = ids_NK.shape[0]
        if not ignored or 6 * N * weight_VH.numel() < _LOGPROBS.WORTH_A_WAIT_FLOPS[by]:
            return None
        return worth_gathering(torch.empty(N - ignored, dtype=torch.int64), N)

    def product_into(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        # cuBLAS adds a product of 16-bit factors to an fp32 sum without casting the factors.
        recorder.count(flops=2.0 * math.prod(a.shape) * b.shape[1], dtype=a.dtype)

    def add_exp_weight_grad(
        e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor, grad_VH: Tensor
    ) -> None:  # fmt: skip
        torch.empty_like(x_NH)  # the scaled rows
        recorder.count(moved_bytes=sum(t.nbytes for t in (e_NV, x_NH, factors, target, grad_VH)))

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if inplace or not training or not 0 < p < 1:
            return plain_dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
        if mat_a.dtype == torch.bfloat16:
            return plain_grouped_mm(mat_a, mat_b, offs=offs, **options)  # type: ignore[misc,no-any-return]
        return _ExpertsProduct.apply(mat_a, mat_b, recorder)  # type: ignore[no-any-return]

    replaced: dict[tuple[Any, str], Callable[..., Any]] = {
        (_LOSS, "rows_that_count"): rows_that_count,
        (_LOSS, "product_into"): product_into,
        (_LOSS, "add_exp_weight_grad"): add_exp_weight_grad,
        (fused_linear, "product_into"): product_into,
        (_LOSS, "can_bypass_dispatcher"): lambda tensors: True,
        (_MULTI_HEAD_LOSS, "can_bypass_dispatcher"): lambda tensors: True,
        (_LOGPROBS, "rows_that_count"): tokens_that_count,
        (functional, "dropout"): dropout,
    }
    if plain_grouped_mm is not None:
        replaced[functional, "grouped_mm"] = grouped_mm
    before = {(module, name): getattr(module, name) for module, name in replaced}
    try:
        for (module, name), function in replaced.items():
            setattr(module, name, function)
        with dispatch.planned_for(arch):
            yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


# --- scratch memory inside operators ---------------------------------------------------------------------------------


def scratch_bytes(sm_count: int) -> Mapping[str, Scratch]:
    """Operator -> the function that gives the bytes of its scratch memory."""

    def norm_bwd(args: tuple[Any, ...]) -> int:
        x, want_dw, want_db = args[2], args[10], args[11]
        # kernels/norm.py: one fp32 row per persistent program. A multiprocessor has three programs up to 1024 columns,
        # one beyond.
        width = x.shape[-1]
        programs = min(x.numel() // max(width, 1), sm_count * (3 if width <= 1024 else 1))
        return int(4 * (want_dw + want_db) * programs * width)

    return {
        "tigon::norm_bwd": norm_bwd,
        "tigon::norm_bwd_amax": norm_bwd,
        "aten::embedding_dense_backward": _embedding_backward,
    }


def _embedding_backward(args: tuple[Any, ...]) -> int:
    """Scratch of aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu: sorted indices, and fp32 sums of up to ten rows.

    Each distinct token needs at least one sum. The number of distinct tokens depends on the text. This counts that of
    uniformly drawn tokens, which is larger than that of any text.
    """
    grad, indices, vocab = args[0], args[1], args[2]
    N, H = indices.numel(), grad.shape[-1]
    if N <= 3072:  # a kernel without sorting
        return 0
    distinct = vocab * (1.0 - math.exp(-N / vocab))
    return int(4 * 8 * N + 4 * H * (distinct + N / 10))
