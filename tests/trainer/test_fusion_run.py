"""Runs with gradient accumulation fusion: the training of a run without it, and what a recipe may not combine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_helpers import SMALL, losses_of, small_trainer

from tigon.ops.accumulation_fusion import LeafGradient
from tigon.recipe.keys import Recipe, TrainConfig


def run(folder: Path, **train: Any) -> tuple[list[float], dict[str, Tensor]]:
    values = {"steps": 3, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "gradient_accumulation": 2}
    trainer = small_trainer(folder, Recipe(model=SMALL, train=TrainConfig(**{**values, **train})))
    return losses_of(trainer), {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_run_with_fusion_trains_as_a_run_without(
    checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[bool] = []
    plain = LeafGradient.to_add_to

    def watched(self: LeafGradient) -> Tensor | None:
        grad = plain(self)
        added.append(grad is not None)
        return grad

    monkeypatch.setattr(LeafGradient, "to_add_to", watched)
    losses, weights = run(tmp_path / "usual", checkpointing=checkpointing)
    assert not added
    fused_losses, fused_weights = run(
        tmp_path / "fused", checkpointing=checkpointing, gradient_accumulation_fusion=True
    )
    assert added.count(True) == added.count(False) > 0  # the second micro-batch of each step
    assert fused_losses == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(fused_weights[name], weight, rtol=1e-3, atol=1e-4)
