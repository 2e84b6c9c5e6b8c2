"""Out of memory at the start, in a step, in an evaluation: a clear end, nothing lost, the same numbers afterwards."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from test_technique_runs import fsdp_rank
from trainer_helpers import SMALL, TINY_MODEL, records, small_trainer, train_losses

from forks import forks, in_forks
from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.trainer import model
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch
from tigon.trainer.evaluation.token_mean import EvaluationFailed, TokenMean
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.guards import prediction

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of ...")


def failing(monkeypatch, owner, name: str, when) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments, **kwargs):
        if when(*arguments):
            raise ERROR
        return original(*arguments, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_out_of_memory_at_the_start_is_one_line_with_batch_and_length(recipe, tigon, here, monkeypatch):
    failing(monkeypatch, model, "build", lambda *_: True)
    line = tigon("train", recipe()).error_line()
    assert "out of GPU memory with train.batch_size 4 and data.sequence_length 32" in line and "1.50 GiB" in line
    assert "--resume" not in line, "there is nothing to resume from"


def test_out_of_memory_in_a_step_names_a_command_that_continues_the_run(recipe, tigon, here, monkeypatch):
    """The way on that it names gives the uninterrupted run's losses, to rounding."""
    path = recipe(train={"steps": 6, "save_steps": 2, "learning_rate": 0.003}, output={"name": "whole"})
    assert tigon("train", path).code == 0
    with monkeypatch.context() as patch:
        failing(patch, GuardedTrainer, "compute_loss", lambda self, *_: self.state.global_step == 4)
        line = tigon("train", path, "--set", "output.name=r").error_line()
    way = "--set output.name=r --set train.batch_size=2 --set train.gradient_accumulation=2 --resume"
    assert line.endswith(way) and "the same numbers" in line
    outcome = tigon("train", path, *way.split())
    assert outcome.code == 0, outcome.err
    assert "train.batch_size: 4 before, 2 now; losses may differ in rounding" in outcome.out
    whole, resumed = (train_losses(here / "runs" / name) for name in ("whole", "r"))
    assert [step for step, _ in resumed] == [step for step, _ in whole]
    assert [loss for _, loss in resumed] == pytest.approx([loss for _, loss in whole], rel=1e-5)
    assert records(here / "runs" / "r", "resume")[0]["step"] == 4


def test_evaluation_in_smaller_batches_has_the_same_loss(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, Recipe(model=SMALL, train=TrainConfig(steps=1, batch_size=7)), evaluate=True)
    want = trainer.evaluate()["eval_loss"]
    batches = []
    tried = lambda self, rows, counts: batches.append(len(rows)) or len(rows) > 2  # noqa: E731
    failing(monkeypatch, TokenMean, "forward_sums", tried)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    assert batches[0] == 7 and trainer.args.per_device_eval_batch_size <= 2, "the next one tries what failed again"
    failing(monkeypatch, TokenMean, "forward_sums", lambda self, rows, counts: True)
    with pytest.raises(EvaluationFailed, match=r"evaluation ran out of memory with batch size 1"):
        trainer.evaluate()


def test_evaluation_that_does_not_fit_keeps_the_trained_model(recipe, tigon, here, monkeypatch):
    failing(monkeypatch, TokenMean, "forward_sums", lambda self, rows, counts: True)
    path = recipe(train={"eval_steps": 2, "save_steps": 2}, output={"save_model": True})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert "warning  evaluation ran out of memory with batch size 1; lower data.sequence_length" in outcome.out
    run = here / "runs" / "r"
    assert (run / "model" / "model.safetensors").is_file() and (run / "report.html").is_file()
    assert checkpoint.newest(run / "checkpoints").path.name == "checkpoint-4"
    assert len(train_losses(run)) == 4 and records(run, "result")[0]["eval_loss"] is None


WORDS = {
    "CUDA error: out of memory": True, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate": True,
    "Triton Error [CUDA]: out of memory": True, "[enforce fail] DefaultCPUAllocator: can't allocate memory": True,
    "mat1 and mat2 shapes cannot be multiplied": False,
}  # fmt: skip


def evaluate_as_rank(rank: int, folder: Path) -> None:
    """What one of two processes says of evaluations: in full, with 2 rows at most in rank 1, with none there."""
    torch.distributed.init_process_group("gloo")
    train = TrainConfig(steps=1, batch_size=7)
    trainer = small_trainer(folder / str(rank), Recipe(model=SMALL, train=train), evaluate=True)
    said = [trainer.evaluate()["eval_loss"]]
    original, limit, trainer.tried = trainer.token_mean.forward_sums, 2, []

    def limited(rows, counts):
        trainer.tried.append(len(rows))
        if rank == 1 and len(rows) > limit:
            raise ERROR
        return original(rows, counts)

    trainer.token_mean.forward_sums = limited
    said += [trainer.evaluate()["eval_loss"], max(trainer.tried[1:])]
    limit = 0
    with pytest.raises(EvaluationFailed) as caught:
        trainer.evaluate()
    (folder / f"{rank}.json").write_text(json.dumps([*said, str(caught.value)]), encoding="utf-8")
    torch.distributed.barrier()


@forks
def test_evaluation_too_large_for_one_process_shrinks_in_both_to_the_same_loss(tmp_path):
    said = tmp_path / "stderr"
    assert in_forks(lambda rank: evaluate_as_rank(rank, tmp_path), 2, said=said) == [0, 0], said.read_text()[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second
    whole, smaller, largest, why = first
    assert smaller == pytest.approx(whole, rel=1e-6) and largest == 3
    assert why == "evaluation ran out of memory in process 1 of 2 with batch size 1; lower data.sequence_length"


@forks
def test_sharded_evaluation_too_large_for_one_process_ends_both_after_the_save(recipe, here, monkeypatch):
    """In the middle of a forward pass, whose gathers the other waits for. The final weights are there by then."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    two_layers = {"config": {**TINY_MODEL, "num_hidden_layers": 2}}
    path = recipe(model=two_layers, train={"batch_size": 2, "save_steps": 2}, output={"save_model": True})
    monkeypatch.setattr(launch, "ALONE_S", 2)

    def train(rank: int) -> None:
        original = LlamaMLP.forward

        def forward(self, hidden):
            if rank == 1 and not self.training:
                raise ERROR
            return original(self, hidden)

        LlamaMLP.forward = forward
        try:
            fsdp_rank(path, [], resume=False)
        except RecipeError as error:
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(2)  # as the launcher would end what waits

    said, started_s = here / "stderr", time.monotonic()
    statuses = in_forks(train, 2, said=said)
    assert time.monotonic() - started_s < 60 and 0 not in statuses
    assert os.waitstatus_to_exitcode(statuses[1]) == 2, said.read_text()[-3000:]
    line = "rank 1: evaluation ran out of memory in process 1 of 2 with batch size 2; lower train.batch_size"
    assert line in said.read_text() and "--set train.batch_size=1" in said.read_text()
    assert (here / "runs" / "r" / "model" / "model.safetensors").is_file()
    assert "the final weights are in runs/r/model" in said.read_text()


@pytest.mark.parametrize(("text", "wanted"), WORDS.items())
def test_out_of_memory_errors_of_other_libraries_are_recognised(text, wanted):
    assert prediction.is_out_of_memory(RuntimeError(text)) == wanted
