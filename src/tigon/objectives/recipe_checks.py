"""Loads a recipe, checked with the rules of the objectives' sections.

The checks need neither transformers nor the model, because the environment variables of transformers follow from the
recipe. Checks that need the model's config are in the objective's own file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tigon.errors import RecipeError
from tigon.models.loading.presets import PRESETS, checkpoint_of
from tigon.objectives.rules import classify as classify_rules
from tigon.objectives.rules import post_training as post_training_rules
from tigon.recipe import recipe_file
from tigon.recipe.keys import Recipe
from tigon.recipe.rules import Rule, Rules, broken, other_keys, watches_eval_loss
from tigon.techniques.condition import Condition, Switch
from tigon.techniques.keys.settings import Settings


def loads_saved(path: Path) -> Recipe:
    """The resolved recipe that a run wrote into its own folder."""
    return load(path, gpu_present=lambda: False)


def without_phases(recipe: Recipe) -> Recipe:
    """The recipe without an earlier training phase, such as the base of Medusa heads."""
    return replace(
        recipe, heads=replace(recipe.heads, base_steps=0), post_training=replace(recipe.post_training, base_steps=0)
    )


def auto_divides_batch(recipe: Recipe) -> bool:
    """Whether `train.checkpointing: auto` also chooses the micro-batch.

    Not if the recipe divides the batch itself, nor in post-training, which compares the samples of a micro-batch.
    """
    undivided = recipe.train.gradient_accumulation == Settings.of({}).train.gradient_accumulation
    return undivided and not post_training_rules.is_post_training(recipe)


def has_one_shape(recipe: Recipe) -> bool:
    """Whether all batches have one shape, so that `train.checkpointing: auto` may choose CUDA graphs."""
    return recipe.data.packs and not post_training_rules.is_post_training(recipe)


def require_heads(path: Path, recipe: Recipe) -> None:
    """Refuse a recipe without heads; `tigon medusa` calls it.

    Args:
        path: The recipe file.
        recipe: The recipe in it.

    Raises:
        RecipeError: `heads.stage` is not given.
    """
    if recipe.heads.stage is None:
        raise RecipeError(
            f"{path}: heads.stage is not given; set it to 1 (only heads) or 2 (model and heads), or use tigon train"
        )


def check_trained_base(recipe: Recipe) -> None:
    """Refuse to freeze the random weights of a preset that stands for a published model: the run would learn nothing.

    Other presets have no trained weights: tigon-demo, and shapes that `model.config` changes. Runs on them try a
    technique or a machine, and a warning says that the frozen weights are random.

    Raises:
        RecipeError: The message names the checkpoint to load instead.
    """
    frozen_by, checkpoint = freezes_random_weights(recipe), checkpoint_instead(recipe)
    if frozen_by is None or checkpoint is None:
        return
    key, _, value = frozen_by.partition(": ")
    steps_key = _base_steps_key(recipe)
    raise RecipeError(
        f"{key} is {value}, which freezes the weights of {recipe.model.name}, and a preset's weights are random; set "
        f"model.name={checkpoint} for its trained weights, or "
        + (f"{steps_key} to train the preset first" if steps_key else f"leave {key} out to train all weights")
    )


def checkpoint_instead(recipe: Recipe) -> str | None:
    """The checkpoint to load instead of a preset whose random weights the run would freeze; None if it may run."""
    if freezes_random_weights(recipe) is None or recipe.model.config:
        return None
    return checkpoint_of(recipe.model.name)


def freezes_random_weights(recipe: Recipe) -> str | None:
    """The key and value by which a run freezes a preset's random weights before any step has trained them, or None."""
    if recipe.model.name not in PRESETS or recipe.heads.base_steps or recipe.post_training.base_steps:
        return None
    if recipe.lora.used:
        return f"lora.rank: {recipe.lora.rank}"
    return "heads.stage: 1" if recipe.heads.stage == 1 else None


def _base_steps_key(recipe: Recipe) -> str | None:
    """The key that trains a preset before the run's own steps, if the objective has one."""
    if recipe.heads.stage is not None:
        return "heads.base_steps"
    return "post_training.base_steps" if post_training_rules.is_post_training(recipe) else None


# --- Medusa heads -----------------------------------------------------------------------------------------------------


