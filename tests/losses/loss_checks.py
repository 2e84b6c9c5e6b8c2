"""Compares a loss and its gradients with an independent formula, in fp64 and in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]


def results(
    loss: Callable[..., Tensor], inputs: Inputs, dtype: torch.dtype, weight: Tensor | None
) -> dict[str, Tensor]:
    """The loss and the gradient of its weighted sum for each input, as fp64."""
    leaves = {name: x.to(dtype).clone().requires_grad_() for name, x in inputs.items()}
    value = loss(**leaves)
    (value if weight is None else value * weight.to(dtype)).sum().backward()
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {"loss": value.detach().double(), **{name: grad.double() for name, grad in grads.items()}}


def worst(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).abs().max()) if truth.numel() else 0.0


def check(loss: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: Inputs, seed: int = 0) -> None:
    """Raise unless the loss is the formula in fp64, and in fp32 at most twice as far from it as the formula itself.

    Args:
        loss, formula: take the inputs by name and return losses of one shape. The formula is written another way.
        inputs: fp64 values to differentiate by.
        seed: of the upstream gradient.
    """
    with torch.no_grad():
        shape = loss(**inputs).shape
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    exact = {name: x.float().double() for name, x in inputs.items()}  # fp32 sees the same values
    truth = results(formula, exact, torch.float64, weight)
    ours = results(loss, exact, torch.float64, weight)
    for name, value in truth.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    plain = results(formula, exact, torch.float32, weight)
    fp32 = results(loss, exact, torch.float32, weight)
    for name, value in truth.items():
        # A formula that happens to be exact leaves no room: 4 units in the last place of the largest value are allowed.
        largest = float(value.abs().max()) if value.numel() else 0.0
        rounding = 4 * torch.finfo(torch.float32).eps * max(largest, 1.0)
        assert worst(fp32[name], value) <= max(2 * worst(plain[name], value), rounding), name


def check_finite(loss: Callable[..., Tensor], inputs: Inputs, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Raise if the loss or a gradient is NaN or infinite; return them."""
    found = results(loss, inputs, dtype, None)
    for name, value in found.items():
        assert value.isfinite().all(), f"{name} is not finite: {value}"
    return found


def draw(*shape: int, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> Tensor:
    """fp64 values of a normal distribution."""
    return shift + scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def each(function: Callable[..., Tensor], *vectors: Any) -> Tensor:
    """One value per pair, by a loop."""
    return torch.stack([function(*values) for values in zip(*vectors, strict=True)])


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))
