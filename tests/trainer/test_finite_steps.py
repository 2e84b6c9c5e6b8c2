"""A loss or gradient that is not finite changes no weight and no state, is counted, and ends the run at the limit."""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import nullcontext

import pytest
import torch
from trainer_helpers import SMALL, records, small_trainer, train_keys
from transformers import TrainerCallback

from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.measuring import timed_run

STEPS = 5


def trainer_of(folder, **train):
    values = {"steps": STEPS, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "galore_rank": 8, **train}
    return small_trainer(folder, Recipe(model=SMALL, train=TrainConfig(**values)))


def spoil(trainer, what: str, steps: set[int], micro: int = 0) -> None:
    """Make the loss NaN or infinite, or one gradient infinite, in a micro-batch of these steps (from 1)."""

    def now() -> bool:
        accumulate = trainer.args.gradient_accumulation_steps
        return trainer.state.global_step + 1 in steps and (trainer.step.speed.n_micro_batches - 1) % accumulate == micro

    if what == "gradient":
        weight = next(p for name, p in trainer.model.named_parameters() if "down_proj" in name)
        weight.register_hook(lambda gradient: gradient * math.inf if now() else gradient)
        return
    value = {"nan": math.nan, "inf": math.inf}[what]

    def hook(module, arguments, output):
        if module.training and now():
            # the gradient of an infinite loss may well be finite: it is here
            output.loss = output.loss * math.nan if what == "nan" else output.loss + value
        return output

    trainer.model.register_forward_hook(hook)


class StepMeter(TrainerCallback):
    """Weights and the optimizer's state after each step."""

    def __init__(self, trainer) -> None:
        self.trainer, self.weights, self.states = trainer, {}, {}
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        model, optimizer = self.trainer.model, self.trainer.optimizer
        self.weights[state.global_step] = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        state_dict = optimizer.state_dict()["state"] if optimizer is not None else {}
        self.states[state.global_step] = {
            (i, name): plain(value) for i, values in state_dict.items() for name, value in values.items()
        }


