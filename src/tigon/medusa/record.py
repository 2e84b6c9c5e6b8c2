"""Losses and accuracies of the heads, summed on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tigon.ops.multi_head_linear_cross_entropy import MultiHeadOutput

# K losses: the heads', and the model's own before them where it is trained too.


class HeadRecord:
    """Sums over tokens, in fp64, so that a mean over micro-batches is the mean over their tokens."""

    def __init__(self, names: list[str]) -> None:
        """names: of the K losses, e.g. ["model", "head1", "head2"]."""
        self.names = names
        self.reset()

    def reset(self) -> None:
        self._loss_sums: Tensor | None = None
        self._counts: Tensor | None = None
        self._hits: Tensor | None = None
        self._ranked: Tensor | None = None

    def add(self, found: MultiHeadOutput, num_items: Tensor | float | None) -> None:
        """One micro-batch: `losses` and `counts`, and `accuracy` if it was asked for. num_items: what the losses were
        divided by; None: each by its own count."""
        assert found.losses is not None and found.counts is not None
        finite = found.losses.detach().isfinite()  # a step that is not is left out of the run's loss too
        counts = torch.where(finite, found.counts.double(), 0.0)
        sums = torch.where(finite, found.losses.detach().double(), 0.0) * (
            counts if num_items is None else torch.as_tensor(num_items).to(counts)
        )
        self._loss_sums = _plus(self._loss_sums, sums)
        self._counts = _plus(self._counts, counts)
        if found.accuracy is not None:
            self._hits = _plus(self._hits, torch.nan_to_num(found.accuracy.double()) * counts.unsqueeze(1))
            self._ranked = _plus(self._ranked, counts)

    def join(self, other: HeadRecord) -> None:
        """Add what another record of the same losses holds."""
        for name in ("_loss_sums", "_counts", "_hits", "_ranked"):
            part = getattr(other, name)
            if part is not None:
                setattr(self, name, _plus(getattr(self, name), part))

    def blank(self) -> HeadRecord:
        """A record of the same losses that adds nothing to them: of a process without rows, where a sum takes all."""
        found = HeadRecord(self.names)
        for name in ("_loss_sums", "_counts", "_hits", "_ranked"):
            part = getattr(self, name)
            setattr(found, name, None if part is None else torch.zeros_like(part))
        return found

    def take(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """{"head1_loss": nats a token, "head1_top1": share, ... "head1_top5"}, and start anew. reduce: adds up what all
        processes have; each of them calls it, or none."""
        if self._loss_sums is None or self._counts is None:
            return {}
        columns = [self._loss_sums.unsqueeze(1), self._counts.unsqueeze(1)]
        if self._hits is not None and self._ranked is not None:
            columns += [self._hits, self._ranked.unsqueeze(1)]
        sums = reduce(torch.cat(columns, dim=1)).tolist()
        self.reset()
        found = {}
        for name, (loss, count, *ranks) in zip(self.names, sums, strict=True):
            if count:
                found[f"{name}_loss"] = loss / count
            if ranks and ranks[-1]:
                found |= {f"{name}_top{k}": hits / ranks[-1] for k, hits in enumerate(ranks[:-1], start=1)}
        return found


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
