"""The record that describes an op: what it computes, what it costs, how far it may err, and on which inputs.

Tests, benchmarks, the planner and the tables in the docs iterate over these records, so a new op is `kernels/x.py`,
`ops/x.py` and one line in `ops/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one forward and backward needs at the least, for the planner and for GB/s in the benchmark."""

    moved_bytes: int
    """Bytes read and written by forward and backward when each tensor crosses DRAM once per direction."""
    saved_bytes: int
    """Bytes kept from forward to backward beyond inputs that live anyway; inputs saved for backward are counted."""
    flops: int = 0
    """Floating-point operations of the matrix products; 0 for memory-bound ops."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of shapes and options. `Op.make` turns it into tensors."""

    id: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    small: bool = True
    """Small enough for Triton's interpreter (a few hundred programs); the others run on the reference and on GPUs."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One fused op.

    `oracle` is the unfused PyTorch formula, differentiated by autograd. In fp64 it is the truth; in the dtype of the
    inputs it is the baseline: an op may err against the truth by at most `error_factor` times as much as the baseline.
    """

    name: str
    call: Callable[..., Any]
    oracle: Callable[..., Any]
    make: Callable[[Case, torch.dtype, torch.device], dict[str, Any]]
    """Fresh random inputs by parameter name; tensors named in `grads` are differentiated."""
    grads: tuple[str, ...]
    cases: tuple[Case, ...]
    cost: Callable[..., Cost]
    """Takes what `call` takes."""
    error_factor: float = 2.0
    errors: Mapping[str, float] = field(default_factory=dict)
    """Largest relative Frobenius error against fp64 over all cases, outputs and gradients, by dtype, on an H200."""


def randn(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    """Normal values from the global generator, rounded to `dtype` (so that fp64 references see what the op sees)."""
    return (torch.randn(*shape, device=device, dtype=torch.float32) * scale).to(dtype)
