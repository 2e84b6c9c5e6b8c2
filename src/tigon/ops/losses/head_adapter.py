"""The LoRA adapter of a head, as `linear_cross_entropy` takes it: the low-rank hidden states U = s · X Aᵀ, and B.

U and B enter the chunk loop. A, the scaling and what the adapter reads stay in front of it, in plain PyTorch: they
concern tensors of rank R only.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops.dispatch import check_dtype, check_number
from tigon.ops.losses.common import check_devices

# N tokens, H hidden, V vocabulary, R rank.


def check_adapter(
    hidden: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, scaling: float,
    adapter_hidden: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless the adapter is absent, or fits hidden (..., H) and weight (V, H)."""
    if not -math.inf < check_number("scaling", scaling) < math.inf:
        raise OptionError(f"scaling={scaling} must be finite.")
    if lora_a is None or lora_b is None:
        if lora_a is not lora_b:
            given, missing = ("lora_a", "lora_b") if lora_b is None else ("lora_b", "lora_a")
            raise OptionError(f"{given} is given without {missing}; an adapter needs both.")
        if adapter_hidden is not None:
            raise OptionError("adapter_hidden is given without lora_a and lora_b; there is no adapter to read it.")
        return
    check_dtype(lora_a, lora_b, adapter_hidden)
    (V, H), R = weight.shape, lora_a.shape[0] if lora_a.ndim else 0
    if lora_a.shape != (R, H) or lora_b.shape != (V, R):
        raise ShapeError(
            f"lora_a is {tuple(lora_a.shape)}, lora_b is {tuple(lora_b.shape)}; for a weight of {(V, H)} they must be "
            f"(R, {H}) and ({V}, R)."
        )
    if adapter_hidden is not None and adapter_hidden.shape != hidden.shape:
        raise ShapeError(
            f"adapter_hidden is {tuple(adapter_hidden.shape)}, hidden is {tuple(hidden.shape)}; they must agree."
        )
    check_devices(hidden=hidden, lora_a=lora_a, lora_b=lora_b, adapter_hidden=adapter_hidden)


def low_rank_hidden(hidden: Tensor, lora_a: Tensor | None, scaling: float, dtype: torch.dtype) -> Tensor | None:
    """U (N, R) = scaling · hidden @ lora_a.T in `dtype`, or None without an adapter.

    The scaling is applied to A, in fp32 at least, so that U is rounded once.
    """
    if lora_a is None:
        return None
    scaled = lora_a.to(torch.promote_types(lora_a.dtype, torch.float32)) * scaling
    return F.linear(hidden.to(dtype).reshape(-1, hidden.shape[-1]), scaled.to(dtype))
