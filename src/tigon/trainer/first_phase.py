"""Ordinary training before the run's own. It makes the model that an objective starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tigon.data.packing import SampleDataset
from tigon.trainer import engine
from tigon.trainer import trainer as trainers
from tigon.trainer.checkpoint import final_model
from tigon.trainer.distributed import launch
from tigon.trainer.guards import self_test
from tigon.trainer.prepare import Prepared


def train_base(prepared: Prepared, run: Path, callbacks: Sequence[Any]) -> None:
    """Train what the objective starts from. The folder `base/` exists only if the model in it is complete.

    Does nothing if the objective starts from the recipe's model, or if `base/` exists (a resumed run).
    """
    recipe, base = prepared.recipe, prepared.objective.base
    if base is None or base.trained(recipe.model, run) is not recipe.model:
        return
    folder, partial = run / "base", run / "base-partial"
    settings = prepared.settings.having({
        "lora.rank": None, "lora.quantize": False, "train.checkpointing": "none",
        "train.gradient_accumulation": base.train.gradient_accumulation,
    })  # fmt: skip
    built, _ = engine.build(
        recipe.model, prepared.config, settings, prepared.run_info, device=prepared.device, seed=base.train.seed,
        kernels=recipe.model.kernels, base=partial, ops=self_test.without(prepared.wrong_ops),
    )  # fmt: skip
    args = trainers.arguments(
        base.train, settings, prepared.run_info, folder=run / "checkpoints", device=prepared.device, evaluate=False
    )
    samples = SampleDataset(prepared.train.samples)
    make_optimizer = engine.make_optimizer(base.train, settings)
    trainer = trainers.make(built, args, prepared.collator, samples, None, make_optimizer)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    final_model.save_as_trained(built, trainer, settings, partial)
    trainer.accelerator.wait_for_everyone()
    if launch.rank() == 0:
        partial.rename(folder)
    trainer.accelerator.wait_for_everyone()
    if settings.sharding.zero:
        unset_hf_deepspeed_config()  # with stage 3 alive, from_pretrained would partition the weights as it loads them
