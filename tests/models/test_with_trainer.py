"""The Hugging Face Trainer does with a patched model what it does with any other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models_helpers import VOCAB, batch, llama

from tigon.models import MaterializedLogitsWarning, patch

pytest.importorskip("accelerate")


def rows(count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length with very different numbers of targets, so that a mean of means shows."""
    data = []
    for i in range(count):
        row = {name: t[0] for name, t in batch(1, 16, seed=i).items()}
        row["labels"][: (i * 5) % 15] = -100
        data.append(row)
    return data


def train(tmp_path: Any, model: torch.nn.Module, patched: bool, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    if patched:
        patch(model)
    trainer_options = {k: options.pop(k) for k in ("compute_metrics", "compute_loss_func") if k in options}
    arguments: dict[str, Any] = {
        "output_dir": str(tmp_path / f"patched-{patched}"),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 5,
        **options,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=rows(),
        eval_dataset=rows(4),
        **trainer_options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_trainer_logs_the_same_losses_without_computing_logits(tmp_path, options):
    want = losses(train(tmp_path, llama(), patched=False, **options))
    got = losses(train(tmp_path, llama(), patched=True, **options))
    assert len(got) == 3
    assert got == pytest.approx(want, rel=5e-3 if "bf16" in options else 1e-4)


def test_evaluation_metrics_receive_real_logits(tmp_path):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction.predictions)
        return {"shape": prediction.predictions.shape[-1]}

    results = []
    for patched in (False, True):
        trainer = train(tmp_path, llama(), patched, compute_metrics=compute_metrics)
        results.append(trainer.evaluate())
        results.append(trainer.predict(rows(4)).metrics)
    assert results[2]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-4)
    assert results[2]["eval_shape"] == results[3]["test_shape"] == VOCAB
    assert len(seen) == 4 and seen[0].shape == seen[2].shape
    torch.testing.assert_close(torch.tensor(seen[2]), torch.tensor(seen[0]), rtol=1e-3, atol=1e-4)


def test_a_loss_given_to_the_trainer_gets_the_logits(tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    want = losses(train(tmp_path, llama(), patched=False, compute_loss_func=loss_of))
    assert losses(train(tmp_path, llama(), patched=True, compute_loss_func=loss_of)) == pytest.approx(want, rel=1e-4)
