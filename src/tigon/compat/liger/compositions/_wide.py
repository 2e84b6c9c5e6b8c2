"""The dtype that a composition computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()
