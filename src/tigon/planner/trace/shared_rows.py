"""Attention of the trace for processes that share rows: what a shard exchanges, allocates and computes.

The trace has the tokens of one process. Ulysses exchanges them for heads by the functions of the run. The loops of a
ring are PyTorch's and need processes, so their allocations are made here in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.planner.gpus import Gpu
from tigon.planner.simulate.roofline import COPY_SHARE
from tigon.planner.trace.attention import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, product_share, products
from tigon.planner.trace.dispatch_recorder import TraceRecorder
from tigon.techniques.keys.sharding import RING, ShardingConfig
from tigon.techniques.sequence_parallel.sequence_parallel import own_tokens, whole_rows

# B batch, h query heads, t tokens of a shard, D head width, N processes of a group.

Attend = Callable[..., tuple[Tensor, None]]


def of_shards(attend: Attend, sharding: ShardingConfig, recorder: TraceRecorder, gpu: Gpu) -> Attend:
    """The attention of one process of a group."""
    size = sharding.sequence
    link = gpu.copy_bytes_s * COPY_SHARE / gpu.peer_bytes_s  # bytes of device memory in the time of one on the link

    def exchange(x: Tensor) -> Tensor:
        return _Exchange.apply(x, recorder, link * (size - 1) / size)  # type: ignore[no-any-return]

    def ulysses(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        qkv = whole_rows((query, key, value), size, exchange)
        out_BThD, _ = attend(module, *qkv, mask, **options)
        return own_tokens(out_BThD, size, exchange), None

    def ring(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(dtype) for x in (query, key, value))
        out_BhtD = _Ring.apply(query, key, value, recorder, size, product_share(query.shape[-1], gpu.arch))
        return out_BhtD.transpose(1, 2).contiguous(), None

    return ring if sharding.sequence_method == RING else ulysses


class _Exchange(torch.autograd.Function):
    """An all-to-all, which nothing overlaps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: TraceRecorder, weight: float) -> Tensor:
        ctx.recorder, ctx.weight = recorder, weight
        recorder.count(moved_bytes=weight * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        dout = dout.contiguous()
        ctx.recorder.count(moved_bytes=ctx.weight * dout.nbytes)
        return torch.empty_like(dout), None, None


class _Ring(torch.autograd.Function):
    """Keys and values go round while attention computes. Results are merged in fp32 (torch 2.13, `_SDPAMerger`)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: TraceRecorder, size: int, share: float) -> Tensor:
        k, v = k.contiguous(), v.contiguous()
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        merged = None
        for _ in range(2):  # later rounds have the memory of the second
            travelling = [torch.cat([k.flatten(), v.flatten()]) for _ in range(2)]  # sent, and received
            block = torch.empty_like(q).float()
            merged = block if merged is None else merged - torch.sigmoid(merged) * (merged - block)
            merged = torch.cat(merged.chunk(2, dim=2), dim=2)  # half of the processes merge half of their tokens
            del travelling, block
        products(recorder, q, FORWARD_PRODUCTS, causal=True, share=share / size)
        assert merged is not None
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.recorder, ctx.size, ctx.share = recorder, size, share
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = saved = ctx.saved_tensors  # held to the end
        dout = dout.contiguous()
        sums = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)]
        for number in range(2):
            travelling = [torch.cat([k.flatten(), v.flatten()]) for _ in range(2)]
            per_head = [torch.empty_like(q) for _ in (k, v)]  # summed over the heads that share a key
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            del per_head
            if number:  # the sums of keys and values travel too
                received = [torch.cat([sums[1].flatten(), sums[2].flatten()]) for _ in range(2)]
                del received
            sums = [total + part for total, part in zip(sums, gradients, strict=True)]
            del travelling, gradients
        products(ctx.recorder, q, BACKWARD_PRODUCTS, causal=True, share=ctx.share / ctx.size)
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, saved[:3], strict=True))
        return dq, dk, dv, None, None, None
