"""Which recipe keys the objectives of post-training take, and what does not go with them. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tigon.errors import RecipeError
from tigon.objectives.rules.rows import OF_TEXT, RowObjectives
from tigon.recipe.keys import PostTrainingConfig, Recipe
from tigon.recipe.rules import Rule, Rules, broken
from tigon.techniques.condition import Condition
from tigon.techniques.generator_obstacles import (
    HOST_LAYERS,
    HOST_STATES,
    QUANTIZED_FSDP2,
    QUANTIZED_ZERO3,
    TENSOR_PARALLEL,
)
from tigon.techniques.keys.settings import Settings

TAKES: Mapping[str, tuple[str, ...]] = {
    "dpo": ("beta", "loss_type", "label_smoothing", "shared_prefix", "base_steps"),
    "kto": ("beta", "loss_type", "desirable_weight", "undesirable_weight", "shared_prefix", "base_steps"),
    "orpo": ("beta", "shared_prefix", "base_steps"),
    "grpo": (
        "beta", "loss_type", "rewards", "tools", "environment", "max_tool_calling_iterations", "generations",
        "completion_length", "temperature", "log_completions", "stop_reward_drop", "stop_clipped_share",
        "stop_patience", "generator", "generation", "shared_prefix", "base_steps",
    ),
    "distill": ("beta", "completion_length", "temperature", "generator", "generation", "teacher", "base_steps"),
    "reward": ("shared_prefix", "base_steps"),
}  # fmt: skip
"""Objective -> the keys of `post_training` that it takes."""
LOSS_TYPES: Mapping[str, tuple[str, ...]] = {
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"),
}  # fmt: skip
VLLM, CONTINUOUS_BATCHING = "use_vllm", "use_transformers_continuous_batching"
_FILTERS = ("top_p", "top_k", "min_p")
_OF_TRANSFORMERS = ("repetition_penalty", "generation_kwargs", "cache_implementation")
_GENERATION = (*_FILTERS, *_OF_TRANSFORMERS, CONTINUOUS_BATCHING, "transformers_continuous_batching_config", VLLM)
"""TRL's options that `post_training.generation` passes on, besides those that begin with `vllm_`."""
_DEFAULT = PostTrainingConfig()
POST_TRAINING = RowObjectives(
    names=tuple(TAKES),
    title="post-training",
    rows="rows of JSONL with the columns of TRL's formats",
    head="is ignored by TRL's trainers, which read lm_head.weight",
    kernels="tigon, no-flce or none",
)
_POST_TRAINING = POST_TRAINING.chosen


def is_post_training(recipe: Recipe) -> bool:
    """Whether one of TRL's trainers carries out the recipe."""
    return _POST_TRAINING.holds(recipe)


def check_profiled(recipe: Recipe) -> None:
    """Raise RecipeError if a profile, which leaves the steps before the objective's own out, cannot begin."""
    own = recipe.post_training
    if recipe.train.objective == "grpo" and own.beta and own.base_steps and not recipe.lora.used:
        raise RecipeError(
            f"a profile leaves post_training.base_steps out, and with post_training.beta {own.beta:g} TRL reads the "
            "reference from the model that they write; add --set post_training.beta=0 or --set lora.rank=8"
        )


def _misplaced() -> Iterator[Rule]:
    """A key whose objective the recipe does not set."""

    def breaks(recipe: Recipe, name: str) -> bool:
        given = getattr(recipe.post_training, name) != getattr(_DEFAULT, name)
        return given and name not in TAKES.get(recipe.train.objective, ())

    for field in dataclasses.fields(PostTrainingConfig):
        takers = " or ".join(objective for objective, names in TAKES.items() if field.name in names)
        reason = f"post_training.{field.name} needs train.objective: {takers}; set that, or leave the key out"
        yield Rule(partial(breaks, name=field.name), reason)


def _wrong_loss() -> Iterator[Rule]:
    def breaks(recipe: Recipe, objective: str) -> bool:
        loss = recipe.post_training.loss_type
        return recipe.train.objective == objective and loss is not None and loss not in LOSS_TYPES[objective]

    for objective, names in LOSS_TYPES.items():
        reason = f"post_training.loss_type: the losses of train.objective: {objective} are {', '.join(names)}"
        yield Rule(partial(breaks, objective=objective), reason)


_SETTINGS_RULES = tuple(POST_TRAINING.settings_rules())
_PLANNED_RULES = (
    Rule(
        (
            _POST_TRAINING,
            Condition("train.objective", "is not", "reward"),
            Condition("model.kernels", "is not", "tigon"),
        ),
        "the planner cannot predict post-training with these kernels; set model.kernels: tigon (--kernels tigon)",
    ),
)


