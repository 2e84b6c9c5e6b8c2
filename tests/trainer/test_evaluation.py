"""Evaluation computes the loss inside the head: the value that logits give, without the memory of logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import SMALL, TINY_MODEL, small_trainer

from tigon.data.packing import Sample, SampleDataset
from tigon.medusa.spec import HeadsSpec
from tigon.objectives.medusa import MedusaTraining
from tigon.profiler.recording.cpu import CpuRecorder
from tigon.recipe.keys import HeadsConfig, LoraConfig, Recipe, TrainConfig

VOCAB, ROWS, TOKENS = 8192, 4, 256
LOGITS_BYTES = 4 * ROWS * TOKENS * VOCAB
"""fp32 logits of one batch: 32 MiB, of which the CPU's fused loss holds 16 MiB at a time."""
WIDE = replace(SMALL, config={**TINY_MODEL, "vocab_size": VOCAB, "max_position_embeddings": TOKENS})
KINDS = ("causal LM", "adapters", "heads alone", "heads and model")


def long_rows() -> SampleDataset:
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (TOKENS,), generator=draw, dtype=torch.int32) for _ in range(ROWS)]
    return SampleDataset([Sample(t, t.clone(), torch.arange(TOKENS, dtype=torch.int32)) for t in tokens])


def trainer_of(kind: str, folder: Path, kernels: str, precision: str = "fp32") -> Any:
    recipe = Recipe(
        model=replace(WIDE, kernels=kernels),
        train=TrainConfig(steps=1, batch_size=ROWS, precision=precision),
        lora=LoraConfig(rank=4) if kind == "adapters" else LoraConfig(),
    )
    data = long_rows()
    if not kind.startswith("heads"):
        return small_trainer(folder, recipe, data=data, evaluate=True)
    heads = HeadsConfig(stage=1 if kind == "heads alone" else 2, count=2)
    recipe = replace(recipe, heads=heads)
    objective = MedusaTraining(recipe.model, recipe=recipe, spec=HeadsSpec(count=2, shared=True))
    return small_trainer(folder, recipe, objective, data=data, evaluate=True)


def largest_allocation(trainer: Any) -> int:
    recorder = CpuRecorder()
    recorder.start()
    try:
        trainer.evaluate()
    finally:
        recording = recorder.stop()
    return max(event.nbytes for event in recording.events)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_of_a_patched_model_allocates_no_logits(kind: str, tmp_path: Path) -> None:
    assert largest_allocation(trainer_of(kind, tmp_path, "tigon")) <= LOGITS_BYTES // 2


@pytest.mark.parametrize("kernels", ["none", "no-flce"])
def test_evaluation_of_a_model_with_an_unfused_head_allocates_its_logits(kernels: str, tmp_path: Path) -> None:
    """The counterpart of the test above: the recorder sees logits where there are some."""
    assert largest_allocation(trainer_of("causal LM", tmp_path, kernels)) >= LOGITS_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_the_loss_of_the_logits(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, "tigon")
    found = trainer.evaluate()["eval_loss"]
    batch = trainer.data_collator([trainer.eval_dataset[i] for i in range(ROWS)])
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits
    assert type(logits) is torch.Tensor, "a call without the trainer has logits in evaluation mode"
    want = torch.nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten())
    assert found == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("kind", ["causal LM", "adapters"])
def test_evaluation_under_autocast_gives_the_loss_of_the_unpatched_model(kind: str, tmp_path: Path) -> None:
    losses = [
        trainer_of(kind, tmp_path / kernels, kernels, "amp-bf16").evaluate()["eval_loss"]
        for kernels in ("none", "tigon")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2**-9)  # half a rounding of bf16


def test_evaluation_that_fails_leaves_later_calls_their_logits(tmp_path: Path) -> None:
    trainer = trainer_of("causal LM", tmp_path, "tigon")
    forward, batch = trainer.model.forward, trainer.data_collator([trainer.eval_dataset[0]])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("no such thing")

    trainer.model.forward = fail
    with pytest.raises(KeyError):
        trainer.evaluate()
    trainer.model.forward = forward
    with torch.no_grad():
        assert type(trainer.model.eval()(**batch).logits) is torch.Tensor
