"""What does not go with classification. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from tigon.errors import RecipeError
from tigon.recipe.keys import DataConfig, EvalConfig, Recipe
from tigon.recipe.rules import Rule, Rules
from tigon.techniques.condition import Condition
from tigon.techniques.keys.settings import Settings

OBJECTIVES = ("classify", "classify_tokens")
_CLASSIFIES = Condition("train.objective", "is one of", OBJECTIVES)
_SETTINGS_RULES = (
    Rule(
        (_CLASSIFIES, Condition("sharding.sequence", "is at least", 2)),
        "sharding.sequence cuts rows, and a classification reads each whole; set sharding.sequence: 1",
    ),
    Rule(
        (_CLASSIFIES, Condition("sharding.tensor", "is at least", 2)),
        "sharding.tensor has not been tried with classification; set sharding.tensor: 1",
    ),
    Rule(
        (_CLASSIFIES, Condition("sharding.zero", "is", 3)),
        "sharding.zero: 3 has not been tried with a new classification head; set sharding.zero: 2 or less",
    ),
    Rule(
        (_CLASSIFIES, Condition("sharding.fsdp", "is", True)),
        "sharding.fsdp has not been tried with a new classification head; set sharding.fsdp: false",
    ),
    Rule(
        (_CLASSIFIES, Condition("model.kernels", "is", "liger")),
        "model.kernels: liger has not been tried with classification; set model.kernels to tigon or none",
    ),
    Rule(
        (_CLASSIFIES, Condition("lora.rank", "is not", None), Condition("lora.targets", "includes", "head")),
        "lora.targets: head is the language model's, and a new classification head is trained whole; leave head out",
    ),
    Rule(
        (_CLASSIFIES, Condition("train.loss_memory_mib", "is at least", 1)),
        "train.loss_memory_mib limits the logits of a vocabulary, which a classification lacks; set "
        "train.loss_memory_mib: 0",
    ),
)
"""Techniques that do not go with classification. Recipe and planner use the same rules."""
_OF_TEXT = ("format", "template", "learn", "cross_document_attention")


def _changed(section: str, name: str, default: object) -> Rule:
    return Rule(
        lambda r: r.train.objective in OBJECTIVES and getattr(getattr(r, section), name) != default,
        f"{section}.{name} is for text that a model continues, and a classification takes rows with labels; leave "
        f"{section}.{name} out",
    )


def classifies(recipe: Recipe) -> bool:
    """Whether the recipe trains a classification head."""
    return recipe.train.objective in OBJECTIVES


def refuse(recipe: Recipe, command: str) -> None:
    """Raise RecipeError if `command` cannot handle the recipe's objective, because its rows are not text."""
    if classifies(recipe):
        raise RecipeError(
            f"{command} does not know train.objective: {recipe.train.objective}, whose rows have labels; run it with "
            "`tigon train`"
        )


def refusals(objective: str, settings: Settings) -> Iterator[str]:
    """The reasons why a classification cannot be trained with these settings, one sentence each."""
    recipe = Recipe.around(settings, {"train.objective": objective})
    return (rule.reason for rule in _SETTINGS_RULES if rule.breaks(recipe))


RULES = Rules(
    (
        *_SETTINGS_RULES,
        *(_changed("data", name, getattr(DataConfig(), name)) for name in _OF_TEXT),
        *(_changed("eval", name, getattr(EvalConfig(), name)) for name in ("generate", "lm_eval")),
        Rule(
            (_CLASSIFIES, Condition("data.packing", "is", True)),
            "data.packing: true puts several texts into a sample, and each text has its own label; leave it out",
        ),
        Rule(
            (_CLASSIFIES, Condition("data.images", "is at least", 1)),
            "data.images has not been tried with classification; set data.images: 0",
        ),
        Rule(
            lambda r: classifies(r) and r.heads.stage is not None,
            "heads.stage adds heads that predict tokens; leave heads out of a classification",
        ),
    )
)
