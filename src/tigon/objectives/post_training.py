"""The base class of the objectives that TRL's trainers carry out. Each objective has one file.

Before the objective's own steps, a preset may be trained on the rows' answers (`post_training.base_steps`), because its
weights are random.
"""

from __future__ import annotations

import importlib.metadata
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tigon.data.packing import Collator, Packed, pack
from tigon.data.tokenizer import Encoded
from tigon.errors import RecipeError
from tigon.models.loading.presets import PRESETS
from tigon.objectives import post_training_rules
from tigon.objectives.base import BaseTraining, PlannedObjective, Rows, TrlTraining
from tigon.objectives.causal_lm import CausalLM
from tigon.recipe.keys import DataConfig, PostTrainingConfig, Recipe

TRL_VERSIONS = ((1, 16), (1, 17))
"""The first version of TRL with these trainers, and the first one that tigon has not been tried with."""


@dataclass(kw_only=True)
class PostTraining(CausalLM):
    """The base class of the objectives. `tigon.objectives.base.Objective` documents each method."""

    recipe: Recipe

    @classmethod
    def file_name(cls) -> str:
        """The objective's value of `train.objective`: the name of its file."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> PostTraining | None:
        if recipe.train.objective != cls.file_name():
            return None
        _check_trl(cls.file_name())
        if recipe.post_training.base_steps and recipe.model.name not in PRESETS:
            raise RecipeError(
                f"post_training.base_steps is {recipe.post_training.base_steps}, but {recipe.model.name} has trained "
                "weights, because it is not a preset; set it to 0"
            )
        made = cls(config=recipe.model, recipe=recipe)
        made.check(config)
        return made

    @classmethod
    def planned_for(cls, recipe: Recipe) -> PlannedObjective:
        """The objective of a recipe as the planner traces it. The plan needs neither TRL nor the rows."""
        return cls(config=recipe.model, recipe=recipe).planned()

    def check(self, config: Any) -> None:
        """Raise RecipeError if the objective does not fit the model with this config."""

    @property
    def own(self) -> PostTrainingConfig:
        return self.recipe.post_training

    @property
    @abstractmethod
    def trl(self) -> TrlTraining: ...

    @property
    def name(self) -> str:
        return self.file_name()

    def given(self, *names: str) -> dict[str, Any]:
        """The keys of `post_training` that the recipe gives, as arguments of TRL's config of the same name."""
        values = {name: getattr(self.own, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @abstractmethod
    def planned(self) -> PlannedObjective: ...

    def planned_keys(self) -> tuple[tuple[str, Any], ...]:
        """The keys of `post_training` that the recipe sets, with their values."""
        default = PostTrainingConfig()
        values = ((name, getattr(self.own, name)) for name in post_training_rules.TAKES[self.file_name()])
        return tuple((name, value) for name, value in values if value != getattr(default, name))

    @property
    def announcement(self) -> str | None:
        base = f", after {self.own.base_steps} steps of ordinary training" if self.own.base_steps else ""
        return f"{self.name:<8} TRL's {self.trl.trainer}{base}"

    @property
    def base(self) -> BaseTraining | None:
        if not self.own.base_steps:
            return None
        return BaseTraining(
            train=replace(
                self.recipe.train, steps=self.own.base_steps, epochs=None, eval_steps=None, save_steps=None,
                checkpointing="none", learning_rate=BASE_LEARNING_RATE, batch_size=BASE_BATCH_SIZE,
                gradient_accumulation=1,
            ),
            makes_teacher=self.trl.teacher is not None,
        )  # fmt: skip

    def rows(self, data: DataConfig) -> Rows:
        """The samples are those of the ordinary training before the run."""

        def packed(encoded: Sequence[Encoded]) -> Packed:
            # Rows of prompts have no learned token. They stand for the rows in the fingerprint and the text sample.
            return pack(
                encoded, data.sequence_length, packing=False, cross_document=False, too_long="error",
                keep_unlearned=not self.own.base_steps,
            )  # fmt: skip

        return Rows(layout=self.trl.rows, pack=packed, collator=lambda pad_id, flatten: Collator(pad_id, packing=False))


BASE_LEARNING_RATE, BASE_BATCH_SIZE = 3e-3, 16
"""For the ordinary training of a preset's random weights, which needs another rate than the objective."""


def _check_trl(objective: str) -> None:
    first, beyond = (".".join(map(str, version)) for version in TRL_VERSIONS)
    install = f"pip install 'trl>={first},<{beyond}'"
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise RecipeError(f"train.objective: {objective} needs TRL, which is not installed: {install}") from None
    if not TRL_VERSIONS[0] <= tuple(int(part) for part in version.split(".")[:2]) < TRL_VERSIONS[1]:
        raise RecipeError(f"train.objective: {objective} needs TRL {first}, and {version} is installed: {install}")
