"""Features of the Hugging Face Trainer that reach into the model: packing, noise, adapters, resuming, the best model.

tests/models/test_with_trainer.py has the losses and metrics of plain runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import lora, model, padded, rows, tokenizer
from torch import nn

import tigon
from tigon.models.seams.base import PatchedModule

pytest.importorskip("accelerate")


def trainer(folder: Path, base: nn.Module, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    collator = options.pop("data_collator", padded)
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "seed": 5, "remove_unused_columns": False, **options,
    }  # fmt: skip
    data = [{name: row[name] for name in ("input_ids", "labels")} for row in rows()]
    return Trainer(
        model=base, args=TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:4],
        data_collator=collator, processing_class=tokenizer(),
    )  # fmt: skip


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def flattened(batch: Any) -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()(batch)


FEATURES: dict[str, dict[str, Any]] = {
    "packed rows without padding": {"data_collator": flattened},
    "noise on the embeddings": {"neftune_noise_alpha": 5},
    "average over devices off": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    "rows sorted by length": {"train_sampling_strategy": "group_by_length"},
    "gradients clipped at nothing": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 4},
    "warm-up and cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
}


# An adapter changes which module is called, which matters to what reaches into the batch or the embeddings.
WITH_LORA = ("packed rows without padding", "noise on the embeddings")


@pytest.mark.parametrize(
    ("feature", "wrap"),
    [
        *(pytest.param(feature, lambda base: base, id=f"{feature}, full") for feature in FEATURES),
        *(pytest.param(feature, lora, id=f"{feature}, lora") for feature in WITH_LORA),
    ],
)
def test_trainer_logs_the_unpatched_losses(tmp_path: Path, feature: str, wrap: Any) -> None:
    runs, options = [], FEATURES[feature]
    for patched in (False, True):
        base = model()
        if patched:
            assert tigon.patch(base).counts["linear_cross_entropy"] == 1
        run = trainer(tmp_path, wrap(base), **options)
        run.train()
        runs.append(losses(run))
    assert len(runs[0]) == 4 and len(set(runs[0])) == 4
    assert runs[1] == pytest.approx(runs[0], rel=2e-4)


def test_resumed_run_ends_at_the_same_weights(tmp_path: Path) -> None:
    """Four steps at once, and two and two with a checkpoint between, to the last bit."""
    whole, halves = model(), model()
    for base in (whole, halves):
        tigon.patch(base)
    trainer(tmp_path / "whole", whole).train()
    options = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path / "halves", halves, **options).train()
    resumed = model()
    tigon.patch(resumed)
    again = trainer(tmp_path / "halves", resumed, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "halves" / "checkpoint-2"))
    for (name, got), want in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want), name
    assert isinstance(resumed, PatchedModule)


def test_loading_the_best_model_at_the_end_keeps_the_patch(tmp_path: Path) -> None:
    base = model()
    tigon.patch(base)
    run = trainer(
        tmp_path, base, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    run.train()
    assert run.model is base and isinstance(base, PatchedModule)
    best = min(entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry)
    assert run.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


def test_model_made_by_the_trainer_is_patched_by_its_init_function(tmp_path: Path) -> None:
    """model_init, as hyperparameter search uses it, builds a model for each train()."""
    from transformers import Trainer, TrainingArguments

    built = []

    def model_init() -> nn.Module:
        base = model()
        tigon.patch(base)
        built.append(base)
        return base

    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, logging_steps=1,
    )  # fmt: skip
    run = Trainer(model_init=model_init, args=arguments, train_dataset=rows(), data_collator=padded)
    run.train()
    first = losses(run)
    run.train()
    assert len(built) >= 2 and losses(run)[-2:] == pytest.approx(first[:2], rel=1e-6)
