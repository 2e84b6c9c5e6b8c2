"""The dense weight of a weight that is stored in MXFP4: 4 bits each, and a power of two per 32 of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive

BLOCK = 32
CODE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _fake(code: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*scales.shape[:-1], scales.shape[-1] * BLOCK), dtype=dtype)


def _reference(code: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    w = torch.ldexp(code[nibbles.int()], scales.int()[..., None] - 127)
    return w.to(dtype).flatten(-2)


mxfp4_weight = Primitive(
    "mxfp4_weight",
    "(Tensor code, Tensor packed, Tensor scales, ScalarType dtype) -> Tensor",
    fake=_fake,
    kernel="tigon.kernels.mxfp4:mxfp4_weight",
    reference=_reference,
)
"""code (16,) of CODE in fp32, packed (..., G, 16) of bytes with two weights each, scales (..., G) of exponents, 127 for
1 -> (..., 32 · G)."""
