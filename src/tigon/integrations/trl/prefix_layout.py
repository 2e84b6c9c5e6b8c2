"""One row for sequences that share their beginnings: [prefix 1 | prefix 2 ... | branches of 1 | branches of 2 ...].

A group of sequences shares a prefix, which stands in the row once. The rest of each sequence is a branch. The last
token that all sequences of a group begin with starts every branch of it, so each token has one next token. Sequences
without a group stand before the prefixes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.ops.shared_prefix_attention import PrefixGroup, PrefixRow

# B sequences, T tokens of the padded batch, N tokens of the row.

Places = npt.NDArray[np.int64]
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The ids of a batch -> `_Kept`, its layout."""


@dataclass(frozen=True)
class PrefixLayout:
    """Where the tokens of a padded batch stand in the row."""

    row: PrefixRow
    source_N: Tensor
    """For each token of the row its place in the batch, b · T + t."""
    place_BT: Tensor
    """(B · T,): for each token of the batch its place in the row; 0 for padding."""
    positions_N: Tensor
    """The position of each token in its sequence."""

    @property
    def tokens(self) -> int:
        """The tokens of the row."""
        return self.row.tokens

    def take(self, values_BT: Tensor) -> Tensor:
        """(B, T) -> (1, N): the value of each token of the row, from the first sequence that has the token."""
        return values_BT.reshape(-1)[self.source_N][None]

    def largest(self, values_BT: Tensor, least: int) -> Tensor:
        """(B, T) -> (1, N): the largest value among the sequences that share a token. Padding has the value `least`."""
        row = values_BT.new_full((self.tokens,), least)
        return row.scatter_reduce(0, self.place_BT, values_BT.reshape(-1), "amax")[None]

    def padded(self, row_1N: Tensor, shape: torch.Size) -> Tensor:
        """(1, N) -> (B, T), with any values at padding."""
        return row_1N[0].index_select(0, self.place_BT).view(shape)


def layout_of(ids_BT: Tensor, mask_BT: Tensor | None) -> PrefixLayout | None:
    """The layout with the fewest tokens in groups of one level.

    None: no sequences share a beginning, a sequence has no tokens, or padding stands between tokens of one.
    The host waits for the device once, because the groups depend on the ids. The layout of a batch is kept as long as
    its ids, because the policy and its reference read the same tensors.
    """
    if ids_BT.is_inference() or (mask_BT is not None and mask_BT.is_inference()):  # these count no changes
        return _layout_of(ids_BT, mask_BT)
    if torch.is_inference_mode_enabled():  # no backward could use its tensors later
        return _layout_of(ids_BT, mask_BT)
    kept: _Kept | None = _kept.get(ids_BT)
    if kept is not None and kept.is_of(ids_BT, mask_BT):
        return kept.layout
    layout = _layout_of(ids_BT, mask_BT)
    mask = None if mask_BT is None else (weakref.ref(mask_BT), mask_BT._version)
    _kept[ids_BT] = _Kept(ids_BT._version, mask, layout)
    return layout


@dataclass(frozen=True)
class _Kept:
    """The layout of a batch, and the state of its tensors when it was made."""

    ids_version: int
    mask: tuple[weakref.ref[Tensor], int] | None
    layout: PrefixLayout | None

    def is_of(self, ids_BT: Tensor, mask_BT: Tensor | None) -> bool:
        """Whether the batch's tensors are those of the layout, unchanged."""
        if ids_BT._version != self.ids_version:
            return False
        if self.mask is None or mask_BT is None:
            return self.mask is None and mask_BT is None
        mask, version = self.mask
        return mask() is mask_BT and mask_BT._version == version


def _layout_of(ids_BT: Tensor, mask_BT: Tensor | None) -> PrefixLayout | None:
    """`layout_of` without what is kept.

    It computes in NumPy on one thread. PyTorch divides such small tensors among all cores that it sees, and on a
    machine that has been given only some of them the threads wait for each other for up to 0.2 s.
    """
    ids: Places = ids_BT.cpu().numpy()
    mask = np.ones(ids.shape, dtype=bool) if mask_BT is None else mask_BT.cpu().numpy() != 0
    lengths = mask.sum(1)
    first, places = mask.argmax(1), np.arange(ids.shape[1])
    whole = (places >= first[:, None]) & (places < (first + lengths)[:, None])
    if not lengths.all() or not np.array_equal(mask, whole):
        return None
    columns = np.minimum(first[:, None] + places[: lengths.max()], ids.shape[1] - 1)
    valid = places[: columns.shape[1]] < lengths[:, None]
    tokens = np.where(valid, np.take_along_axis(ids, columns, 1), -1)
    # Bytes in big-endian order compare as the tokens do, and a shorter sequence comes before those that go on.
    as_bytes = (tokens + 1).astype(">i8")
    order = sorted(range(len(ids)), key=[row.tobytes() for row in as_bytes].__getitem__)
    ordered = tokens[order]
    equal = (ordered[1:] == ordered[:-1]) & valid[order][1:]
    common = np.logical_and.accumulate(equal, 1).sum(1).tolist()
    members = [(order[i:j], shared) for i, j, shared in _best_groups(common)]
    members.sort(key=lambda each: each[1] > 0)
    if not any(shared for _, shared in members):
        return None
    return _layout(members, columns, lengths.tolist(), ids_BT)


def _best_groups(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, end, prefix) of each group of sorted sequences, so that prefixes save the most tokens.

    common: how many tokens each sequence shares with the next one.
    """
    best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]
    for end in range(1, len(common) + 2):
        choice, low = (best[end - 1][0], end - 1, 0), common[end - 2] if end > 1 else 0
        for start in range(end - 2, -1, -1):
            low = min(low, common[start])
            if low < 2:  # the last common token begins the branches
                break
            choice = max(choice, (best[start][0] + (end - start - 1) * (low - 1), start, low - 1))
        saved, start, prefix = choice
        best.append((saved, [*best[start][1], (start, end, prefix)]))
    return best[-1][1]


def _layout(
    members: Sequence[tuple[list[int], int]], columns: Places, sizes: list[int], ids_BT: Tensor
) -> PrefixLayout:
    """members: the sequences of each group and their prefix's tokens, those without a prefix first."""
    B, T = ids_BT.shape
    prefixes = [(rows, 0, prefix) for rows, prefix in members if prefix]
    whole = [(rows, 0, sizes[rows[0]]) for rows, prefix in members if not prefix]
    branches = [([row], prefix, sizes[row]) for rows, prefix in members if prefix for row in rows]
    place_BT, start = np.zeros((B, T), dtype=np.int64), 0
    sources, positions = [], []
    first_of = {row: rows[0] for rows, _ in members for row in rows}
    for rows, begin, end in (*whole, *prefixes, *branches):
        for row in rows:
            place_BT[row, columns[row, begin:end]] = np.arange(start, start + end - begin)
        chosen = columns[rows[0], begin:end]
        sources.append(rows[0] * T + chosen)
        positions.append(chosen - columns[rows[0], 0] + columns[first_of[rows[0]], 0])
        start += end - begin
    groups = tuple(PrefixGroup(prefix, tuple(sizes[row] - prefix for row in rows)) for rows, prefix in members)
    both = torch.from_numpy(np.concatenate([*sources, *positions, place_BT.reshape(-1)])).to(ids_BT.device)
    source_N, positions_N, places = both.split([start, start, B * T])
    return PrefixLayout(PrefixRow(groups), source_N, places, positions_N)
