"""What does not go with classification and post-training alike: their rows are no text that a model continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.recipe.rules import Rule
from tigon.techniques.condition import Condition

OF_TEXT = ("data.format", "data.template", "data.learn", "data.cross_document_attention")
"""Keys of documents of text."""


@dataclass(frozen=True)
class RowObjectives:
    """Objectives of one kind."""

    names: tuple[str, ...]
    """The values of `train.objective`."""
    title: str
    """The kind of training, as the end of a sentence."""
    rows: str
    """The rows, as the end of a sentence that begins with `title`."""
    head: str
    """Why `lora.targets: head` is refused."""
    kernels: str
    """The values of `model.kernels` besides `liger`."""

    @property
    def chosen(self) -> Condition:
        return Condition("train.objective", "is one of", self.names)

    def refuse(self, recipe: Recipe, command: str) -> None:
        """Raise RecipeError if `command` cannot handle the recipe's objective."""
        if self.chosen.holds(recipe):
            raise RecipeError(
                f"{command} does not know train.objective: {recipe.train.objective}, because {self.title} takes "
                f"{self.rows}; run it with `tigon train`"
            )

    def settings_rules(self) -> Iterator[Rule]:
        """Techniques that do not go with these objectives. Recipe and planner use the same rules."""
        untried = f"has not been tried with {self.title}"
        adapts = Condition("lora.rank", "is not", None)
        for conditions, reason in (
            (
                (Condition("sharding.sequence", "is at least", 2),),
                f"sharding.sequence cuts rows, and {self.title} reads each row whole; set sharding.sequence: 1",
            ),
            ((Condition("sharding.tensor", "is at least", 2),), f"sharding.tensor {untried}; set sharding.tensor: 1"),
            (
                (Condition("model.kernels", "is", "liger"),),
                f"model.kernels: liger {untried}; set model.kernels to {self.kernels}",
            ),
            (
                (adapts, Condition("lora.targets", "includes", "head")),
                f"lora.targets: head {self.head}; leave head out of lora.targets",
            ),
        ):
            yield Rule((self.chosen, *conditions), reason)

    def text_rules(self, keys: Iterable[str]) -> Iterator[Rule]:
        """Keys that do nothing here, because they are for text."""
        for key in keys:
            default = Recipe().value(key)
            yield Rule(
                (self.chosen, Condition(key, "is not", default)),
                f"{key} is for text that a model continues, and {self.title} takes {self.rows}; leave {key} out",
            )
