"""What several tests of techniques share."""

from __future__ import annotations

import pytest
from torch import Tensor

from tigon.ops.accumulation_fusion import LeafGradient


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights whose gradient was added in place."""
    shapes: list[tuple[int, ...]] = []
    plain = LeafGradient.to_add_to

    def watched(self: LeafGradient) -> Tensor | None:
        grad = plain(self)
        if grad is not None:
            shapes.append(tuple(self.weight.shape))
        return grad

    monkeypatch.setattr(LeafGradient, "to_add_to", watched)
    return shapes
