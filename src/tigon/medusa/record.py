"""Losses and accuracies of the heads, summed on the device until they are logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tigon.ops.head.multi_head import MultiHeadOutput

# K losses: those of the heads, preceded by the model's own if the model is trained too.


class HeadMetrics:
    """Sums over tokens, in fp64, so that a mean over micro-batches is the mean over their tokens."""

    def __init__(self, names: list[str]) -> None:
        """names: the names of the K losses, e.g. ["model", "head1", "head2"]."""
        self.names = names
        self.reset()

    def reset(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def _add(self, name: str, part: Tensor) -> None:
        self._sums[name] = self._sums[name] + part if name in self._sums else part

    def add(self, output: MultiHeadOutput, num_items: Tensor | float | None) -> None:
        """Add one micro-batch: `losses` and `counts`, and `accuracy` if it was computed.

        num_items: the denominator of the losses; None if each was divided by its own count.
        """
        assert output.losses is not None and output.counts is not None
        finite = output.losses.detach().isfinite()  # the run's loss leaves out non-finite steps too
        counts_K = torch.where(finite, output.counts.double(), 0.0)
        weights_K = counts_K if num_items is None else torch.as_tensor(num_items).to(counts_K)
        self._add("losses", torch.where(finite, output.losses.detach().double(), 0.0) * weights_K)
        self._add("counts", counts_K)
        if output.accuracy is not None:
            self._add("hits", torch.nan_to_num(output.accuracy.double()) * counts_K.unsqueeze(1))
            self._add("ranked", counts_K)

    def join(self, other: HeadMetrics) -> None:
        """Add the sums of another record of the same losses."""
        for name, part in other._sums.items():
            self._add(name, part)

    def blank(self) -> HeadMetrics:
        """A record of the same losses with sums of 0, for a process without sequences in an all-reduce."""
        blank = HeadMetrics(self.names)
        blank._sums = {name: torch.zeros_like(part) for name, part in self._sums.items()}
        return blank

    def state(self) -> dict[str, list[Any]]:
        """The sums of this process since the last `take`, for a checkpoint."""
        return {name: part.tolist() for name, part in self._sums.items()}

    def resume(self, state: Mapping[str, list[Any]], device: torch.device) -> None:
        """Restore the sums that `state` returned."""
        self._sums = {name: torch.tensor(part, dtype=torch.float64, device=device) for name, part in state.items()}

    def take(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """Return {"head1_loss": nats per token, "head1_top1": share, ... "head1_top5"} and reset the sums.

        reduce: sums a tensor over all processes. Either all processes call this method, or none.
        """
        if not self._sums:
            return {}
        columns = [self._sums[name] for name in ("losses", "counts", "hits", "ranked") if name in self._sums]
        sums = reduce(torch.cat([part.reshape(len(self.names), -1) for part in columns], dim=1)).tolist()
        self.reset()
        values = {}
        for name, (loss, count, *ranks) in zip(self.names, sums, strict=True):
            if count:
                values[f"{name}_loss"] = loss / count
            if ranks and ranks[-1]:
                values |= {f"{name}_top{k}": hits / ranks[-1] for k, hits in enumerate(ranks[:-1], start=1)}
        return values
