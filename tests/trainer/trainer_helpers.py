"""Helpers for the tests of `tigon train`."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tigon.data.packing import IGNORE_INDEX, Collator, SampleDataset, pack
from tigon.data.tokenizer import Encoded
from tigon.objectives.base import Objective
from tigon.recipe.keys import ModelConfig, Recipe
from tigon.techniques.optimizers.table import Optimizer
from tigon.trainer import model as models
from tigon.trainer.setup import Setup, TrainingData

TINY_MODEL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip


CPU = torch.device("cpu")
SMALL = ModelConfig(name="tigon-demo", kernels="none", config=TINY_MODEL)


def rows(n_documents: int = 24, length: int = 16) -> SampleDataset:
    """Prompt-and-answer rows of different lengths, so that micro-batches hold different numbers of learned tokens."""
    draw = torch.Generator().manual_seed(0)
    documents = []
    for i in range(n_documents):
        n = 4 + i % 12
        tokens = torch.randint(2, 512, (n,), generator=draw).tolist()
        documents.append(Encoded(tokens, [IGNORE_INDEX] * 2 + tokens[2:], f"d:{i}", False))
    return SampleDataset(pack(documents, length, packing=False, cross_document=False, too_long="error").samples)


def small_setup(recipe: Recipe, objective: Objective | None = None, device: torch.device = CPU) -> Setup:
    """A recipe as a run sees it. objective: None: the loss of the next token."""
    from tigon.trainer.guards import preflight

    config = models.load_config(recipe.model)
    return Setup(
        recipe=recipe,
        device=device,
        settings=recipe.settings(precision=preflight.resolve_precision(recipe.train.precision, device)),
        config=config,
        shapes=models.parameter_shapes(config),
        objective=objective or Objective(recipe.model),
    )


def small_trainer(
    folder: Path, recipe: Recipe, objective: Objective | None = None, *, data: SampleDataset | None = None,
    evaluate: SampleDataset | bool = False, device: torch.device = CPU,
) -> Any:  # fmt: skip
    """The trainer of a recipe, built as `tigon train` builds it, on rows made here.

    evaluate: The rows of the eval loss; True: those of the training.
    """
    from tigon.trainer import engine, guarded, trainer

    setup, data = small_setup(recipe, objective, device), data or rows()
    built, _ = engine.build(setup, folder / "base", saves_adapters=True)
    held_out = data if evaluate is True else evaluate or None
    given = TrainingData(train=data, eval=held_out, collator=Collator(0, packing=False))
    safeguards = guarded.Safeguards(max_skipped_steps=recipe.train.max_skipped_steps)
    return trainer.make(setup, setup.objective.attach(built), given, folder, safeguards)


def train_keys(row: Optimizer) -> dict[str, Any]:
    """The keys of `train` that choose an optimizer."""
    return {key.removeprefix("train."): value for key, value in row.recipe.items()}


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def words(n_words: int, seed: int = 0) -> str:
    """Text with some structure, in lines of ten words."""
    draw = random.Random(seed)
    names = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "pu") for b in ("ran", "tis", "vel", "dor")]
    chosen = [draw.choice(names) for _ in range(n_words)]
    return "\n".join(" ".join(chosen[i : i + 10]) for i in range(0, n_words, 10)) + "\n"


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder, "train")]


def assert_same_losses(run: Path, other: Path) -> None:
    """The same training and eval losses."""
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    evals = [[record["eval_loss"] for record in records(folder, "eval")] for folder in (run, other)]
    assert evals[0] and evals[0] == pytest.approx(evals[1], rel=1e-5)


def tree(folder: Path) -> set[str]:
    """Every path below, to show that nothing was written."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def cut_back(whole: Path, name: str, *steps: int) -> Path:
    """A copy of a finished run as a kill would leave it, without the checkpoints of `steps`."""
    cut = whole.with_name(name)
    shutil.copytree(whole, cut)
    (cut / "summary.json").unlink()
    for step in steps:
        shutil.rmtree(cut / "checkpoints" / f"checkpoint-{step}")
    return cut


def weights(folder: Path, step: int = 6) -> bytes:
    return (folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").read_bytes()


def train_losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(folder, "train")]
