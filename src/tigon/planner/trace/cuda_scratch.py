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
from torch.overrides import TorchFunctionMode

from tigon.ops import dispatch
from tigon.planner.trace.dispatch_recorder import Scratch, TraceRecorder


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


class _CudaFunctions(TorchFunctionMode):
    """Functions of PyTorch whose memory on CUDA differs from that on a CPU.

    - Dropout's mask has the input's dtype on a CPU and one byte per element on CUDA.
    - The fake of the product of experts rejects fp32, which CUDA multiplies expert by expert.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is _GROUPED_MM and args[0].dtype != torch.bfloat16:
            return _ExpertsProduct.apply(args[0], args[1], self._recorder)
        return func(*args, **kwargs)


_GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)  # what torch.nn.functional.grouped_mm calls


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


@contextlib.contextmanager
def planned_for_cuda(recorder: TraceRecorder, *, arch: tuple[int, int], ignored: int) -> Iterator[None]:
    """Context in which tigon's ops plan for a GPU of `arch`. ignored: number of ignored labels in a micro-batch."""
    run = dispatch.Planned(arch=arch, ignored=ignored, count=recorder.count)
    with dispatch.planned_for(run), _CudaFunctions(recorder):
        yield


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """Context in which every launch of a Triton kernel raises.

    A fake tensor's address is 0. A kernel that a GPU runs with it reads there, and CUDA then fails for the whole
    process. tigon's ops launch nothing in a trace; the code of other libraries may.
    """
    if not dispatch.HAS_TRITON:
        yield
        return
    function = importlib.import_module("triton.runtime.jit").JITFunction

    def refuse(kernel: Any, *_: object, **__: object) -> None:
        raise RuntimeError(f"{kernel.fn.__module__}.{kernel.fn.__name__} is a Triton kernel, which needs data")

    before, function.run = function.run, refuse
    try:
        yield
    finally:
        function.run = before


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
        "tigon::gated_delta_rule_fwd": lambda args: _delta_rule_states(args[1], args[2]),
        "tigon::gated_delta_rule_bwd": _delta_rule_bwd,
    }


def _delta_rule_states(k: Tensor, v: Tensor) -> int:
    """kernels/gated_delta_rule.py: the state before each chunk, and u. Documents that end inside a chunk add some."""
    (B, T, _, K), (G, V) = k.shape, v.shape[2:]
    return int(B * -(-T // 64) * G * K * V * k.itemsize + v.numel() * v.itemsize)


def _delta_rule_bwd(args: tuple[Any, ...]) -> int:
    """Both again, their gradients, and the gradients of q and k for each head of v."""
    k, v = args[3], args[4]
    (B, T, H, K), G = k.shape, v.shape[2]
    return 2 * _delta_rule_states(k, v) + (2 * B * T * G * K * k.itemsize if G > H else 0)


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