_FSDP2, _QUANTIZED = Condition("sharding.fsdp", "is", True), Condition("lora.quantize", "is", True)
_WITHOUT_GENERATOR = (
    ((Condition("sharding.offload", "is not", "none"),), HOST_STATES, "sharding.offload: none"),
    ((_FSDP2, _QUANTIZED), QUANTIZED_FSDP2, "sharding.fsdp: false"),
    ((Condition("sharding.zero", "is at least", 3), _QUANTIZED), QUANTIZED_ZERO3, "sharding.zero: 2"),
    ((Condition("sharding.tensor", "is at least", 2),), TENSOR_PARALLEL, "sharding.tensor: 1"),
    ((Condition("lora.base_offload", "is", True),), HOST_LAYERS, "lora.base_offload: false"),
)
"""What tigon's generator does not go with: conditions that hold together, their name, and what to set instead."""
_WITHOUT_AUTO = (((Condition("model.kernels", "is not", "tigon"),), "model.kernels", "model.kernels: tigon"),)
"""With what `auto` leaves the completions to transformers too."""


def generator_obstacle(settings: Settings, chosen: str) -> tuple[str, str] | None:
    """Why tigon's generator does not write the completions, and what to set so that it does; None if nothing speaks
    against it. chosen: `post_training.generator`, `auto` or `tigon`.
    """
    rows = (*_WITHOUT_GENERATOR, *(_WITHOUT_AUTO if chosen == "auto" else ()))
    holding = (row for row in rows if all(condition.holds(settings) for condition in row[0]))
    return next(((name, instead) for _, name, instead in holding), None)


_GENERATOR_RULES = tuple(
    Rule(
        (Condition("post_training.generator", "is", "tigon"), *conditions),
        f"post_training.generator: tigon does not go with {name}; set generator: transformers, or {instead}",
    )
    for conditions, name, instead in _WITHOUT_GENERATOR
)


