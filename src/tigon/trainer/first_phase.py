"""Ordinary training before the run's own. It makes the model that an objective starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tigon.data.packing import SampleDataset
from tigon.objectives.base import Phase
from tigon.trainer import engine
from tigon.trainer import trainer as trainers
from tigon.trainer.checkpoint import final_model
from tigon.trainer.distributed import launch
from tigon.trainer.prepare import Prepared


def train_phase(phase: Phase, prepared: Prepared, run: Path, callbacks: Sequence[Any]) -> None:
    """Train the recipe's model as `phase` says. `phase.folder` exists only if the model in it is complete."""
    recipe, choices, partial = prepared.recipe, phase.choices, phase.folder.with_name(f"{phase.folder.name}-partial")
    built, _ = engine.build(
        recipe.model, prepared.config, choices, prepared.run_info, device=prepared.device, seed=phase.train.seed,
        kernels=recipe.model.kernels, base=partial,
    )  # fmt: skip
    args = trainers.arguments(
        phase.train, choices, prepared.run_info, folder=run / "checkpoints", device=prepared.device, evaluate=False
    )
    samples = SampleDataset(prepared.train.samples)
    make_optimizer = engine.make_optimizer(phase.train, choices)
    trainer = trainers.make(built, args, prepared.collator, samples, None, make_optimizer)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    final_model.save_as_trained(built, trainer, choices, partial)
    trainer.accelerator.wait_for_everyone()
    if launch.rank() == 0:
        partial.rename(phase.folder)
    trainer.accelerator.wait_for_everyone()
    if choices.zero:
        unset_hf_deepspeed_config()  # with stage 3 alive, from_pretrained would partition the weights as it loads them