_UNSAVED = (
    "lora.rank and heads.stage together cannot be saved from sharded weights; set sharding.zero to 2 or less and "
    "sharding.fsdp: false, or leave lora.rank out"
)
_HAS_HEADS = Condition("heads.stage", "is not", None)
_HEADS_BESIDE_ADAPTERS = (_HAS_HEADS, Condition("lora.rank", "is not", None))
_HEADS = (
    Rule(
        (Condition("heads.stage", "is", 1), Condition("lora.rank", "is not", None)),
        "heads.stage: 1 freezes the model, so adapters would not learn; set heads.stage: 2, or leave lora.rank out",
    ),
    Rule(
        (Condition("heads.stage", "is", 1), Condition("train.checkpointing", "is not", "none")),
        "heads.stage: 1 keeps no activations of the model, so there is nothing to recompute; set train.checkpointing: "
        "none",
    ),
    Rule(
        (*_HEADS_BESIDE_ADAPTERS, Condition("lora.targets", "includes", "head")),
        "heads.stage requires an lm_head without an adapter, because the heads' losses use its weight directly; leave "
        "head out of lora.targets",
    ),
    Rule(
        (*_HEADS_BESIDE_ADAPTERS, Condition("lora.modules_to_save", "is not", ())),
        "heads.stage has not been tried with lora.modules_to_save; leave it out",
    ),
    Rule((*_HEADS_BESIDE_ADAPTERS, Condition("sharding.zero", "is", 3)), _UNSAVED),
    Rule((*_HEADS_BESIDE_ADAPTERS, Condition("sharding.fsdp", "is", True)), _UNSAVED),
    Rule(
        # A folder of heads, `heads.start`, may hold another kind than the default; that is known once it is read.
        (*_HEADS_BESIDE_ADAPTERS, Condition("heads.kind", "is", "mtp")),
        "heads.kind: mtp starts from a copy of the last layer, whose weights lora.rank freezes; use heads.kind: medusa",
    ),
    Rule(
        (_HAS_HEADS, Condition("train.optimizer", "is", "galore-layerwise")),
        "heads.stage needs a separate learning rate for the heads, which train.optimizer: galore-layerwise lacks; use "
        "galore",
    ),
    Rule(
        (_HAS_HEADS, Condition("train.optimizer", "is", "muon")),
        "train.optimizer: muon has not been tried with heads.stage; set train.optimizer: adamw",
    ),
    Rule(
        (_HAS_HEADS, Condition("train.loss_memory_mib", "is at least", 1)),
        "train.loss_memory_mib limits the loss of one head, and heads.stage adds more; set train.loss_memory_mib: 0",
    ),
    Rule(
        (_HAS_HEADS, Condition("sharding.sequence", "is at least", 2)),
        "the heads' labels lie several tokens ahead, and sharding.sequence shifts labels by one before it cuts rows; "
        "set sharding.sequence: 1",
    ),
    Rule(
        (_HAS_HEADS, Condition("sharding.tensor", "is at least", 2)),
        "heads have not been tried with a model whose matrices are divided; set sharding.tensor: 1",
    ),
    Rule(
        (_HAS_HEADS, Condition("model.kernels", "is", "liger")),
        "heads.stage needs a loss over several heads, which Liger Kernel lacks; set model.kernels to tigon, no-flce or "
        "none",
    ),
)
"""Techniques with which heads cannot be trained. Recipe and planner use the same rules."""


def heads_refusals(stage: int, kind: str, settings: Settings) -> Iterator[str]:
    """The reasons why heads of this stage and kind cannot be trained with these settings, one sentence each."""
    return broken(_HEADS, settings, {"heads.stage": stage, "heads.kind": kind})


_OF_HEADS = Rules(
    (
        *_HEADS,
        Rule(
            lambda r: watches_eval_loss(r) and r.heads.stage is not None,
            "train.load_best and train.early_stopping_patience have not been tried with heads.stage; leave them out",
        ),
        Rule(
            (Condition("data.images", "is at least", 1), _HAS_HEADS),
            "data.images has not been tried with heads.stage; set data.images: 0, or leave heads out",
        ),
        Rule(
            (Condition("heads.kind", "is", "mtp"), Condition("heads.layers", "is not", None)),
            "heads.layers is for medusa heads, and an MTP module has exactly one transformer layer; leave it out, or "
            "use heads.kind: medusa",
        ),
        Rule(
            (Condition("heads.kind", "is", "mtp"), Condition("heads.output", "is", "separate")),
            "heads.output: separate is for medusa heads, and heads.kind: mtp always shares the model's lm_head; leave "
            "it out",
        ),
    ),
    (
        Switch(other_keys("heads", "stage"), "heads.stage", lambda r: r.heads.stage is not None, "heads.stage: 1"),
        Switch(("heads.ramp",), "heads.schedule", lambda r: r.heads.schedule != "constant", "heads.schedule: linear"),
    ),
)
RULES = post_training_rules.RULES + classify_rules.RULES + _OF_HEADS
"""The rules of all objectives' sections."""

load = partial(recipe_file.load, objective_rules=RULES)
"""Loads a recipe as `recipe_file.load` does, with the rules of the objectives' sections."""
of_assignments = recipe_file.of_assignments
"""A recipe of `--set` alone, for a plan. No rules are checked."""
