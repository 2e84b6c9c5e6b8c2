"""What does not go with classification. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from tigon.objectives.rules.rows import OF_TEXT, RowObjectives
from tigon.recipe.keys import Recipe
from tigon.recipe.rules import Rule, Rules, broken
from tigon.techniques.condition import Condition
from tigon.techniques.keys.settings import Settings

CLASSIFICATION = RowObjectives(
    names=("classify", "classify_tokens"),
    title="classification",
    rows="rows with labels",
    head="is the language model's, and a new classification head is trained whole",
    kernels="tigon or none",
)
_CLASSIFIES = CLASSIFICATION.chosen
_SETTINGS_RULES = (
    *CLASSIFICATION.settings_rules(),
    Rule(
        (_CLASSIFIES, Condition("sharding.zero", "is", 3)),
        "sharding.zero: 3 has not been tried with a new classification head; set sharding.zero: 2 or less",
    ),
    Rule(
        (_CLASSIFIES, Condition("sharding.fsdp", "is", True)),
        "sharding.fsdp has not been tried with a new classification head; set sharding.fsdp: false",
    ),
    Rule(
        (_CLASSIFIES, Condition("train.loss_memory_mib", "is at least", 1)),
        "train.loss_memory_mib limits the logits of a vocabulary, which a classification lacks; set "
        "train.loss_memory_mib: 0",
    ),
)
"""Techniques that do not go with classification. Recipe and planner use the same rules."""


def classifies(recipe: Recipe) -> bool:
    """Whether the recipe trains a classification head."""
    return _CLASSIFIES.holds(recipe)


def refusals(objective: str, settings: Settings) -> Iterator[str]:
    """The reasons why a classification cannot be trained with these settings, one sentence each."""
    return broken(_SETTINGS_RULES, settings, {"train.objective": objective})


RULES = Rules(
    (
        *_SETTINGS_RULES,
        *CLASSIFICATION.text_rules((*OF_TEXT, "eval.generate", "eval.lm_eval")),
        Rule(
            (_CLASSIFIES, Condition("data.packing", "is", True)),
            "data.packing: true puts several texts into a sample, and each text has its own label; leave it out",
        ),
        Rule(
            (_CLASSIFIES, Condition("data.images", "is at least", 1)),
            "data.images has not been tried with classification; set data.images: 0",
        ),
        Rule(
            (_CLASSIFIES, Condition("heads.stage", "is not", None)),
            "heads.stage adds heads that predict tokens; leave heads out of a classification",
        ),
    )
)
