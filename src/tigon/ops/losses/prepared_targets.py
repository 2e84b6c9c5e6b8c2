"""Labels ahead of a token, and labels whose count is known before the loss needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops.dispatch import check_whole
from tigon.ops.losses.inputs import check_devices, may_wait, worth_gathering

# N tokens, B batch, T tokens of a row.


def check_shifts(shifts: Sequence[int] | Tensor) -> Sequence[int]:
    """Return the shifts of the heads as a sequence of Python integers; raise `OptionError` for anything else.

    A tensor is taken if reading it does not wait: 1-D integers on the CPU, outside torch.compile.
    """
    if isinstance(shifts, Tensor):
        integers = shifts.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        readable = shifts.device.type == "cpu" and not torch.compiler.is_compiling()
        if not integers or shifts.ndim != 1 or not readable:
            raise OptionError(
                f"shifts is a tensor {tuple(shifts.shape)} of {shifts.dtype} on {shifts.device}; "
                "pass a list of whole numbers."
            )
        return shifts.tolist()
    for shift in shifts:
        check_whole("shifts", shift)
    return [shift if isinstance(shift, (int, torch.SymInt)) else int(shift) for shift in shifts]


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
