"""What a decoding step knows of each row, in tensors at fixed addresses, so that a CUDA graph can read and write them.

A row writes one completion at a time. Rows of one group are neighbours, because attention reads their prompt once for
all of them. When rows have ended, they get completions that wait. If none wait, the others move up, and later steps
compute fewer rows. Keys and values stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tigon.ops.decode_attention import COLUMNS

MOST_ROWS = 256
"""Completions that are written at once. Others begin when a row is free."""
LEAST_GRAPH_STEPS = 16
"""Steps that have to remain for a capture, which takes as long as two steps without a graph."""
PROMPT_TOKENS, PROMPTS = 4096, 16
"""The most tokens, with padding, and prompts of one pass."""

DECODED_KINDS = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers, by transformers' names, that the generator decodes."""

# S rows, N completions, L most tokens of a completion.


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a completion ends."""

    new_tokens: int
    ends: tuple[int, ...] = ()
    """The tokens that end a completion."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The completions so far."""

    tokens_NL: Tensor
    """(N, L + 1); rows that have ended write into the last column."""
    logprobs_NL: Tensor
    counts_N: Tensor
    """Tokens of each completion."""

    @classmethod
    def empty(cls, n: int, limit: int, device: torch.device) -> Written:
        return cls(
            tokens_NL=torch.zeros(n, limit + 1, dtype=torch.long, device=device),
            logprobs_NL=torch.zeros(n, limit + 1, dtype=torch.float32, device=device),
            counts_N=torch.zeros(n, dtype=torch.long, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The state of the rows. All tensors have one entry per row."""

    tokens: Tensor
    """The latest token of each row."""
    positions: Tensor
    """Its position in the sequence."""
    slots: Tensor
    """Its slot in the pool."""
    bounds: Tensor
    """(S, 6) int32, as `decode_attention` takes them."""
    completions: Tensor
    """The number of the completion."""
    has_ended: Tensor

    @classmethod
    def idle(cls, own_begins: Sequence[int], device: torch.device) -> Rows:
        """Rows that have ended, each with a range for its own tokens that begins here in the pool."""
        S = len(own_begins)
        bounds = torch.zeros(S, COLUMNS, dtype=torch.int32)
        bounds[:, 2] = torch.tensor(own_begins)
        bounds[:, 3] = bounds[:, 2] + 1  # its own token, because attention to nothing is NaN
        numbers = torch.zeros(4, S, dtype=torch.long, device=device)
        tokens, positions, slots, completions = numbers.unbind()
        has_ended = torch.ones(S, dtype=torch.bool, device=device)
        return cls(
            tokens=tokens,
            positions=positions,
            slots=slots.copy_(bounds[:, 2]),
            bounds=bounds.to(device),
            completions=completions,
            has_ended=has_ended,
        )

    def begin(self, at: int, completions: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> Rows:
        """Let the rows from `at` on write these completions, which have no token yet. Returns these rows.

        prefixes: The range of each completion's prompt in the pool.
        """
        new = Rows(**{field.name: getattr(self, field.name)[at : at + len(completions)] for field in fields(self)})
        new.bounds[:, :2] = torch.tensor(prefixes, dtype=torch.int32, device=self.bounds.device)
        new.bounds[:, 3] = new.bounds[:, 2]
        new.positions.copy_(new.bounds[:, 1] - new.bounds[:, 0] - 1)
        new.slots.copy_(new.bounds[:, 2] - 1)
        new.completions.copy_(torch.tensor(completions))
        new.has_ended.zero_()
        return new

    def __len__(self) -> int:
        return len(self.tokens)

    def set_tiles(self, groups: Sequence[int], most_rows: int) -> None:
        """Write the tiles of neighbouring rows with one prefix. groups: each row's group."""
        tiles = tiles_of(groups, most_rows)
        tiles += [(0, 0)] * (len(groups) - len(tiles))
        self.bounds[:, 4:] = torch.tensor(tiles, dtype=torch.int32, device=self.bounds.device)

    def take(self, tokens: Tensor, logprobs: Tensor, written: Written, ends: Tensor) -> None:
        """Add the next token of each row to its completion, in place. Rows that have ended stay as they are."""
        goes_on, limit = ~self.has_ended, written.tokens_NL.shape[1] - 1
        column = torch.where(goes_on, written.counts_N[self.completions], limit)
        written.tokens_NL[self.completions, column] = tokens
        written.logprobs_NL[self.completions, column] = logprobs
        written.counts_N.index_add_(0, self.completions, goes_on.long())
        self.tokens.copy_(torch.where(goes_on, tokens, self.tokens))
        self.positions.add_(goes_on)
        self.slots.add_(goes_on)
        self.bounds[:, 3].add_(goes_on)
        ended = (tokens[:, None] == ends).any(1) | (column + 1 >= limit)
        self.has_ended.logical_or_(ended)

    def kept(self, rows: Sequence[int]) -> Rows:
        """Only these rows, moved to the front of the same memory."""
        for field in fields(self):
            state = getattr(self, field.name)
            state[: len(rows)] = state[rows]
        return Rows(**{field.name: getattr(self, field.name)[: len(rows)] for field in fields(self)})

    def bounds_in_window(self, window: int) -> Tensor:
        """The bounds of a layer in which a token sees only the latest `window` tokens."""
        bounds = self.bounds.clone()
        own = bounds[:, 3] - bounds[:, 2]
        bounds[:, 0] = torch.maximum(bounds[:, 0], bounds[:, 1] + own - window)
        bounds[:, 2] = torch.maximum(bounds[:, 2], bounds[:, 3] - window)
        return bounds


def tiles_of(groups: Sequence[int], most_rows: int) -> list[tuple[int, int]]:
    """(first row, count) of each run of at most `most_rows` neighbouring rows of one group."""
    tiles: list[tuple[int, int]] = []
    for row, group in enumerate(groups):
        if tiles and groups[row - 1] == group and tiles[-1][1] < most_rows:
            tiles[-1] = (tiles[-1][0], tiles[-1][1] + 1)
        else:
            tiles.append((row, 1))
    return tiles
