"""The base class of the objectives that TRL's trainers carry out. Each objective has one file.

Before the objective's own steps, a preset may be trained on the rows' answers (`post_training.base_steps`), because its
weights are random.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tigon.data.packing import Collator, pack
from tigon.data.preferences import RowFormat
from tigon.errors import RecipeError
from tigon.models.loading.presets import PRESETS
from tigon.objectives.base import BaseTraining, Objective, PlannedObjective, Rows, TrlTraining
from tigon.objectives.post_training.planned import PlannedPostTraining
from tigon.objectives.post_training.reward_entries import entries_of
from tigon.objectives.rules import post_training as rules
from tigon.recipe.keys import DataConfig, ModelConfig, PostTrainingConfig, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OPTIONS: Mapping[str, str] = {"generations": "num_generations", "completion_length": "max_completion_length"}
"""Keys of `post_training` that TRL calls otherwise."""
_NO_OPTIONS = (
    "base_steps", "rewards", "shared_prefix", "teacher", "tools", "environment", "log_completions", "stop_reward_drop",
    "stop_clipped_share", "stop_patience", "generator", "generation",
)  # fmt: skip
TRL_VERSIONS = ((1, 16), (1, 17))
"""The first version of TRL with these trainers, and the first one that tigon has not been tried with."""


@dataclass(kw_only=True)
class PostTraining(Objective):
    """The base class of the objectives. `tigon.objectives.base.Objective` documents each method."""

    package: ClassVar[str] = "trl"
    trainer: ClassVar[str]
    row_format: ClassVar[RowFormat]
    planned_class: ClassVar[type[PlannedPostTraining]]
    takes_reference: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = False
    writes_text: ClassVar[bool] = True
    recipe: Recipe

    @classmethod
    def file_name(cls) -> str:
        """The objective's value of `train.objective`: the name of its file."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: PreTrainedConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> PostTraining | None:
        if recipe.train.objective != cls.file_name():
            return None
        _check_trl(cls.file_name())
        if rules.generation_of(recipe).get(rules.VLLM) and importlib.util.find_spec("vllm") is None:
            raise RecipeError(
                f"post_training.generation: {rules.VLLM} needs vLLM, which is not installed: pip install 'trl[vllm]'"
            )
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

    def check(self, config: PreTrainedConfig) -> None:
        """Raise RecipeError if the objective does not fit the model with this config."""

    def teacher(self, run: Path) -> ModelConfig:
        """The model to learn from, if `has_teacher`. run: The run folder."""
        raise NotImplementedError

    @property
    def own(self) -> PostTrainingConfig:
        return self.recipe.post_training

    @property
    def trl(self) -> TrlTraining:
        return TrlTraining(
            package=self.package,
            trainer=self.trainer,
            config=self.trainer.replace("Trainer", "Config"),
            rows=self.row_format,
            options=self._options(),
            takes_reference=self.takes_reference,
            teacher=self.teacher if self.has_teacher else None,
            shared_prefix=self.own.shared_prefix,
            rewards=entries_of(self.own.rewards),
            tools=self.own.tools,
            environment=self.own.environment,
        )

    def _options(self) -> dict[str, Any]:
        """The arguments of TRL's config that the recipe gives besides those of its `train` section."""
        takes = rules.TAKES[self.name]
        weights = [entry.weight for entry in entries_of(self.own.rewards)]
        values = {_OPTIONS.get(name, name): getattr(self.own, name) for name in takes if name not in _NO_OPTIONS}
        length = {} if "completion_length" in takes else {"max_length": self.recipe.data.sequence_length}
        weighted = {"reward_weights": weights} if any(weight != 1 for weight in weights) else {}
        given = {name: value for name, value in values.items() if value is not None}
        return length | weighted | given | dict(self.own.generation or {})

    @property
    def name(self) -> str:
        return self.file_name()

    def planned(self) -> PlannedObjective:
        return self.planned_class(self.name, self.planned_keys())

    def generator(self) -> str:
        """What writes completions: `post_training.generator`, unless TRL's options leave transformers alone."""
        return self.own.generator if rules.writes_by_generate(self.recipe) else "transformers"

    def other_writer(self) -> str:
        """What writes completions instead of the model's `generate`; empty if `generate` does."""
        return rules.other_writer(self.recipe)

    def planned_keys(self) -> tuple[tuple[str, Any], ...]:
        """The keys of `post_training` that the recipe sets, with their values."""
        default = PostTrainingConfig()
        values = ((name, getattr(self.own, name)) for name in rules.TAKES[self.file_name()])
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
                self.recipe.train.shortened(self.own.base_steps),
                checkpointing="none",
                learning_rate=BASE_LEARNING_RATE,
                batch_size=BASE_BATCH_SIZE,
                gradient_accumulation=1,
            ),
            makes_teacher=self.has_teacher,
        )

    def rows(self, data: DataConfig) -> Rows:
        """The samples are those of the ordinary training before the run."""

        # Rows of prompts have no learned token. They stand for the rows in the fingerprint and the text sample.
        packed = partial(
            pack,
            length=data.sequence_length,
            packing=False,
            cross_document=False,
            too_long="error",
            keep_unlearned=not self.own.base_steps,
        )

        def collator(pad_id: int, flatten: bool) -> Collator:
            return Collator(pad_id, packing=False)

        return Rows(layout=self.row_format, pack=packed, collator=collator)


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
