"""Ordinary training before the run's own. It makes the model that an objective starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tigon.data.packing import SampleDataset
from tigon.objectives.base import Objective
from tigon.trainer import engine, trainer
from tigon.trainer.checkpoint import final_model
from tigon.trainer.distributed import launch
from tigon.trainer.prepare import Prepared
from tigon.trainer.setup import TrainingData


def train_base(prepared: Prepared, run: Path, callbacks: Sequence[TrainerCallback]) -> None:
    """Train what the objective starts from. The folder `base/` exists only if the model in it is complete.

    Does nothing if the objective starts from the recipe's model, or if `base/` exists (a resumed run).
    """
    recipe, base = prepared.recipe, prepared.objective.base
    if base is None or base.trained(recipe.model, run) is not recipe.model:
        return
    folder, partial = run / "base", run / "base-partial"
    setup = prepared.without_adapters(gradient_accumulation=base.train.gradient_accumulation).with_train(base.train)
    setup = replace(setup, objective=Objective(recipe.model))
    built, _ = engine.build(setup, partial)
    data = TrainingData(train=SampleDataset(prepared.train.samples), collator=prepared.collator)
    first = trainer.make(setup, built, data, run)
    for callback in callbacks:
        first.add_callback(callback)
    first.train()
    final_model.save_as_trained(built, first, setup.settings, partial)
    first.accelerator.wait_for_everyone()
    if launch.rank() == 0:
        partial.rename(folder)
    first.accelerator.wait_for_everyone()
    if setup.settings.sharding.zero:
        unset_hf_deepspeed_config()  # with stage 3 alive, from_pretrained would partition the weights as it loads them
