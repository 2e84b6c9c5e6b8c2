"""Losses and accuracies of the heads, summed on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tigon.ops.losses.multi_head import MultiHeadOutput

# K losses: the heads', and the model's own before them where it is trained too.


class HeadRecord:
    """Sums over tokens, in fp64, so that a mean over micro-batches is the mean over their tokens."""

    def __init__(self, names: list[str]) -> None:
        """names: of the K losses, e.g. ["model", "head1", "head2"]."""
        self.names = names
        self.reset()

    def reset(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def _add(self, name: str, part: Tensor) -> None:
        self._sums[name] = self._sums[name] + part if name in self._sums else part

    def add(self, found: MultiHeadOutput, num_items: Tensor | float | None) -> None:
        """One micro-batch: `losses` and `counts`, and `accuracy` if it was asked for. num_items: what the losses were
        divided by; None: each by its own count."""
        assert found.losses is not None and found.counts is not None
        finite = found.losses.detach().isfinite()  # a step that is not is left out of the run's loss too
        counts_K = torch.where(finite, found.counts.double(), 0.0)
        weights_K = counts_K if num_items is None else torch.as_tensor(num_items).to(counts_K)
        self._add("losses", torch.where(finite, found.losses.detach().double(), 0.0) * weights_K)
        self._add("counts", counts_K)
        if found.accuracy is not None:
            self._add("hits", torch.nan_to_num(found.accuracy.double()) * counts_K.unsqueeze(1))
            self._add("ranked", counts_K)

    def join(self, other: HeadRecord) -> None:
        """Add what another record of the same losses holds."""
        for name, part in other._sums.items():
            self._add(name, part)

    def blank(self) -> HeadRecord:
        """A record of the same losses that adds nothing to them: of a process without rows, where a sum takes all."""
        found = HeadRecord(self.names)
        found._sums = {name: torch.zeros_like(part) for name, part in self._sums.items()}
        return found

    def state(self) -> dict[str, list[Any]]:
        """For a checkpoint: what has been summed since the last `take`, in this process."""
        return {name: part.tolist() for name, part in self._sums.items()}

    def resume(self, state: Mapping[str, list[Any]], device: torch.device) -> None:
        """Go on from what `state` returned."""
        self._sums = {name: torch.tensor(part, dtype=torch.float64, device=device) for name, part in state.items()}

    def take(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """{"head1_loss": nats a token, "head1_top1": share, ... "head1_top5"}, and start anew. reduce: adds up what all
        processes have; each of them calls it, or none."""
        if not self._sums:
            return {}
        columns = [self._sums[name] for name in ("losses", "counts", "hits", "ranked") if name in self._sums]
        sums = reduce(torch.cat([part.reshape(len(self.names), -1) for part in columns], dim=1)).tolist()
        self.reset()
        found = {}
        for name, (loss, count, *ranks) in zip(self.names, sums, strict=True):
            if count:
                found[f"{name}_loss"] = loss / count
            if ranks and ranks[-1]:
                found |= {f"{name}_top{k}": hits / ranks[-1] for k, hits in enumerate(ranks[:-1], start=1)}
        return found
