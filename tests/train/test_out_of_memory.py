"""Out of memory at the start, in a step, in an evaluation: a clear end, nothing lost, the same numbers afterwards."""

from __future__ import annotations

import pytest
import torch
from test_checkpoints import train_losses
from train_helpers import SMALL, records, small_trainer

from tigon.train import checkpoint, model, prediction
from tigon.train.recipe import Recipe, TrainConfig
from tigon.train.trainer import EvaluationFailed, TigonTrainer

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of ...")


def failing(monkeypatch, owner, name: str, when) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments, **kwargs):
        if when(*arguments):
            raise ERROR
        return original(*arguments, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_out_of_memory_at_the_start_is_a_traceback(recipe, tigon, here, monkeypatch):
    failing(monkeypatch, model, "build", lambda *_: True)
    line = tigon("train", recipe()).error_line()
    assert "out of GPU memory with train.batch_size 4 and data.sequence_length 32" in line and "1.50 GiB" in line
    assert "--resume" not in line, "there is nothing to resume from"


def test_out_of_memory_in_a_step_loses_what_was_saved_or_names_no_way_on(recipe, tigon, here, monkeypatch):
    """The way on that it names gives the uninterrupted run's losses, to rounding."""
    path = recipe(train={"steps": 6, "save_steps": 2, "learning_rate": 0.003}, output={"name": "whole"})
    assert tigon("train", path).code == 0
    with monkeypatch.context() as patch:
        failing(patch, TigonTrainer, "compute_loss", lambda self, *_: self.state.global_step == 4)
        line = tigon("train", path, "--set", "output.name=r").error_line()
    way = "--set output.name=r --set train.batch_size=2 --set train.gradient_accumulation=2 --resume"
    assert line.endswith(way) and "the same numbers" in line
    outcome = tigon("train", path, *way.split())
    assert outcome.code == 0, outcome.err
    assert "train.batch_size: 4 before, 2 now; the same numbers to rounding" in outcome.out
    whole, resumed = (train_losses(here / "runs" / name) for name in ("whole", "r"))
    assert [step for step, _ in resumed] == [step for step, _ in whole]
    assert [loss for _, loss in resumed] == pytest.approx([loss for _, loss in whole], rel=1e-5)
    assert records(here / "runs" / "r", "resume")[0]["step"] == 4


def test_evaluation_that_needs_smaller_batches_has_another_loss(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, Recipe(model=SMALL, train=TrainConfig(steps=1, batch_size=7)), evaluate=True)
    want = trainer.evaluate()["eval_loss"]
    batches = []
    tried = lambda self, rows, counts: batches.append(len(rows)) or len(rows) > 2  # noqa: E731
    failing(monkeypatch, TigonTrainer, "_forward_sums", tried)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    assert batches[0] == 7 and trainer.args.per_device_eval_batch_size <= 2, "the next one tries what failed again"
    failing(monkeypatch, TigonTrainer, "_forward_sums", lambda self, rows, counts: True)
    with pytest.raises(EvaluationFailed, match=r"evaluation ran out of memory with 1 rows"):
        trainer.evaluate()


def test_evaluation_that_does_not_fit_costs_the_trained_model(recipe, tigon, here, monkeypatch):
    failing(monkeypatch, TigonTrainer, "_forward_sums", lambda self, rows, counts: True)
    path = recipe(train={"eval_steps": 2, "save_steps": 2}, output={"save_model": True})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert "warning  evaluation ran out of memory with 1 rows at once; lower data.sequence_length" in outcome.out
    run = here / "runs" / "r"
    assert (run / "model" / "model.safetensors").is_file() and (run / "report.html").is_file()
    assert checkpoint.newest(run / "checkpoints").path.name == "checkpoint-4"
    assert len(train_losses(run)) == 4 and records(run, "result")[0]["eval_loss"] is None


WORDS = {
    "CUDA error: out of memory": True, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate": True,
    "Triton Error [CUDA]: out of memory": True, "[enforce fail] DefaultCPUAllocator: can't allocate memory": True,
    "mat1 and mat2 shapes cannot be multiplied": False,
}  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), WORDS.items())
def test_words_of_other_libraries_for_a_full_device_are_a_traceback(text, wanted):
    assert prediction.is_out_of_memory(RuntimeError(text)) == wanted
