"""`Op`, the record that describes an op: its formula, test inputs, cost and allowed error.

Tests, benchmarks, the planner and the tables in the docs iterate over these records. A new op therefore needs only
`kernels/x.py` and `ops/x.py`, whose record is found by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The minimum cost of one forward and backward, for the planner and for GB/s in the benchmark."""

    moved_bytes: int
    """Bytes that forward and backward read and write if each pass reads and writes each tensor once."""
    saved_bytes: int
    """Bytes kept from forward to backward, including inputs saved for backward."""
    flops: int = 0
    """Floating-point operations of the matrix products; 0 for memory-bound ops."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of shapes and options. `Op.make` turns it into tensors."""

    id: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    product_orders: int = 1
    """The unfused op's error is the largest of this many orders of summation in its products. More than 1 where the
    products' rounding decides the error and few rows decide the norm, so that one order's error may be small by luck.
    """
    small: bool = True
    """Small enough for Triton's interpreter (a few hundred programs). Larger cases run on GPUs and the composite path.
    """


@dataclass(frozen=True, kw_only=True)
class Op:
    """One fused op.

    `oracle` is the unfused PyTorch formula, differentiated by autograd. Its fp64 result is the truth; its result in the
    inputs' dtype is the baseline. The op's error may be at most `error_factor` times the baseline's error.
    """

    name: str
    call: Callable[..., Any]
    oracle: Callable[..., Any]
    make: Callable[[Case, torch.dtype, torch.device], dict[str, Any]]
    """Makes random inputs by parameter name. The tensors named in `grads` are differentiated."""
    grads: tuple[str, ...]
    case: Case
    """A small case, with which `tigon doctor` tests the op. The tests have more (tests/ops/cases)."""
    cost: Callable[..., Cost]
    """The cost of a call; takes the same arguments as `call`."""
    has_kernel: bool = True
    """Whether the op has its own operators and kernels. False for an op that orders PyTorch's products and sums."""
    straight_through: bool = False
    """Whether the backward takes a rounding of the forward for the identity, so that finite differences disagree."""
    error_factor: float = 2.0
    fp32_error_factor: float | None = None
    """The factor in fp32, if it is another."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Largest relative Frobenius error against fp64 over all cases, outputs and gradients, by dtype, on an H200."""
    quantisation_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For an op that rounds its factors: relative Frobenius error against the unrounded formula, by option and result,
    for bf16 factors with normally distributed values."""

    def factor(self, dtype: torch.dtype) -> float:
        """How many times the baseline's error the op's may be."""
        if dtype is torch.float32 and self.fp32_error_factor is not None:
            return self.fp32_error_factor
        return self.error_factor


def randn(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    """Normal values from the global generator, rounded to `dtype`, so that the fp64 oracle gets the op's inputs."""
    return (torch.randn(*shape, device=device, dtype=torch.float32) * scale).to(dtype)
