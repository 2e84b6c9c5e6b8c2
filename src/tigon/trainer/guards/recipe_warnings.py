"""Warnings about settings of a recipe that are allowed but probably mistakes. The run prints them and continues."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tigon.objectives.recipe_checks import freezes_random_weights
from tigon.recipe.keys import DataConfig, Recipe, TrainConfig
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST
from tigon.trainer.distributed import launch

FEW_STEPS = 20
"""A run of fewer optimizer steps has a warning. docs/your-data.md shows what such runs learned."""


@dataclass(frozen=True)
class RunSize:
    """The number of samples of a run, and of the processes, or groups that share rows, that read different ones."""

    n_samples: int
    n_eval_samples: int
    n_processes: int
    n_rows: int = 0
    """Rows or documents in the samples; 0: they are plain text, which is one stream."""


def steps_of(recipe: Recipe, size: RunSize) -> int:
    """Optimizer steps of the run, as the Trainer counts them: the last step of an epoch may have fewer samples."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None, "check_combinations requires train.steps or train.epochs"
    batches = math.ceil(size.n_samples / (train.batch_size * size.n_processes))
    return math.ceil(train.epochs * math.ceil(batches / train.gradient_accumulation))


def epochs_of(recipe: Recipe, size: RunSize) -> float:
    """Passes over the samples, with `train.steps` as with `train.epochs`."""
    train = recipe.train
    if train.epochs is not None:
        return train.epochs
    return steps_of(recipe, size) / steps_of(replace(recipe, train=replace(train, steps=None, epochs=1.0)), size)


def _few_steps(recipe: Recipe, size: RunSize) -> str:
    """The warning of a run with few steps: the keys that give more, and the steps that they give."""
    train, data = recipe.train, recipe.data
    n_steps = steps_of(recipe, size)
    fixes = [f"raise train.{'epochs' if train.steps is None else 'steps'}"]
    if train.steps is None:
        fixes += [f"lower train.{key}" for key in ("batch_size", "gradient_accumulation") if getattr(train, key) > 1]
    if train.steps is None and data.packs and size.n_rows > size.n_samples:
        apart = steps_of(recipe, replace(size, n_samples=size.n_rows))
        fixes += [f"set data.packing: false ({apart:,} steps)", "lower data.sequence_length"]
    return (
        f"the run has {n_steps} optimizer step{'s' if n_steps > 1 else ''}, fewer than {FEW_STEPS}, and the model may "
        f"answer as before: {', '.join(fixes)}, or raise train.learning_rate {train.learning_rate:g}"
    )


def warnings_of(recipe: Recipe, size: RunSize, *, trains_tokenizer: bool) -> tuple[str, ...]:
    """One sentence for each key that has no effect or not the usual one.

    Args:
        recipe: The recipe of the run.
        size: Its samples and processes.
        trains_tokenizer: Whether this run trains its tokenizer, whose size is `data.vocab_size`.
    """
    train, data = recipe.train, recipe.data
    n_steps = steps_of(recipe, size)
    but_steps = f"but the run has {n_steps:,} steps"
    names, eval_names = ({(s.name, s.split) for s in part} for part in (data.sources(), data.eval_sources()))
    both = sorted(name for name, _ in names & eval_names)
    frozen_by = freezes_random_weights(recipe)
    checks = (
        (n_steps < FEW_STEPS, _few_steps(recipe, size)),
        (
            frozen_by is not None,
            f"model.name: {recipe.model.name} has random weights, and {frozen_by} freezes them: the run measures "
            "memory and time but learns almost nothing; to fine-tune, name a checkpoint",
        ),
        (
            train.warmup_steps >= n_steps,
            f"train.warmup_steps is {train.warmup_steps:,}, {but_steps}: the learning rate never reaches "
            f"train.learning_rate {train.learning_rate:g}",
        ),
        (
            train.eval_steps is not None and train.eval_steps > n_steps and size.n_eval_samples > 0,
            f"train.eval_steps is {train.eval_steps}, {but_steps}: the model is evaluated only at the end",
        ),
        (
            train.eval_steps is not None and size.n_eval_samples == 0,
            f"train.eval_steps is {train.eval_steps}, but there is no eval data (data.eval_fraction: 0): nothing is "
            "evaluated",
        ),
        (
            train.save_steps is not None and train.save_steps > n_steps,
            f"train.save_steps is {train.save_steps}, {but_steps}: no checkpoint is written",
        ),
        (
            train.log_steps != TrainConfig.log_steps and train.log_steps > n_steps,
            f"train.log_steps is {train.log_steps}, {but_steps}: only the first step is recorded",
        ),
        (
            train.keep_checkpoints != TrainConfig.keep_checkpoints and train.save_steps is None and not train.load_best,
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
            f"data.source and data.eval_source both name {', '.join(both)}: the eval loss is measured on training text",
        ),
        (
            train.checkpointing == KEPT_ON_HOST and data.packs and not data.cross_document_attention,
            f"train.checkpointing: {KEPT_ON_HOST} computes attention twice, as offload does, for a batch with several "
            "documents in a row; set data.packing: false, or data.cross_document_attention: true to let them see each "
            "other",
        ),
        (
            recipe.settings().sharding.zero_int4_gradients and not launch.has_several_nodes(),
            "sharding.zero_int4_gradients has no effect on one machine: DeepSpeed sends gradients as 4-bit integers "
            "between machines only",
        ),
    )
    return tuple(text for applies, text in checks if applies)