def plain(value):
    """A copy; torchao's quantised states are tensors of a class that cannot be cloned."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if type(value) is torch.Tensor else value.dequantize()


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


on_cpu = pytest.mark.parametrize("name", [row.name for row in OPTIMIZERS.values() if "cpu" in row.devices])


@on_cpu
@pytest.mark.parametrize("what", ["nan", "gradient"])
def test_step_that_is_not_finite_moves_no_weight(name, what, tmp_path):
    row = OPTIMIZERS[name]
    if row.package and importlib.util.find_spec(row.package) is None:
        pytest.skip(f"{row.package} is not installed")
    with torch.compiler.set_stance("force_eager") if row.needs_compiler else nullcontext():
        trainer = trainer_of(tmp_path, steps=4, **train_keys(row))
        spoil(trainer, what, {3})
        watch = StepMeter(trainer)
        trainer.train()
    assert trainer.gate.skipped == 1
    moved = {step: not torch.equal(watch.weights[step], watch.weights[step - 1]) for step in range(1, 5)}
    if row.in_backward and what == "gradient":  # each weight is its own gate: only the spoilt one stays
        assert bool(torch.isfinite(watch.weights[4]).all())
        return
    assert moved == {1: True, 2: True, 3: False, 4: True}
    assert same(watch.states[3], watch.states[2])
    assert name == "sgd" or not same(watch.states[4], watch.states[3])
    assert bool(torch.isfinite(watch.weights[4]).all())


def test_infinite_loss_with_finite_gradients_moves_no_weight(tmp_path):
    trainer = trainer_of(tmp_path)
    spoil(trainer, "inf", {2})
    watch = StepMeter(trainer)
    trainer.train()
    assert torch.equal(watch.weights[2], watch.weights[1]) and trainer.gate.skipped == 1


def test_skipped_step_does_not_count_as_an_update(tmp_path):
    trainer = trainer_of(tmp_path)
    spoil(trainer, "gradient", {2, 4})
    watch = timed_run.StepMeter(torch.device("cpu"))

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            watch.begin()

        def on_step_end(self, *args, **kwargs):
            watch.end(trainer)

    trainer.add_callback(Steps())
    trainer.train()
    assert watch.updated == [True, False, True, False, True]


@pytest.mark.parametrize("log_steps", [1, 3])
def test_logged_loss_leaves_out_skipped_steps(log_steps, tmp_path):
    """Also with a bad micro-batch between good ones; and the steps after a skipped one are not spoilt by it."""
    trainer = trainer_of(tmp_path, batch_size=2, gradient_accumulation=2, log_steps=log_steps, steps=6)
    spoil(trainer, "nan", {2}, micro=1)
    trainer.args.logging_first_step = False
    losses, original = [], trainer.gate.close

    def close(norm, optimizer, *, scale, step):
        losses.append(float(trainer.gate._step_loss))
        original(norm, optimizer, scale=scale, step=step)

    trainer.gate.close = close
    trainer.train()
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert math.isnan(losses[1]) and sum(math.isnan(loss) for loss in losses) == 1
    if log_steps == 1:
        want = {step: losses[step - 1] for step in (1, 3, 4, 5, 6)}
    else:
        want = {3: (losses[0] + losses[2]) / 2, 6: sum(losses[3:]) / 3}
    assert logged == pytest.approx(want, rel=1e-6)
    assert {e["skipped_steps"] for e in trainer.state.log_history if e["step"] > 2 and "skipped_steps" in e} == {1}
    assert json.loads(json.dumps(trainer.state.log_history, allow_nan=False))


def test_run_stops_when_it_exceeds_the_limit_of_skipped_steps(tmp_path):
    trainer = trainer_of(tmp_path, steps=9, max_skipped_steps=2, save_steps=1, keep_checkpoints=1)
    spoil(trainer, "gradient", {2, 3, 5, 6, 7, 8})
    with pytest.raises(
        RecipeError, match=r"not finite in 3 steps in a row, up to step 7, with train\.max_skipped_steps"
    ):
        trainer.train()
    assert trainer.gate.skipped == 5
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found.path.name == "checkpoint-6"
    from safetensors.torch import load_file

    assert all(bool(torch.isfinite(t).all()) for t in load_file(found.path / "model.safetensors").values())


def test_limit_of_zero_stops_the_run_at_the_first_bad_step(tmp_path):
    trainer = trainer_of(tmp_path, max_skipped_steps=0)
    spoil(trainer, "nan", {2})
    with pytest.raises(RecipeError, match=r"not finite in step 2 with train\.max_skipped_steps 0.*learning_rate"):
        trainer.train()


def test_weights_that_are_not_finite_are_not_saved_over_the_last_checkpoint(tmp_path):
    trainer = trainer_of(tmp_path, save_steps=1, keep_checkpoints=1)

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                with torch.no_grad():
                    trainer.model.model.norm.weight[0] = math.inf

    trainer.add_callback(Spoil())
    with pytest.raises(RecipeError, match=r"model\.norm\.weight has values that are not finite at step 3: not saved"):
        trainer.train()
    assert checkpoint.newest(tmp_path / "checkpoints").path.name == "checkpoint-2"


def test_skipped_steps_are_printed_recorded_and_reported(recipe, tigon, here, monkeypatch):
    from tigon.trainer.guarded import GuardedTrainer

    original = GuardedTrainer.compute_loss

    def compute_loss(self, *arguments, **kwargs):
        loss = original(self, *arguments, **kwargs)
        return self.gate.nan_if_not_finite(loss * math.nan) if self.state.global_step == 1 else loss

    monkeypatch.setattr(GuardedTrainer, "compute_loss", compute_loss)
    outcome = tigon("train", recipe())
    assert outcome.code == 0, outcome.err
    assert "1 steps skipped: loss or gradient was not finite" in outcome.out
    train = records(here / "runs" / "r", "train")
    assert [(r["step"], r.get("skipped_steps")) for r in train] == [(1, None), (3, 1), (4, 1)]
    assert "skipped steps (loss or gradient not finite)" in (here / "runs" / "r" / "report.md").read_text(
        encoding="utf-8"
    )


def test_learning_rate_is_not_blamed_before_the_first_step_taken(tmp_path):
    trainer = trainer_of(tmp_path, max_skipped_steps=1)
    spoil(trainer, "nan", {1, 2, 3})
    with pytest.raises(RecipeError, match=r"in 2 steps in a row, up to step 2, .* no step has changed a weight yet"):
        trainer.train()


def test_resumed_run_continues_the_count_of_steps_taken(tmp_path):
    trainer = trainer_of(tmp_path, max_skipped_steps=1)
    trainer.train()
    state = trainer.gate.state()
    assert state["taken"] == STEPS
    trainer.gate.resume(state)
    assert trainer.gate.state() == state
