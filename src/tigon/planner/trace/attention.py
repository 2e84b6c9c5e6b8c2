"""Attention on fake tensors with the allocations of CUDA: the tensors that each kernel saves, and its scratch memory.

On the CPU, scaled_dot_product_attention uses other kernels, so it is replaced instead of traced. The allocations follow
PyTorch's source; the constants below name the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tigon.integrations.trl.shared_prefix import attend_row, row_behind
from tigon.ops import recomputation
from tigon.planner.trace.dispatch_recorder import TraceRecorder
from tigon.techniques.head_groups import one_by_one

# B batch, h query heads, k key heads, T tokens, D head width.

# aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: the rows and columns of the fp32 accumulator
# of dQ are rounded up to multiples of these.
FLASH_ROWS, FLASH_COLUMNS = 128, 32
# .../cuda/attention.cu, _efficient_attention_forward: the rows of the log-sum-exp are rounded up to multiples of this.
EFFICIENT_ROWS = 32
# sdp_utils.cpp, use_flash_attention.
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
# The backward computes five products and the forward two. With a causal mask, half of each counts.
BACKWARD_PRODUCTS, FORWARD_PRODUCTS = 5, 2

# The forward is a separate operator, so that a policy of selective checkpointing can keep its outputs.
_LIBRARY = torch.library.Library("tigon_memory", "DEF")
_LIBRARY.define("attention(Tensor q, int width, int lse_rows) -> (Tensor, Tensor)")
OPERATOR = "tigon_memory::attention"


def _outputs(q: Tensor, width: int, lse_rows: int) -> tuple[Tensor, Tensor]:
    """out (B, T, h, width) in q's dtype, and the log-sum-exp (B, h, lse_rows) in fp32."""
    B, h, T, _ = q.shape
    return q.new_empty((B, T, h, width)), q.new_empty((B, h, lse_rows), dtype=torch.float32)


torch.library.register_fake(OPERATOR, _outputs, lib=_LIBRARY)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


# Largest head width -> share of the rate of a model's other products that causal attention without a mask reaches. The
# share is for cuDNN's kernels, which PyTorch prefers from Hopper on, whole and in groups of heads. It was fitted to two
# steps of 131,072 tokens (15.97 and 15.73 s; H200, Llama-3.2-1B, torch 2.11.0+cu130, tigon 75aa43a, 2026-11-22). Later
# steps of up to 393,216 tokens (benchmarks/results/nvidia-h200/study/longest-sequence.json) are predicted within 3 %.
# For heads of width 128, Llama-3-8B's steps of up to 65,536 tokens are predicted well without a share. Older GPUs use
# FlashAttention 2 and were not measured.
_SHARES = {64: 0.66}
_MEASURED_ARCH = (9, 0)
# The same for the memory-efficient kernel with a mask in 16 bits. It was fitted to the two masked steps of
# benchmarks/results/nvidia-h200/planner/runs.json, with heads of 64 and of 128. All tokens of a sample count.
# That kernel is one for all GPUs, so its share of the rate differs by GPU. Only Hopper was measured.
_MASKED_SHARE = 0.5


def product_share(head_width: int, arch: tuple[int, int]) -> float:
    """The share of the rate of a model's other products that attention without a mask reaches."""
    if arch < _MEASURED_ARCH:
        return 1.0
    return next((share for width, share in _SHARES.items() if head_width <= width), 1.0)


def masked_share(dtype: torch.dtype, arch: tuple[int, int]) -> float:
    """The share of the rate of a model's other products that attention with a mask reaches."""
    return _MASKED_SHARE if dtype in _FLASH_DTYPES and arch == _MEASURED_ARCH else 1.0


def products(recorder: TraceRecorder, q: Tensor, count: int, causal: bool, share: float = 1.0) -> None:
    """Count `count` products of attention. share: their rate as a share of the rate of a model's other products."""
    B, h, T, D = q.shape
    recorder.count(flops=2.0 * count * B * h * T * T * D * (0.5 if causal else 1.0) / share, dtype=q.dtype)


