"""Labels: their checks, shifts and places, and labels whose count is known before the loss needs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, LabelError, OptionError, ShapeError
from tigon.ops import dispatch
from tigon.ops.losses.options import check_devices, check_shifts

# N tokens, B batch, T tokens of a row.


def check_target(target: Tensor, rows: torch.Size, of: str) -> None:
    """Raise unless `target` holds class indices, one for each row of `of`."""
    if target.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"target is {target.dtype}; the limit is int64 and int32 class indices. Cast it.")
    if target.shape != rows:
        raise ShapeError(f"target is {tuple(target.shape)}, {of} has rows {tuple(rows)}; they must agree.")


def check_labels(logits_width: int, target: Tensor, ignore_index: int) -> None:
    """Raise `LabelError` for a label outside [0, V); reads the target, so on a GPU it waits for the device."""
    bad = ((target < 0) | (target >= logits_width)) & (target != ignore_index)
    if bool(bad.any()):
        position = int(bad.reshape(-1).nonzero()[0])
        raise LabelError(
            f"label {int(target.reshape(-1)[position])} at position {position} is outside [0, {logits_width}), out of "
            f"bounds, and is not ignore_index ({ignore_index}). Does the tokenizer belong to this model?"
        )


def wants_label_check(logits: Tensor) -> bool:
    """Whether to check labels: always on the CPU, as in PyTorch; else only with TIGON_CHECK=1, as the check waits."""
    return os.environ.get("TIGON_CHECK") == "1" or not (dispatch.uses_kernel(logits) or logits.is_cuda)


def labels_ahead(target_BT: Tensor, positions_BT: Tensor | None, rows: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Labels `shift` positions after the flat positions `rows`.

    The label is ignore_index past the end of the sequence and, with positions, in another document. Positions increase
    by one inside a document and restart in the next.
    """
    if shift == 0:
        return target_BT.reshape(-1)[rows]
    T = target_BT.shape[1]
    inside = rows % T + shift < T
    ahead = torch.where(inside, rows + shift, rows)
    if positions_BT is not None:
        positions_N = positions_BT.reshape(-1)
        inside &= positions_N[ahead] == positions_N[rows] + shift
    return torch.where(inside, target_BT.reshape(-1)[ahead], ignore_index)


def scored(
    target_BT: Tensor, positions_BT: Tensor | None, shifts: Sequence[int], ignore_index: int
) -> tuple[Tensor, Tensor]:
    """((K,) int64, the number of tokens each head is scored on; (N,) bool, the tokens that any head is scored on)"""
    rows = torch.arange(target_BT.numel(), device=target_BT.device)
    any_N = torch.zeros(target_BT.numel(), dtype=torch.bool, device=target_BT.device)
    counts = []
    for shift in shifts:
        valid = labels_ahead(target_BT, positions_BT, rows, shift, ignore_index) != ignore_index
        counts.append(valid.sum())
        any_N |= valid
    return torch.stack(counts), any_N


# --- the tokens that count ---

_LEFT_OUT = 1 / 64


def worth_gathering(index_N: Tensor, rows: int) -> Tensor | None:
    """`index_N`, or None if it lacks so few rows that computing all rows is cheaper than gathering the others.

    Gathering copies N·H elements, and scattering the gradients copies as many again. In every text the last label is
    ignored, which is about one row in a thousand.
    """
    return index_N if rows - index_N.shape[0] > _LEFT_OUT * rows else None


