"""The dense weight of a linear layer whose weight is stored in NF4, in bitsandbytes' format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive, uses_kernel

BLOCK, OUTER_BLOCK = 64, 256


def _fake(
    code: Tensor,
    packed: Tensor,
    scales: Tensor,
    code_of_scales: Tensor,
    outer_scales: Tensor,
    offset: Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    return packed.new_empty((rows, columns), dtype=dtype)


def _reference(
    code: Tensor,
    packed: Tensor,
    scales: Tensor,
    code_of_scales: Tensor,
    outer_scales: Tensor,
    offset: Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    block_scales = code_of_scales[scales.long()] * outer_scales.repeat_interleave(OUTER_BLOCK)[: scales.numel()]
    flat = packed.reshape(-1).long()
    nibbles = torch.stack([flat >> 4, flat & 15], dim=1).reshape(-1, BLOCK)
    return (code[nibbles] * (block_scales + offset)[:, None]).to(dtype).reshape(rows, columns)


nf4_weight = Primitive(
    "nf4_weight",
    "(Tensor code, Tensor packed, Tensor scales, Tensor code_of_scales, Tensor outer_scales, Tensor offset,"
    " SymInt rows, SymInt columns, ScalarType dtype) -> Tensor",
    fake=_fake,
    kernel="tigon.kernels.nf4:nf4_weight",
    reference=_reference,
)
"""(rows, columns) of bytes with two weights each, an 8-bit scale per 64 weights and an fp32 scale per 256 of those."""


def dequantiser(packed: Tensor, state: Any) -> Callable[[torch.dtype], Tensor] | None:
    """A function that makes the dense weight, or None if the kernel does not know the format or the device.

    state: bitsandbytes' `QuantState` of the stored weight.
    """
    outer = getattr(state, "state2", None)
    if outer is None or state.quant_type != "nf4" or state.blocksize != BLOCK or outer.blocksize != OUTER_BLOCK:
        return None
    rows, columns = state.shape
    parts = state.code, packed, state.absmax, outer.code, outer.absmax, state.offset
    fits = columns % BLOCK == 0 and packed.dtype == torch.uint8 and all(part.is_contiguous() for part in parts)
    if not fits or not uses_kernel(state.code):
        return None
    return lambda dtype: nf4_weight(*parts, rows, columns, dtype)
