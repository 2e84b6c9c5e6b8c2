"""Sums and means per sequence of values per token, for padded and for packed batches.

A padded batch is (..., T): the last dimension holds the tokens of one sequence. A packed batch is (N,): the tokens of
all sequences stand one after another, and `segment_ids` (N,) or `cu_seqlens` (S + 1,) says which token belongs to
which sequence. Masked tokens never enter a result, whatever their value is, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.losses._checks import as_float, check_number

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

# B sequences of a padded batch, T tokens per sequence, N tokens of a packed batch, S its sequences.


@dataclass(frozen=True)
class SequenceLayout:
    """Which tokens count, and to which sequence each belongs.

    Attributes:
        mask: bool, of the tokens' shape: True where a token counts.
        sequence_index: (N,) int64, the sequence of each token of a packed batch; None for a padded batch.
        num_sequences: S of a packed batch; None for a padded batch.
    """

    mask: Tensor
    sequence_index: Tensor | None = None
    num_sequences: int | None = None

    def masked(self, x: Tensor) -> Tensor:
        """x with 0 in place of the tokens that do not count."""
        return x.masked_fill(~self.mask, 0)

    def sums(self, x: Tensor) -> Tensor:
        """(..., T) -> (...,), or (N,) -> (S,)."""
        x = self.masked(x)
        if self.sequence_index is None or self.num_sequences is None:
            return x.sum(-1)
        return x.new_zeros(self.num_sequences).index_add(0, self.sequence_index, x)

    def lengths(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """The number of tokens that count, per sequence."""
        ones = torch.ones(self.mask.shape, dtype=dtype, device=self.mask.device)
        return self.sums(ones)

    def means(self, x: Tensor) -> Tensor:
        """As `sums`, divided by the number of tokens; 0 for a sequence without tokens."""
        return self.sums(x) / self.lengths(x.dtype).clamp(min=1)

    def num_tokens(self, dtype: torch.dtype) -> Tensor:
        """The number of tokens that count, as a scalar tensor."""
        return self.mask.sum().to(dtype)

    def items_of_step(self, num_items: Tensor | float | None, dtype: torch.dtype) -> Tensor | float:
        """The denominator of a sum over tokens, at least 1: num_items, or this batch's tokens if it is None."""
        if num_items is None:
            return self.num_tokens(dtype).clamp(min=1)
        if not isinstance(num_items, Tensor):
            return max(check_number("num_items", num_items, at_least=0), 1.0)
        if num_items.numel() != 1:
            raise ShapeError(f"num_items is {tuple(num_items.shape)}; it must be one number.")
        return num_items.detach().reshape(()).to(dtype).clamp(min=1)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all tokens that count; 0 if there are none."""
        return self.masked(x).sum() / self.num_tokens(x.dtype).clamp(min=1)

    def count(self) -> int:
        """The number of sequences, those without tokens included."""
        if self.num_sequences is not None:
            return self.num_sequences
        return self.mask.shape[:-1].numel()

    def spread(self, per_sequence: Tensor) -> Tensor:
        """One value per sequence -> one value per token."""
        if self.sequence_index is None:
            return per_sequence.unsqueeze(-1).expand(self.mask.shape)
        return per_sequence[self.sequence_index]

    def per_token(self, name: str, x: Tensor) -> Tensor:
        """Values per sequence, (...,), (..., 1) or (S,), or per token -> values per token."""
        shape = self.mask.shape
        if self.sequence_index is not None:
            if x.shape == (self.num_sequences,):
                return self.spread(x)
        elif x.shape == shape[:-1]:
            return self.spread(x)
        elif x.shape == (*shape[:-1], 1):
            return x.expand(shape)
        if x.shape != shape:
            sequences = (self.num_sequences,) if self.sequence_index is not None else tuple(shape[:-1])
            raise ShapeError(
                f"{name} is {tuple(x.shape)}; it must be {sequences}, one value per sequence, or {tuple(shape)}."
            )
        return x


def layout_of(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> SequenceLayout:
    """The layout of a batch of values per token.

    Args:
        x: (..., T) padded, or (N,) packed.
        mask: of x's shape, bool or numbers: False or 0 leaves a token out. None: every token counts.
        segment_ids: (N,) integers from 0 to S - 1: the sequence of each token. A negative id leaves the token out.
            S is read from the ids, for which the host waits on a GPU; with cu_seqlens it does not.
        cu_seqlens: (S + 1,) integers that do not fall: sequence s has the tokens cu_seqlens[s] to cu_seqlens[s + 1].
            Tokens before the first and from the last entry on are left out.

    Returns:
        The layout, for `sums`, `means`, `lengths` and `spread`.

    Raises:
        OptionError: both segment_ids and cu_seqlens are given.
        ShapeError: the shapes do not match.
    """
    if mask is None:
        mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if mask.shape != x.shape:
        raise ShapeError(f"mask is {tuple(mask.shape)}; it must have the tokens' shape {tuple(x.shape)}.")
    mask = mask != 0
    if segment_ids is None and cu_seqlens is None:
        if not x.ndim:
            raise ShapeError("A padded batch has at least one dimension, that of the tokens.")
        return SequenceLayout(mask)
    if segment_ids is not None and cu_seqlens is not None:
        raise OptionError("segment_ids and cu_seqlens both name the sequences; pass one of them.")
    if x.ndim != 1:
        raise ShapeError(f"A packed batch is (N,), but the tokens are {tuple(x.shape)}.")
    if segment_ids is not None:
        if segment_ids.shape != x.shape or segment_ids.dtype not in _INTEGERS:
            raise ShapeError(
                f"segment_ids is {tuple(segment_ids.shape)} of {segment_ids.dtype}; "
                f"it must be {tuple(x.shape)} integers."
            )
        num_sequences = int(segment_ids.max()) + 1 if segment_ids.numel() else 0
        segments = segment_ids.long()
        inside = segments >= 0
    else:
        assert cu_seqlens is not None
        if cu_seqlens.ndim != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in _INTEGERS:
            raise ShapeError(
                f"cu_seqlens is {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}; it must be (S + 1,) integers."
            )
        num_sequences = len(cu_seqlens) - 1
        place = torch.arange(len(x), device=x.device)
        segments = torch.searchsorted(cu_seqlens.to(x.device, torch.int64), place, right=True) - 1
        inside = (segments >= 0) & (segments < num_sequences)
    if not num_sequences:  # every token is left out, and needs a sequence to point to
        num_sequences, segments = 0, segments.new_zeros(segments.shape)
        if len(x):
            raise ShapeError("The packed batch has tokens, but no sequence.")
    return SequenceLayout(mask & inside, segments.masked_fill(~inside, 0), num_sequences)


def sequence_sum(
    per_token: Tensor,
    mask: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Sum of each sequence's values, such as its log-probability from those of its tokens.

    Args:
        per_token: (B, T) padded, or (N,) packed; fp16 and bf16 are summed in fp32.
        mask, segment_ids, cu_seqlens: as in `layout_of`.

    Returns:
        (B,) or (S,); 0 for a sequence without tokens.

    Raises:
        OptionError, ShapeError: as in `layout_of`.
        DtypeError: per_token is not a floating-point tensor.
    """
    x = as_float("per_token", per_token)
    layout = layout_of(x, mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens)
    return layout.sums(x)


def sequence_mean(
    per_token: Tensor,
    mask: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Mean of each sequence's values over its tokens that count.

    Args:
        per_token: (B, T) padded, or (N,) packed; fp16 and bf16 are summed in fp32.
        mask, segment_ids, cu_seqlens: as in `layout_of`.

    Returns:
        (B,) or (S,); 0 for a sequence without tokens.

    Raises:
        OptionError, ShapeError: as in `layout_of`.
        DtypeError: per_token is not a floating-point tensor.
    """
    x = as_float("per_token", per_token)
    layout = layout_of(x, mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens)
    return layout.means(x)


def sequence_lengths(
    mask: Tensor,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Number of tokens that count, per sequence.

    Args:
        mask: (B, T) padded, or (N,) packed.
        segment_ids, cu_seqlens: as in `layout_of`.

    Returns:
        (B,) or (S,) int64.

    Raises:
        OptionError, ShapeError: as in `layout_of`.
    """
    return layout_of(mask, mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens).lengths()
