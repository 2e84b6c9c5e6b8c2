"""Makes the trainer of a run: tigon's own, or TRL's with the same guards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainingArguments

from tigon.trainer.arguments import arguments, learning_rates, make_optimizer, without_data_parallel
from tigon.trainer.guarded import GuardedTrainer, Safeguards
from tigon.trainer.setup import Setup, TrainingData

if TYPE_CHECKING:
    from torch import nn


def make(
    setup: Setup, model: nn.Module, data: TrainingData, run: Path, safeguards: Safeguards | None = None
) -> GuardedTrainer:
    """The trainer of a run.

    Args:
        setup: The recipe and its techniques.
        model: The model, with its techniques applied and what its objective attaches.
        data: What it trains on.
        run: The run folder.
        safeguards: The settings of the guards; None: their defaults.

    Raises:
        RecipeError: TRL refuses the options of the objective.
    """
    safeguards = safeguards or Safeguards()
    if setup.objective.trl is not None:
        from tigon.trainer.post_training import trl_trainer  # loads datasets

        return trl_trainer.make(setup, model, data, run, safeguards)
    labels = setup.objective.labels_part
    trainer = GuardedTrainer(
        model=model,
        args=_arguments(setup, run, evaluate=data.eval is not None),
        data_collator=data.collator,
        train_dataset=data.train,
        eval_dataset=data.eval,
        compute_loss_func=None if labels is None else labels.outputs_loss,
    )
    trainer.guard(setup.objective, safeguards, make_optimizer(setup), learning_rates(setup))
    return trainer


def _arguments(setup: Setup, run: Path, *, evaluate: bool) -> TrainingArguments:
    values = arguments(setup, run, evaluate=evaluate)
    values |= {"remove_unused_columns": False, "label_names": ["labels"]}
    if setup.recipe.data.images and not setup.settings.lora.used:
        # Some models leave the last layer of their vision tower out, as LLaVA does.
        values["ddp_find_unused_parameters"] = True
    return without_data_parallel(TrainingArguments(**values))
