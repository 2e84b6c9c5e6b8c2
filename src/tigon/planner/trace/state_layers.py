"""Layers with a state on fake tensors, with the allocations of the libraries whose kernels a trace cannot run.

flash-linear-attention 0.6: ops/gated_delta_rule/chunk.py, ops/kda/chunk.py and the files that they call.
causal-conv1d 1.6: causal_conv1d/causal_conv1d_interface.py.

The model belongs to the trace, so its layers get a forward of their own (`models/seams/rebind.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.models.hybrid_layers import runs_of
from tigon.models.seams.rebind import owner_of, rebind_each
from tigon.planner.trace.dispatch_recorder import TraceRecorder

# B batch, T tokens, h key heads, H value heads, K key width, V value width, C tokens of a chunk.
C = 64
_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES = 8, 12


def trace_libraries(model: nn.Module, recorder: TraceRecorder) -> None:
    """Replace the kernels of libraries in the layers of a trace's model."""
    for _, module, runs in runs_of(model):
        by_library = [kind for kind, what in runs.items() if what == kind.library and kind.function in FUNCTIONS]
        replacements: dict[str, Callable[..., Any]] = {}
        for kind in by_library:
            names = [name for name in kind.calls if owner_of(type(module).forward, name) is not None]
            replacements |= {name: functools.partial(FUNCTIONS[kind.function], recorder) for name in names}
        if replacements:
            vars(module)["forward"] = MethodType(rebind_each(type(module).forward, replacements), module)


def _delta_rule(
    recorder: TraceRecorder, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    return _DeltaRule.apply(query, key, value, g, beta, recorder), None


def _convolution(recorder: TraceRecorder, x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
    return _Convolution.apply(x, weight, bias)  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "causal_conv1d_fn": _convolution,
}
"""Kernel of a `LayerKind` -> the function that a trace runs in its place."""


class _DeltaRule(torch.autograd.Function):
    """The gated delta rule in chunks. A gate per channel (Kimi) has g (B, T, H, K), and saves one more matrix."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, recorder: TraceRecorder) -> Tensor:
        given = [x.contiguous() for x in (q, k, v, g, beta)]  # held to the end by the library's decorator
        (B, T, H, V), K = v.shape, k.shape[-1]
        per_channel = g.ndim == v.ndim
        normed = [torch.empty_like(x) for x in given[:2]]
        rstd = [x.new_empty(x.shape[:-1], dtype=torch.float32) for x in given[:2]]
        summed_g = torch.empty_like(given[3], dtype=torch.float32)
        matrices = [k.new_empty((B, T, H, C)) for _ in range(1 + per_channel)]
        w_u = k.new_empty((B, T, H, K)), torch.empty_like(given[2])
        scratch = [*w_u, *([k.new_empty((B, T, H, K))] if per_channel else []), _states(k, v), torch.empty_like(w_u[1])]
        out = torch.empty_like(scratch[-1])
        per_token = 2.0 * H * (C * (3 * K + 2 * V) + 3 * K * V)
        recorder.count(flops=B * T * per_token, dtype=k.dtype, launches=_FORWARD_LAUNCHES)
        recorder.count(moved_bytes=_bytes(*given, *normed, *matrices, *scratch, *scratch, out), launches=0)
        ctx.save_for_backward(
            *normed, given[2], summed_g, given[4], *matrices, *rstd, *(given[3:4] if per_channel else [])
        )
        ctx.recorder, ctx.per_channel, ctx.g_dtype = recorder, per_channel, g.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dout = dout.contiguous()
        q, k, v, summed_g, beta, *matrices = ctx.saved_tensors
        (B, T, H, V), (h, K) = v.shape, k.shape[2:]
        per_head = functools.partial(k.new_empty, (B, T, H, K))
        again = [per_head(), torch.empty_like(v), *([per_head()] if ctx.per_channel else [])]
        again += [_states(k, v), torch.empty_like(v)]
        dv = torch.empty_like(dout)
        dstates, dv = _states(k, v), torch.empty_like(dv)
        dq, dk, dg, dw = per_head(), per_head(), torch.empty_like(summed_g), per_head()
        if h != H:  # the gradients of the heads that share a key are summed
            dq, dk = (x.new_empty((B, T, h, K)) for x in (dq, dk))
        dk2, dv, dbeta, dg2 = per_head(), torch.empty_like(v), torch.empty_like(beta), torch.empty_like(summed_g)
        per_token = 2.0 * H * (C * (6 * K + 6 * V) + 9 * K * V)
        ctx.recorder.count(flops=B * T * per_token, dtype=k.dtype, launches=_BACKWARD_LAUNCHES)
        moved = _bytes(q, k, v, *matrices, *again, *again, dstates, dstates, dq, dk, dw, dk2, dv, dout)
        ctx.recorder.count(moved_bytes=moved, launches=0)
        dg = torch.empty_like(dg)
        del again, dstates, dw, dk2, dg2  # the library returns from the function that holds them
        dq, dk = torch.empty_like(dq), torch.empty_like(dk)
        return dq, dk, dv, dg.to(ctx.g_dtype), dbeta, None


def _states(k: Tensor, v: Tensor) -> Tensor:
    """The state before each chunk."""
    B, T, H, V = v.shape
    return k.new_empty((B, -(-T // C), H, k.shape[-1], V))


def _bytes(*tensors: Tensor) -> float:
    return float(sum(x.numel() * x.itemsize for x in tensors))


class _Convolution(torch.autograd.Function):
    """The short convolution with its activation. It saves x, and writes the weight's gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.zeros_like(x)  # zeros, because a trace counts the bytes of a fill and not of an allocation

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dweight = torch.zeros_like(weight, dtype=torch.float32).to(weight.dtype)
        return torch.zeros_like(x), dweight, None if bias is None else torch.zeros_like(bias)
