"""Checks of recipe keys in relation to each other: exclusions, and keys that would do nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tigon.data.source.formats import check_source
from tigon.errors import DataError, RecipeError
from tigon.recipe.keys import NAME_CHARACTERS, RESERVED_NAMES, SECTIONS, Recipe
from tigon.techniques import SWITCHES
from tigon.techniques.condition import Condition, Switch
from tigon.techniques.keys.settings import Settings
from tigon.techniques.matrix import refusals


@dataclass(frozen=True)
class Rule:
    """Refuses a recipe for which all conditions hold. The recipe has values in place of `auto`."""

    when: tuple[Condition, ...] | Callable[[Recipe], bool]
    """Conditions, or a function for what they cannot say."""
    reason: str

    def breaks(self, recipe: Recipe) -> bool:
        if callable(self.when):
            return self.when(recipe)
        return all(condition.holds(recipe) for condition in self.when)


def broken(rules: Iterable[Rule], settings: Settings, keys: Mapping[str, Any]) -> Iterator[str]:
    """The reasons why these settings and recipe keys, with defaults for the others, are refused."""
    recipe = Recipe.around(settings, keys)
    return (rule.reason for rule in rules if rule.breaks(recipe))


@dataclass(frozen=True)
class Rules:
    """Checks of keys in relation to each other."""

    rules: tuple[Rule, ...] = ()
    switches: tuple[Switch, ...] = ()

    def __add__(self, other: Rules) -> Rules:
        return Rules(self.rules + other.rules, self.switches + other.switches)


def other_keys(section: str, but: str) -> tuple[str, ...]:
    """The dotted keys of a section, except one."""
    return tuple(f"{section}.{f.name}" for f in dataclasses.fields(SECTIONS[section]) if f.name != but)


def watches_eval_loss(recipe: Recipe) -> bool:
    """Whether the run compares the eval losses of its steps."""
    return recipe.train.load_best or recipe.train.early_stopping_patience is not None


_CHECKPOINTS = (
    Rule(
        (Condition("train.save_async", "is", True), Condition("sharding.zero", "is at least", 1)),
        "train.save_async writes PyTorch's distributed format, and DeepSpeed writes its own; set sharding.fsdp: true "
        "instead of sharding.zero, or train.save_async: false",
    ),
    Rule(
        lambda r: r.train.save_async and not r.train.optimizer_row.has_plain_states,
        "train.save_async takes optimizers with plain states; set train.optimizer: adamw, adamw-foreach, adafactor or "
        "sgd, or train.save_async: false",
    ),
)

_SCHEDULE = (
    Rule(
        lambda r: r.train.schedule == "warmup_stable_decay" and r.train.decay_steps is None,
        "train.schedule: warmup_stable_decay lowers the learning rate in the last steps; set train.decay_steps, "
        "e.g. to a tenth of the run's steps",
    ),
    Rule(
        lambda r: (
            r.train.schedule == "warmup_stable_decay"
            and r.train.steps is not None
            and r.train.warmup_steps + (r.train.decay_steps or 0) > r.train.steps
        ),
        "train.warmup_steps and train.decay_steps together exceed train.steps; lower one of them",
    ),
    Rule(
        lambda r: r.train.min_lr_rate > 0 and r.train.schedule in ("linear", "constant"),
        "train.min_lr_rate is the end of train.schedule: cosine and warmup_stable_decay; set one of them, or leave "
        "train.min_lr_rate out",
    ),
)

_EVALUATION = (
    Rule(
        lambda r: watches_eval_loss(r) and r.train.eval_steps is None,
        "train.load_best and train.early_stopping_patience compare evaluations during training; set train.eval_steps, "
        "e.g. 50",
    ),
    Rule(
        lambda r: watches_eval_loss(r) and not r.data.has_eval,
        "train.load_best and train.early_stopping_patience need an eval loss; set data.eval_fraction or "
        "data.eval_source",
    ),
    Rule(
        lambda r: r.train.load_best and bool((r.train.save_steps or 0) % (r.train.eval_steps or 1)),
        "train.load_best needs a train.save_steps that is a multiple of train.eval_steps; change one of them, or leave "
        "train.save_steps out",
    ),
    Rule(
        lambda r: r.train.load_best and (r.sharding.divides_states),
        "train.load_best has not been tried with sharding; set sharding.zero: 0 and sharding.fsdp: false, or "
        "train.load_best: false",
    ),
    Rule(
        lambda r: watches_eval_loss(r) and r.train.objective == "grpo",
        "train.load_best and train.early_stopping_patience go by the eval loss, which does not measure the rewards of "
        "grpo; leave them out",
    ),
    Rule(
        lambda r: bool(r.eval.generate or r.eval.lm_eval) and r.sharding.divides_weights,
        "eval.generate and eval.lm_eval need whole weights in one process; leave them out, or set sharding.zero to 2 "
        "or less and sharding.fsdp: false",
    ),
    Rule(
        lambda r: bool(r.eval.generate or r.eval.lm_eval) and r.train.objective == "reward",
        "eval.generate and eval.lm_eval need a model that writes text, and train.objective: reward trains one that "
        "gives scores; leave them out",
    ),
    Rule(
        (Condition("eval.lm_eval", "is not", ()), Condition("sharding.gpus", "is at least", 2)),
        "eval.lm_eval runs in one process, for which the others would wait; set sharding.gpus: 1, or run lm_eval on "
        "the saved model",
    ),
)

_WRITES = (Condition("eval.generate", "is not", ()), Condition("eval.lm_eval", "is not", ()))
_HAS_IMAGES = Condition("data.images", "is at least", 1)
_IMAGES = (
    *(
        Rule((_HAS_IMAGES, condition), reason)
        for condition, reason in (
            (
                Condition("train.objective", "is not one of", ("auto", "vision_language")),
                "data.images trains the next token's loss; set train.objective: auto, or data.images: 0",
            ),
            (
                Condition("data.template", "is", "plain"),
                "data.template: plain has no place for data.images; set data.template: auto",
            ),
            (
                Condition("data.tokenizer", "is not", "auto"),
                "data.tokenizer replaces the tokenizer of a model's processor, which data.images needs; leave it out",
            ),
            (
                Condition("data.too_long", "is", "truncate"),
                "data.too_long: truncate could cut through an image's tokens; with data.images set it to error or drop",
            ),
            (
                Condition("data.columns", "is not one of", (None, {})),
                "data.columns has not been tried with data.images; rename the columns in the data: messages and images",
            ),
            (
                Condition("sharding.sequence", "is at least", 2),
                "sharding.sequence divides rows of text; with data.images set sharding.sequence: 1",
            ),
        )
    ),
    *(
        Rule(
            (_HAS_IMAGES, writes),
            "eval.generate and eval.lm_eval write prompts without images; with data.images leave them out",
        )
        for writes in _WRITES
    ),
)

# The checks that techniques declare, and those of the comparison. `refusals` covers pairs of techniques.
_RULES = Rules(
    (
        Rule(
            lambda r: r.sharding.sequence_method == "ring" and r.data.packs and not r.data.cross_document_attention,
            "sharding.sequence_method: ring has no mask that separates packed documents; set "
            "data.cross_document_attention: true or data.packing: false, or sharding.sequence_method: ulysses",
        ),
        Rule(
            lambda r: bool(r.comparison.steps) and (r.sharding.gpus > 1 or r.sharding.divides_states),
            "comparison.steps needs one process without sharding; set comparison.steps: 0",
        ),
        Rule(
            (Condition("comparison.steps", "is at least", 1), Condition("lora.rank", "is not", None)),
            "comparison.steps compares kernels in full fine-tuning; with lora.rank set comparison.steps: 0",
        ),
        *_CHECKPOINTS,
        *_SCHEDULE,
        *_EVALUATION,
        *_IMAGES,
        Rule(
            lambda r: "none" in r.train.report_to and len(r.train.report_to) > 1,
            "train.report_to names none and a tracker; keep one of them",
        ),
    ),
    (
        Switch(
            ("train.save_async",),
            "train.save_steps",
            lambda r: r.train.save_steps is not None or r.train.load_best,
            "train.save_steps: 100",
        ),
        Switch(
            ("train.decay_steps",),
            "train.schedule",
            lambda r: r.train.schedule == "warmup_stable_decay",
            "train.schedule: warmup_stable_decay",
        ),
        Switch(("data.image_size",), "data.images", lambda r: r.data.images > 0, "data.images: 1"),
        Switch(("output.merge",), "lora.rank", lambda r: r.lora.used, "lora.rank: 16"),
        Switch(
            ("output.merge", "output.dtype", "output.max_shard_size"),
            "output.save_model",
            lambda r: r.output.save_model,
            "output.save_model: true",
        ),
        Switch(("eval.generate_tokens",), "eval.generate", lambda r: bool(r.eval.generate), "eval.generate: [PROMPT]"),
        Switch(("eval.lm_eval_limit",), "eval.lm_eval", lambda r: bool(r.eval.lm_eval), "eval.lm_eval: [TASK]"),
        *SWITCHES,
        Switch(
            other_keys("comparison", "steps"),
            "comparison.steps",
            lambda r: r.comparison.steps > 0,
            "comparison.steps: 6",
        ),
    ),
)


def check_combinations(recipe: Recipe, path: object, more: Rules) -> None:
    """Refuse keys and techniques that exclude each other.

    Args:
        recipe: The recipe.
        path: Its file, for the message.
        more: The rules of the objectives.

    Raises:
        RecipeError: The recipe has such keys, or a value that no run can use. The message begins with `path`.
    """
    train, output = recipe.train, recipe.output
    if (train.steps is None) == (train.epochs is None):
        complaint = "both are given" if train.steps is not None else "neither is given"
        raise RecipeError(f"{path}: train.steps and train.epochs: {complaint}; give exactly one, e.g. train.steps: 200")
    if problem := folder_name_problem(output.name, NAME_CHARACTERS):
        complaint = f"output.name is {output.name!r}, but must name one folder inside output.folder"
        raise RecipeError(f"{path}: {complaint}: {problem}")
    if not output.folder.strip() or "\0" in output.folder:
        raise RecipeError(f"{path}: output.folder is {output.folder!r}; name a folder, such as runs")
    if recipe.comparison.steps == 1:
        raise RecipeError(f"{path}: comparison.steps is 1; the first step only warms up, so give 2 or more, or 0")
    if not recipe.data.source:
        raise RecipeError(f"{path}: data.source is empty; name a file, a folder or python-docs")
    try:
        for source in (*recipe.data.sources(), *recipe.data.eval_sources()):
            check_source(source)
    except DataError as error:
        raise RecipeError(f"{path}: {error}") from None
    resolved = recipe.resolved()
    for reason in refusals(resolved):
        raise RecipeError(f"{path}: {reason}")
    for rule in (_RULES + more).rules:
        if rule.breaks(resolved):
            raise RecipeError(f"{path}: {rule.reason}")


def folder_name_problem(name: str, most: int) -> str | None:
    """Why `name` is not a folder name of at most `most` characters, and what is allowed; None if it is one.

    A leading dash is refused because shell commands would read the folder's name as an option.
    """
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{most}}}", name):
        return f"use up to {most} letters, digits, '.', '_' and '-'"
    if name.startswith("-") or name.endswith("."):
        return "it may not begin with '-' or end with '.'"
    if re.fullmatch(RESERVED_NAMES, name):
        return "Windows reserves this name; use another"
    return None


def check_effects(recipe: Recipe, given_keys: typing.Collection[str], where: Callable[[str], str], more: Rules) -> None:
    """Refuse keys in `given_keys` (the keys that the user gave) that would do nothing. more: the objectives' rules.

    If the switch is given too, the keys are accepted, so that one key can turn a technique off.

    Raises:
        RecipeError: A key would do nothing.
    """
    resolved = recipe.resolved()
    for switch in (_RULES + more).switches:
        idle = [key for key in switch.keys if key in given_keys]
        if idle and switch.key not in given_keys and not switch.on(resolved):
            them, off = "it" if len(idle) == 1 else "them", json.dumps(recipe.value(switch.key))
            # A resumed run already has the keys, so only the third fix works there.
            raise RecipeError(
                f"{where(idle[0])}: {', '.join(idle)} would do nothing without {switch.key}, which is not given; add "
                f"{switch.instead}, remove {them}, or keep {them} without effect with {switch.key}: {off}"
            )