def refusals(keys: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    """The reasons why a run with these settings cannot be trained, or not planned, one sentence each.

    keys: The recipe keys of the objective.
    """
    return broken((*_SETTINGS_RULES, *_GENERATOR_RULES, *_PLANNED_RULES), settings, keys)


def generation_of(recipe: Recipe) -> Mapping[str, Any]:
    """TRL's options of generation that the recipe gives."""
    return recipe.post_training.generation or {}


def writes_by_generate(recipe: Recipe) -> bool:
    """Whether TRL calls the model's `generate` with options that tigon's generator knows."""
    return not any(value for name, value in generation_of(recipe).items() if name not in _FILTERS)


def other_writer(recipe: Recipe) -> str:
    """What writes completions instead of the model's `generate`; empty if `generate` does."""
    given = generation_of(recipe)
    if given.get(VLLM):
        return "vLLM"
    return "transformers' continuous batching" if given.get(CONTINUOUS_BATCHING) else ""


def _without_switch(recipe: Recipe, switch: str, prefix: str) -> bool:
    given = generation_of(recipe)
    return not given.get(switch) and any(name.startswith(prefix) for name in given)


_GENERATION_RULES = (
    Rule(
        lambda r: any(name not in _GENERATION and not name.startswith("vllm_") for name in generation_of(r)),
        f"post_training.generation takes TRL's options {', '.join(_GENERATION)} and vllm_*; leave the others out",
    ),
    Rule(
        lambda r: bool(generation_of(r).get(VLLM) and generation_of(r).get(CONTINUOUS_BATCHING)),
        f"post_training.generation: {VLLM} and {CONTINUOUS_BATCHING} exclude each other; leave one out",
    ),
    Rule(
        lambda r: _without_switch(r, VLLM, "vllm_"),
        f"post_training.generation: options vllm_* have no effect without {VLLM}; add {VLLM}: true",
    ),
    Rule(
        lambda r: _without_switch(r, CONTINUOUS_BATCHING, "transformers_continuous"),
        f"post_training.generation: transformers_continuous_batching_config has no effect without {CONTINUOUS_BATCHING}"
        f"; add {CONTINUOUS_BATCHING}: true",
    ),
    Rule(
        lambda r: r.train.objective == "distill" and CONTINUOUS_BATCHING in generation_of(r),
        f"post_training.generation: TRL's DistillationTrainer has no {CONTINUOUS_BATCHING}; leave it out",
    ),
    Rule(
        lambda r: r.post_training.generator == "tigon" and not writes_by_generate(r),
        "post_training.generator: tigon knows only top_p, top_k and min_p of post_training.generation; set generator: "
        "transformers, or leave the other options out",
    ),
    *_GENERATOR_RULES,
)
KEY_RULES = (
    *_misplaced(),
    *_wrong_loss(),
    *_GENERATION_RULES,
    Rule(
        (
            Condition("train.objective", "is", "dpo"),
            Condition("post_training.loss_type", "is", "exo_pair"),
            Condition("post_training.label_smoothing", "is", 0),
        ),
        "post_training.loss_type: exo_pair needs post_training.label_smoothing above 0, e.g. 0.001",
    ),
    Rule(
        (
            Condition("train.objective", "is", "dpo"),
            Condition("post_training.label_smoothing", "is above", 0),
            Condition("post_training.loss_type", "is not one of", ("robust", "exo_pair", "aot", "aot_unpaired")),
        ),
        "post_training.label_smoothing has no effect with this loss_type in TRL; set post_training.loss_type: robust, "
        "or leave label_smoothing out",
    ),
    Rule(
        lambda r: r.post_training.shared_prefix and (r.model.kernels != "tigon" or r.model.attention != "sdpa"),
        "post_training.shared_prefix needs model.kernels: tigon and model.attention: sdpa; set them, or shared_prefix: "
        "false",
    ),
    Rule(
        lambda r: r.post_training.shared_prefix and r.train.attention_groups > 1,
        "post_training.shared_prefix and train.attention_groups both replace attention; set attention_groups: 1",
    ),
    Rule(
        lambda r: r.train.objective == "distill" and (r.post_training.beta or 0) > 1,
        "post_training.beta of distill is between 0 (forward KL) and 1 (reverse KL)",
    ),
)
"""Rules about the keys of `post_training` alone, which a plan checks too."""


def _holds_frozen_model(recipe: Recipe) -> bool:
    """Whether the run holds a reference or a teacher; adapters need no reference."""
    objective = recipe.train.objective
    compares = objective in ("dpo", "kto") or (objective == "grpo" and bool(recipe.post_training.beta))
    return objective == "distill" or (compares and not recipe.lora.used)


RULES = Rules(
    (
        *KEY_RULES,
        *_SETTINGS_RULES,
        Rule(
            lambda r: r.sharding.zero in (1, 2) and r.train.precision == "bf16" and _holds_frozen_model(r),
            "train.precision: bf16 with sharding.zero: 1 or 2: TRL's reference or teacher then runs without ZeRO, and "
            "DeepSpeed refuses bf16 states; set sharding.zero: 3, sharding.fsdp: true or train.precision: amp-bf16",
        ),
        Rule(
            (_POST_TRAINING, Condition("comparison.steps", "is at least", 1)),
            "comparison.steps compares kernels in ordinary training; with post-training set comparison.steps: 0",
        ),
        Rule(
            lambda r: (
                r.train.objective in ("dpo", "kto", "grpo")
                and r.lora.used
                and (r.lora.bias != "none" or r.lora.init not in ("default", "gaussian", "orthogonal"))
            ),
            "lora.bias and lora.init: the reference of this objective is the model without adapters, which these "
            "settings change; set lora.bias: none and lora.init: default",
        ),
        *POST_TRAINING.text_rules((*OF_TEXT, "data.packing")),
        Rule(
            (_POST_TRAINING, Condition("data.too_long", "is", "truncate")),
            "data.too_long: truncate would cut answers off, and a cut answer is another answer; set drop or error",
        ),
        Rule(
            lambda r: r.train.objective == "kto" and r.train.batch_size < 2,
            "train.batch_size is 1, but kto estimates its KL term from the other answers of a micro-batch; set 2 or "
            "more",
        ),
        Rule(
            lambda r: r.train.objective == "grpo" and not (r.post_training.rewards or r.post_training.environment),
            "train.objective: grpo needs a reward function; set post_training.rewards: module:function",
        ),
        Rule(
            lambda r: bool(
                r.post_training.max_tool_calling_iterations
                and not (r.post_training.tools or r.post_training.environment)
            ),
            "post_training.max_tool_calling_iterations has no effect without tools; set post_training.tools or "
            "environment, or leave it out",
        ),
        Rule(
            lambda r: r.train.objective == "grpo" and r.train.batch_size % r.post_training.generations != 0,
            "train.batch_size counts completions with grpo, and must be a multiple of post_training.generations",
        ),
        Rule(
            lambda r: (
                r.train.objective == "distill"
                and (r.post_training.teacher is None) == (r.post_training.base_steps == 0)
            ),
            "train.objective: distill needs one teacher: set post_training.teacher to a model, or for a preset "
            "post_training.base_steps to train one",
        ),
    )
)
