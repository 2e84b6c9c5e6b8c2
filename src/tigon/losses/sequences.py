"""Sums and means per sequence of values per token (B, T). The value of a masked token never enters, NaN included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.losses._checks import as_float, check_number


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch that count: `mask` (..., T) bool, whose last dimension is that of one sequence."""

    mask: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None) -> Tokens:
        """The mask of x, checked: bool or numbers, where False or 0 leaves a token out. None: every token counts."""
        if mask is None:
            mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
        if mask.shape != x.shape:
            raise ShapeError(f"mask is {tuple(mask.shape)}; it must have the tokens' shape {tuple(x.shape)}.")
        if not x.ndim:
            raise ShapeError("A batch has at least one dimension, that of the tokens.")
        return cls(mask != 0)

    def masked(self, x: Tensor) -> Tensor:
        """x with 0 in place of the tokens that do not count."""
        return x.masked_fill(~self.mask, 0)

    def means(self, x: Tensor) -> Tensor:
        """(..., T) -> (...,): the mean of each sequence; 0 for a sequence without tokens."""
        return self.masked(x).sum(-1) / self.mask.sum(-1).to(x.dtype).clamp(min=1)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all tokens that count; 0 if there are none."""
        return self.masked(x).sum() / self.mask.sum().to(x.dtype).clamp(min=1)

    def sequences(self) -> int:
        """The number of sequences, those without tokens included."""
        return self.mask.shape[:-1].numel()

    def spread(self, per_sequence: Tensor) -> Tensor:
        """(...,) -> (..., T)."""
        return per_sequence.unsqueeze(-1).expand(self.mask.shape)

    def per_token(self, name: str, x: Tensor) -> Tensor:
        """Values per sequence, (...,) or (..., 1), or per token -> values per token."""
        shape = self.mask.shape
        if x.shape == shape[:-1]:
            return self.spread(x)
        if x.shape not in (shape, (*shape[:-1], 1)):
            sequences = tuple(shape[:-1])
            raise ShapeError(
                f"{name} is {tuple(x.shape)}; it must be {sequences}, one value per sequence, or {tuple(shape)}."
            )
        return x.expand(shape)

    def items_of_step(self, num_items: Tensor | float | None, dtype: torch.dtype) -> Tensor | float:
        """The denominator of a sum over tokens, at least 1: num_items, or this batch's tokens if it is None."""
        if num_items is None:
            return self.mask.sum().to(dtype).clamp(min=1)
        if not isinstance(num_items, Tensor):
            return max(check_number("num_items", num_items, at_least=0), 1.0)
        if num_items.numel() != 1:
            raise ShapeError(f"num_items is {tuple(num_items.shape)}; it must be one number.")
        return num_items.detach().reshape(()).to(dtype).clamp(min=1)


def sequence_sum(per_token: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of each sequence's values, such as its log-probability from those of its tokens.

    Args:
        per_token: (B, T); fp16 and bf16 are summed in fp32.
        mask: (B, T), bool or numbers: False or 0 leaves a token out. None: every token counts.

    Returns:
        (B,); 0 for a sequence without tokens.

    Raises:
        ShapeError: the shapes differ, or are ().
        DtypeError: per_token is not a floating-point tensor.
    """
    x = as_float("per_token", per_token)
    return Tokens.of(x, mask).masked(x).sum(-1)


def sequence_mean(per_token: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of each sequence's values over its tokens that count.

    Args:
        per_token: (B, T); fp16 and bf16 are summed in fp32.
        mask: (B, T), bool or numbers: False or 0 leaves a token out. None: every token counts.

    Returns:
        (B,); 0 for a sequence without tokens.

    Raises:
        ShapeError: the shapes differ, or are ().
        DtypeError: per_token is not a floating-point tensor.
    """
    x = as_float("per_token", per_token)
    return Tokens.of(x, mask).means(x)


def sequence_lengths(mask: Tensor) -> Tensor:
    """Number of tokens that count, per sequence.

    Args:
        mask: (B, T), bool or numbers: False or 0 leaves a token out.

    Returns:
        (B,) int64.

    Raises:
        ShapeError: the shape is ().
    """
    return Tokens.of(mask, mask).mask.sum(-1)
