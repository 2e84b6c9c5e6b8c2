"""What a recipe may say but hardly means: the run goes on, and says so first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tigon.recipe.keys import DataConfig, Recipe, TrainConfig


@dataclass(frozen=True)
class RunSize:
    """What the preparation found: rows and processes of a run."""

    n_samples: int
    n_eval_samples: int
    n_processes: int


def steps_of(recipe: Recipe, extent: RunSize) -> int:
    """Optimizer steps of the run, as the Trainer counts them: an epoch ends with a step of the rows that are left."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None, "check_combinations wants one of them"
    batches = math.ceil(extent.n_samples / (train.batch_size * extent.n_processes))
    return math.ceil(train.epochs * math.ceil(batches / train.gradient_accumulation))


def warnings_of(recipe: Recipe, extent: RunSize, *, trains_tokenizer: bool) -> tuple[str, ...]:
    """One sentence for each key that will not do what it is there for.

    trains_tokenizer: whether this run trains its tokenizer, which `data.vocab_size` is the size of.
    """
    train, data = recipe.train, recipe.data
    n_steps = steps_of(recipe, extent)
    of_run = f"the run has {n_steps:,} steps"
    both = sorted(set(data.source) & set(data.eval_source))
    found = (
        (
            train.warmup_steps >= n_steps,
            f"train.warmup_steps is {train.warmup_steps:,} and {of_run}: the learning rate never reaches "
            f"train.learning_rate {train.learning_rate:g}",
        ),
        (
            train.eval_steps is not None and train.eval_steps > n_steps and extent.n_eval_samples > 0,
            f"train.eval_steps is {train.eval_steps} and {of_run}: it is evaluated only at the end",
        ),
        (
            train.eval_steps is not None and extent.n_eval_samples == 0,
            f"train.eval_steps is {train.eval_steps}, but no data is held out (data.eval_fraction: 0): nothing is "
            "evaluated",
        ),
        (
            train.save_steps is not None and train.save_steps > n_steps,
            f"train.save_steps is {train.save_steps} and {of_run}: no checkpoint is written",
        ),
        (
            train.log_steps != TrainConfig.log_steps and train.log_steps > n_steps,
            f"train.log_steps is {train.log_steps} and {of_run}: only the first step is recorded",
        ),
        (
            train.keep_checkpoints != TrainConfig.keep_checkpoints and train.save_steps is None,
            f"train.keep_checkpoints {train.keep_checkpoints} has no effect, because train.save_steps is not given",
        ),
        (
            data.eval_fraction != DataConfig.eval_fraction and bool(data.eval_source),
            f"data.eval_fraction {data.eval_fraction:g} has no effect, because data.eval_source is given",
        ),
        (
            data.vocab_size != DataConfig.vocab_size and not trains_tokenizer,
            f"data.vocab_size {data.vocab_size} has no effect, because this run trains no tokenizer",
        ),
        (
            bool(both),
            f"data.source and data.eval_source both name {', '.join(both)}: the held-out loss is one of training text",
        ),
    )
    return tuple(text for applies, text in found if applies)
