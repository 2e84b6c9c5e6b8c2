"""Exponentials and logarithms that stay finite, in value and in gradient, for every finite argument."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_EXPONENT = 30.0
"""The largest log-ratio whose exponential is exact. The square of e^30 = 1.1e13 is far inside fp32's range."""
_LN_2 = math.log(2.0)


def exp_bounded(x: Tensor) -> Tensor:
    """e^x up to x = MAX_EXPONENT, and its tangent line beyond.

    A plain exponential overflows in fp32 at x = 89, and its gradient is then infinite or NaN. A clamped one has no
    gradient beyond the clamp. The tangent keeps a finite gradient of the right sign.
    """
    return torch.exp(x.clamp(max=MAX_EXPONENT)) + math.exp(MAX_EXPONENT) * torch.relu(x - MAX_EXPONENT)


def expm1_bounded(x: Tensor) -> Tensor:
    """e^x - 1 up to x = MAX_EXPONENT, and its tangent line beyond; accurate for small x."""
    return torch.expm1(x.clamp(max=MAX_EXPONENT)) + math.exp(MAX_EXPONENT) * torch.relu(x - MAX_EXPONENT)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for log-probabilities x <= 0, accurate at both ends.

    x is clamped to -eps of its dtype, because the result is -inf at 0. A sum of probabilities that rounding has put
    at 1 or above therefore leaves a rest of eps, without a gradient.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near_0 = x > -_LN_2
    # Each branch gets arguments at which its gradient is finite, because torch.where multiplies the other's by 0.
    for_expm1 = torch.where(near_0, x, -_LN_2)
    for_exp = torch.where(near_0, -_LN_2, x)
    return torch.where(near_0, torch.log(-torch.expm1(for_expm1)), torch.log1p(-torch.exp(for_exp)))