def may_wait(target: Tensor) -> bool:
    """Whether the host may read `target`: not while compiling, tracing fakes or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or type(target) is not Tensor or target.is_meta or not target.numel():
        return False
    return not (target.is_cuda and torch.cuda.is_current_stream_capturing())


def planned_tokens(trace: dispatch.Planned, tokens: int) -> Tensor:
    """Stands for the flat positions of the tokens that count in a traced micro-batch."""
    return torch.empty(tokens - trace.ignored, dtype=torch.int64)


def tokens_that_count(labels: Tensor, counts: Callable[[], Tensor], *, wait_pays: bool = True) -> Tensor | None:
    """Flat positions of the tokens that count, or None to compute all.

    All are computed if few are left out, if the host cannot wait for their number, or if the wait does not pay.

    Args:
        labels: decide whether the host may wait.
        counts: makes a bool per token, (N,).
        wait_pays: whether the products of all tokens take longer than a wait of a GPU.
    """
    if (trace := dispatch.planned()) is not None:
        few = not (trace.ignored and wait_pays)
        return None if few else worth_gathering(planned_tokens(trace, labels.shape[0]), labels.shape[0])
    if not may_wait(labels) or (labels.is_cuda and not wait_pays):
        return None
    counts_N = counts()
    return worth_gathering(counts_N.nonzero().squeeze(1), counts_N.numel())


class Places(NamedTuple):
    """The tokens that count, among all tokens of a call."""

    index_N: Tensor | None
    """Their flat positions; None for all."""
    tokens: int
    """All tokens."""

    def take(self, values: Tensor | None) -> Tensor | None:
        """The values of the tokens that count, of values of all tokens."""
        return values if values is None or self.index_N is None else values.index_select(0, self.index_N)

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """The values of all tokens, of those of the tokens that count; `fill` for the others."""
        if self.index_N is None:
            return values
        return values.new_full((self.tokens, *values.shape[1:]), fill).index_copy_(0, self.index_N, values)


# --- labels counted ahead ---


@dataclass(frozen=True)
class PreparedTargets:
    """Labels, and the count of those that are not ignored, which may still be running; made by `prepare_targets`."""

    target: Tensor
    """The labels, any shape."""
    ignore_index: int = -100
    shifts: tuple[int, ...] = (0,)
    positions: Tensor | None = None
    index_N: Tensor | None = None
    """Flat positions, those that are not ignored first; None if counting is not possible, so that all rows are kept."""
    count: Tensor | None = None
    """0-dim int64 on the host, valid once `event` has passed."""
    event: torch.cuda.Event | None = None

    def rows(self) -> Tensor | None:
        """Flat positions of the rows that are not ignored, or None to use all rows because few are ignored."""
        if self.index_N is None or self.count is None:
            return None
        if self.event is not None:
            self.event.synchronize()
        count = int(self.count)
        return worth_gathering(self.index_N[:count], self.target.numel())


def prepare_targets(
    target: Tensor, *, ignore_index: int = -100, shifts: Sequence[int] = (0,), positions: Tensor | None = None
) -> PreparedTargets:
    """Start counting the labels that are not ignored, so that `linear_cross_entropy` does not wait for the count.

    Call it before the model's forward and pass the result as the loss's target. The copy to the host then finishes
    before the loss needs it.

    Args:
        target: (...), int64 or int32.
        ignore_index: as in the loss.
        shifts, positions: as in `multi_head_linear_cross_entropy`, for a target (B, T). The count is then that of the
            rows that at least one head is scored on.

    Returns:
        `PreparedTargets`, for this target only.

    Raises:
        ShapeError: target is not (B, T) although shifts are given; or positions differ from target in shape or device.
        OptionError: shifts is empty, or a shift is negative.
    """
    shifts = check_shifts(shifts)
    _check_prepared(target, shifts, positions)
    prepared = PreparedTargets(target, ignore_index, tuple(shifts), positions)
    if not may_wait(target):
        return prepared
    if prepared.shifts == (0,):
        counts_N = (target != ignore_index).reshape(-1)
    else:
        counts_N = scored(target, positions, shifts, ignore_index)[1]
    index_N = torch.argsort((~counts_N).to(torch.uint8), stable=True)
    count = counts_N.sum()
    if not target.is_cuda:
        return replace(prepared, index_N=index_N, count=count)
    on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
    on_host.copy_(count, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(target.device))
    return replace(prepared, index_N=index_N, count=on_host, event=event)


def _check_prepared(target: Tensor, shifts: Sequence[int], positions: Tensor | None) -> None:
    if not shifts or min(shifts) < 0:
        raise OptionError(f"shifts={list(shifts)}; at least one, and none negative.")
    if tuple(shifts) != (0,) and target.ndim != 2:
        raise ShapeError(f"target is {tuple(target.shape)}; to be shifted it must be (B, T).")
    if positions is not None and positions.shape != target.shape:
        raise ShapeError(f"positions is {tuple(positions.shape)}, target is {tuple(target.shape)}; they must agree.")
    check_devices(target=target, positions=positions)
