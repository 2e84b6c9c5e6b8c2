"""Schedule-free AdamW: what is trained, and that the mean of its steps is what a run evaluates and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import SMALL, losses_of, small_trainer, train_keys
from transformers import TrainerCallback

from tigon.recipe.keys import Recipe, TrainConfig
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.trainer.guards.nan_guard import innermost

pytest.importorskip("schedulefree")
CHOSEN = train_keys(OPTIMIZERS["schedule-free"])


def trainer_of(folder: Path, **train: Any) -> Any:
    values = {"steps": 6, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, **CHOSEN, **train}
    return small_trainer(folder, Recipe(model=SMALL, train=TrainConfig(**values)), evaluate=True)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


class MeanOfSteps(TrainerCallback):
    """The mean of the points that the steps have reached, in fp64, and the weights when the run evaluates."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.mean, self.trained = trainer, torch.zeros(()), torch.zeros(())
        self.evaluated: list[tuple[torch.Tensor, torch.Tensor]] = []
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        states = innermost(self.trainer.optimizer).state
        point = flat(states[parameter]["z"] for parameter in self.trainer.model.parameters())
        self.mean = self.mean + (point - self.mean) / state.global_step
        self.trained = flat(self.trainer.model.parameters())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append((flat(self.trainer.model.parameters()), self.mean))
        assert not torch.allclose(self.trained, self.mean, rtol=0, atol=1e-4)


def close(weights: torch.Tensor, mean: torch.Tensor) -> None:
    torch.testing.assert_close(weights, mean, rtol=0, atol=2e-6)


def test_evaluated_and_saved_weights_are_the_mean_of_the_steps(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = trainer_of(tmp_path, eval_steps=2, save_steps=3)
    watch = MeanOfSteps(trainer)
    trainer.train()
    assert len(watch.evaluated) == 3
    for weights, mean in watch.evaluated:
        close(weights, mean)
    close(flat(trainer.model.parameters()), watch.mean)
    saved = load_file(tmp_path / "checkpoints" / "checkpoint-6" / "model.safetensors")
    named = dict(trainer.model.named_parameters())
    close(flat(saved[name] for name in named), watch.mean)
    logged = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    assert trainer.evaluate()["eval_loss"] == logged[-1]


def test_evaluations_leave_training_as_it_was(tmp_path: Path) -> None:
    often, never = (losses_of(trainer_of(tmp_path / str(steps), eval_steps=steps)) for steps in (1, None))
    assert often == pytest.approx(never, rel=1e-5)


def test_warm_up_is_linear_and_applied_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, warmup_steps=4)
    rates: list[float] = []

    class Rates(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            rates.append(innermost(trainer.optimizer).param_groups[0]["scheduled_lr"])

    trainer.add_callback(Rates())
    trainer.train()
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
