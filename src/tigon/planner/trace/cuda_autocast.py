"""CUDA's autocast on fake CPU tensors.

`torch.autocast` has a list of operators for each device. CUDA's computes powers, norms, softmax and sums in fp32; the
CPU's leaves them in 16 bits. This changes memory: GPT-2's `gelu_new` calls `torch.pow`, so on a GPU its intermediates
are fp32. At 4 x 1024 tokens that is 120 MiB more per layer of GPT-2-large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._ops import OpOverload

# torch/include/ATen/autocast_mode.h (torch 2.13), as far as the CPU's lists differ from CUDA's. Left out are operators
# on images, recurrent cells, and what language models do not call (tests/planner/test_cuda_autocast.py names them).
# AT_FORALL_FP32: the arguments become fp32.
FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "softplus", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "dist", "logsumexp"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity"),
)
# AT_FORALL_FP32_SET_OPT_DTYPE: the result is fp32 unless the call names a dtype.
FP32_RESULT = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList")
# AT_FORALL_PROMOTE: the arguments get the widest dtype among them.
WIDEST = ("addcdiv", "addcmul", "atan2", "dot", "index_put", "scatter_add", "tensordot", "vdot")
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Context in which `torch.autocast("cpu")` treats operators like CUDA's autocast, in the whole process."""
    library = torch.library.Library("aten", "IMPL")
    kinds = ((FP32, _in_fp32), (FP32_RESULT, _with_fp32_result), (WIDEST, _in_the_widest))
    try:
        for names, kind in kinds:
            for name in names:
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name, kind(operator), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _casts(value: object) -> TypeGuard[Tensor]:
    """Whether autocast changes the dtype of an argument. It leaves integers and fp64 unchanged."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _in_fp32(operator: OpOverload) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return operator(*(arg.float() if _casts(arg) else arg for arg in args), **kwargs)

    return call


def _with_fp32_result(operator: OpOverload) -> Callable[..., Any]:
    # `dtype` is the last argument of each, and some take it by position
    count = len(operator._schema.arguments)

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", None)
        if len(args) == count:
            args, dtype = args[:-1], args[-1]
        if _casts(args[0]) and dtype is None:
            dtype = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return operator(*args, **kwargs, dtype=dtype)

    return call


def _in_the_widest(operator: OpOverload) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtypes = {arg.dtype for arg in args if _casts(arg)}
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if len(dtypes) > 1:  # 16 bits and fp32
                args = tuple(arg.float() if _casts(arg) else arg for arg in args)
            return operator(*args, **kwargs)

    return call
