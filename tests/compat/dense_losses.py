"""Inputs for Liger's losses, their log-probabilities by a dense formula, and a comparison in fp64 and fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T, H, V = 6, 10, 23


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


class Inputs(NamedTuple):
    """Hidden states (B, T, H), a head, and labels (B, T) of which some are ignored."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(t if t is None or not t.is_floating_point() else t.to(dtype) for t in self))


def inputs(sequences: int, *, bias: bool, seed: int = 0, ignore_index: int = -100) -> Inputs:
    # The values are exact in fp32, so that fp32 and fp64 see the same ones.
    hidden, weight, offset = draw(sequences, T, H, seed=seed), draw(V, H, seed=seed + 1, scale=0.6), draw(V, seed=9)
    generator = torch.Generator().manual_seed(seed + 2)
    labels = torch.randint(V, (sequences, T), generator=generator)
    labels = torch.where(labels == ignore_index, 1, labels)
    ignored = torch.rand(sequences, T, generator=generator) < 0.3
    ignored[:, 0] = False
    floats = [t.float().double() for t in (hidden, weight, offset)]
    return Inputs(floats[0], floats[1], floats[2] if bias else None, labels.masked_fill(ignored, ignore_index))


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.t()
    return logits if bias is None else logits + bias


def token_logps(data: Inputs, labels: Tensor, ignore_index: int = -100, temperature: float = 1.0) -> Tensor:
    """(B, T) log-probabilities of the labels, 0 where they are ignored."""
    counts = labels != ignore_index
    log_p = torch.log_softmax(logits_of(*data[:3]) / temperature, -1)
    return log_p.gather(-1, labels.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1) * counts


def flat(values: Any) -> list[Tensor]:
    """The tensors of a nested tuple or list."""
    return [values] if isinstance(values, Tensor) else [t for value in values for t in flat(value)]


def results(call: Callable[[Inputs], Any], data: Inputs, dtype: torch.dtype, upstream: float = 1.7) -> list[Tensor]:
    """What a loss returns, its loss first, then the gradients of hidden states, weight and bias; all as fp64."""
    leaves = data.to(dtype)
    trained = [leaf.clone().requires_grad_() for leaf in leaves[:3] if leaf is not None]
    found = flat(call(Inputs(*trained, *([None] * (3 - len(trained))), data.labels)))  # type: ignore[call-arg]
    (found[0] * upstream).backward()
    gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in trained]
    return [value.detach().double() for value in (*found, *gradients)]


def compare(ours: Callable[[Inputs], Any], formula: Callable[[Inputs], Any], data: Inputs) -> None:
    """Raise unless the loss is the formula in fp64, and near it in fp32."""
    truth = results(formula, data, torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 3e-4)):
        found = results(ours, data, dtype)
        assert len(found) == len(truth)
        for place, (value, wanted) in enumerate(zip(found, truth, strict=True)):
            assert value.shape == wanted.shape, place
            torch.testing.assert_close(
                value, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, place=place: f"{place}: {text}"
            )


class _Watch(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation makes. Views of its arguments do not count."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, made.numel())
        return out


def largest_temporary(call: Callable[[], Any]) -> int:
    """The most elements of one tensor that `call` makes, its backward included."""
    with _Watch() as watch:
        call()
    return watch.largest