class _Flash(torch.autograd.Function):
    """FlashAttention. It saves q, k, v, out and the log-sum-exp (B, h, T) in fp32; a group's heads share k and v."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: TraceRecorder, groups: int, share: float, causal: bool
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            products(recorder, q, FORWARD_PRODUCTS, causal=causal, share=share)
            return torch.ops.tigon_memory.attention(q, v.shape[-1], q.shape[2])  # type: ignore[no-any-return]

        out_BThD, lse = recomputation.compute_once(compute)
        ctx.save_for_backward(q, k, v, out_BThD, lse)
        ctx.recorder, ctx.groups, ctx.share, ctx.causal = recorder, groups, share, causal
        return out_BThD  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # held to the end: the kernel reads the outputs too
        q, k, v = saved[:3]
        B, h, T, D = q.shape
        rows = _round_up(T, FLASH_ROWS)
        dq, dk, dv = (x.new_empty((B, T, x.shape[1], D)).transpose(1, 2) for x in (q, k, v))
        grouped = ctx.groups > 1  # if so, the tensors below belong to one group and are added to the whole gradients
        h //= ctx.groups
        scratch = [x.new_empty((B, T, max(1, x.shape[1] // ctx.groups), D)) for x in (q, k, v)] if grouped else []
        scratch += [
            q.new_empty((B, h, rows), dtype=torch.float32),  # rowsum(dO * O)
            q.new_empty((B, rows, h, _round_up(D, FLASH_COLUMNS)), dtype=torch.float32),
        ]
        if k.shape[1] != q.shape[1] and h > 1:  # dK and dV are computed per query head, then summed over the group
            scratch += [k.new_empty((B, T, h, D)), v.new_empty((B, T, h, D))]
        products(ctx.recorder, q, BACKWARD_PRODUCTS, causal=ctx.causal, share=ctx.share)
        del scratch
        return dq, dk, dv, None, None, None, None


class _Efficient(torch.autograd.Function):
    """The memory-efficient kernel, which accepts masks and fp32.

    It needs k and v for each query head, and saves the mask in q's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, recorder: TraceRecorder, share: float
    ) -> Tensor:
        out_BThD, lse = torch.ops.tigon_memory.attention(q, v.shape[-1], _round_up(q.shape[2], EFFICIENT_ROWS))
        ctx.save_for_backward(q, k, v, mask, out_BThD, lse)
        ctx.recorder, ctx.causal, ctx.share = recorder, mask is None, share
        products(recorder, q, FORWARD_PRODUCTS, causal=ctx.causal, share=share)
        return out_BThD  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # held to the end: the kernel reads the outputs too
        q, k, v = saved[:3]
        B, h, T, D = q.shape
        dq, dk, dv = (x.new_empty((B, T, x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
        scratch = [
            q.new_empty((B, h, _round_up(T, EFFICIENT_ROWS)), dtype=torch.float32),
            q.new_empty((B, h, T, D), dtype=torch.float32),
        ]
        products(ctx.recorder, q, BACKWARD_PRODUCTS, causal=ctx.causal, share=ctx.share)
        del scratch
        return dq, dk, dv, None, None, None


def attention(recorder: TraceRecorder, arch: tuple[int, int], groups: int = 1) -> Callable[..., Any]:
    """An attention function with the allocations of transformers' `sdpa_attention_forward` and flash functions on CUDA.

    groups: number of groups of heads whose backward passes run one after another.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if (row := row_behind(attention_mask)) is not None:
            return attend_row(row, (query, key, value), options["scaling"], options.get("sliding_window")), None
        if attention_mask is not None:  # transformers repeats them for every kernel that gets a mask
            shared_by = query.shape[1] // key.shape[1]
            key, value = (_repeated(x, shared_by) for x in (key, value))
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(dtype) for x in (query, key, value))
        # sdp_utils.cpp: the flash kernel needs keys and values of equal width. Latent attention's values are narrower.
        flash = query.dtype in _FLASH_DTYPES and query.shape[-1] == value.shape[-1]
        if attention_mask is None and not flash:
            return _without_flash(query, key, value, recorder), None
        if attention_mask is None:
            share = product_share(query.shape[-1], arch)
            causal = getattr(module, "is_causal", True)  # a vision tower's is not
            return _Flash.apply(query, key, value, recorder, groups, share, causal), None
        share = masked_share(query.dtype, arch)
        return _Efficient.apply(query, key, value, attention_mask.to(query.dtype), recorder, share), None

    if groups == 1:
        return attend

    def grouped(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        flash = attention_mask is None and dtype in _FLASH_DTYPES
        function = attend if flash else one_by_one(attend, min(groups, key.shape[1]))
        return function(module, query, key, value, attention_mask)

    return grouped


def _without_flash(q: Tensor, k: Tensor, v: Tensor, recorder: TraceRecorder) -> Tensor:
    """Causal attention with a dtype or a width of values that the flash kernel does not support.

    The memory-efficient kernel supports fp32 too, but not groups of heads (aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp, check_batch_size_and_num_heads_dense). With groups, PyTorch computes the products one by one
    (.../transformers/attention.cpp, _scaled_dot_product_attention_math), which can be traced directly.
    """
    if k.shape[1] == q.shape[1]:
        return _Efficient.apply(q, k, v, None, recorder, 1.0)  # type: ignore[no-any-return]
    with sdpa_kernel(SDPBackend.MATH):
        out_BhTD = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out_BhTD.transpose(1, 2).contiguous()


def _repeated(x_BkTD: Tensor, groups: int) -> Tensor:
    B, k, T, D = x_BkTD.shape
    return x_BkTD[:, :, None].expand(B, k, groups, T, D).reshape(B, k * groups, T, D)


def mask_maker(*, masked: bool, dense: bool, shards: int = 1) -> Callable[..., Tensor | None]:
    """The mask function. It returns a (B, 1, T, T) bool mask if a mask is needed, else None.

    Between the parts of an image there is none. For text, a mask is needed if samples hold several documents (`masked`)
    or a window is narrower than the sample.
    dense: whether the attention accepts masks; the variable-length flash kernels do not. shards: the mask is of rows
    with this many times the tokens.
    """

    def make(
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        local_size: int | None = None,
        allow_is_bidirectional_skip: bool = False,
        **_: object,
    ) -> Tensor | None:
        if allow_is_bidirectional_skip:  # an image without padding; transformers then makes no mask
            return None
        windowed = local_size is not None and local_size < kv_length
        if not dense or not (masked or windowed):
            return None
        return torch.empty((batch_size, 1, shards * q_length, shards * kv_length), dtype=torch.bool)

    return make
