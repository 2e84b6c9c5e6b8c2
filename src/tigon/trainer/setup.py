"""What a run is made of: the recipe as a command names it, what follows from it on this machine, and the data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tigon.objectives import recipe_checks
from tigon.recipe.keys import ModelConfig, Recipe, TrainConfig
from tigon.techniques.technique import RunInfo
from tigon.trainer.distributed import launch, torchrun
from tigon.trainer.guards import preflight

if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase
    from typing_extensions import Self

    from tigon.data.packing import Collator, SampleDataset
    from tigon.objectives.base import Objective
    from tigon.techniques.keys.settings import Settings


@dataclass(frozen=True)
class Request:
    """The recipe file, and the options that replace keys of it."""

    path: Path
    overrides: tuple[str, ...] = ()
    """`section.key=value` texts."""

    def recipe(self) -> Recipe:
        """Read and check the recipe. Raises RecipeError."""
        return recipe_checks.load(self.path, self.overrides, gpu_present=preflight.gpu_present)

    def having(self, overrides: Sequence[str]) -> Request:
        """The same with more overrides, which come last."""
        return replace(self, overrides=(*self.overrides, *overrides))

    @property
    def words(self) -> list[str]:
        """The file and the overrides as words of a command line."""
        return [str(self.path), *(word for text in self.overrides for word in ("--set", text))]

    @property
    def command(self) -> str:
        """The command of the run, without --resume."""
        return shlex.join(["tigon", "train", *self.words, *torchrun.options()])


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a trainer trains on: samples, or the rows of which a trainer of TRL makes its own."""

    train: SampleDataset | datasets.Dataset
    eval: SampleDataset | datasets.Dataset | None = None
    """What the eval loss is measured on; None: no evaluation."""
    collator: Collator | None = None
    """Makes a batch of samples."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """The tokenizer of the rows."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A recipe, the device, the techniques' keys, and the model that the recipe names."""

    recipe: Recipe
    device: torch.device
    settings: Settings
    """The techniques' keys. The recipe's `precision: auto` is decided in them."""
    config: PreTrainedConfig
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter by name; tied ones once."""
    objective: Objective
    wrong_ops: Mapping[str, str] = field(default_factory=dict)
    """Ops that failed their self-test, with the reason. The model keeps its own code for them."""

    @property
    def run_info(self) -> RunInfo:
        """The properties of the run that techniques use."""
        text, objective = self.config.get_text_config(), self.objective
        return RunInfo(
            device=self.device.type,
            shapes=self.shapes,
            hidden_size=int(getattr(text, "hidden_size", 0)),
            processes=launch.world_size(),
            runs_layers_once=objective.trl is None and objective.planned().own_parameters is None,
        )

    def starting_model(self, run: Path) -> ModelConfig:
        """The `model` section to load: the recipe's, or that of the model which was trained before. run: its folder."""
        base, model = self.objective.base, self.recipe.model
        return model if base is None or base.makes_teacher else base.trained(model, run)

    def with_model(self, model: ModelConfig, config: PreTrainedConfig | None = None) -> Self:
        """The same with another `model` section. config: The config of its model; None: it has the same one."""
        return replace(self, recipe=replace(self.recipe, model=model), config=config or self.config)

    def with_train(self, train: TrainConfig) -> Self:
        """The same with another `train` section. The techniques stay."""
        return replace(self, recipe=replace(self.recipe, train=train))

    def without_adapters(self, **keys: int) -> Self:
        """The same without adapters and activation checkpoints. keys: More keys of `train` among the techniques'."""
        others = {f"train.{name}": value for name, value in keys.items()}
        plain = {"lora.rank": None, "lora.quantize": False, "lora.base_offload": False, "train.checkpointing": "none"}
        return replace(self, settings=self.settings.having({**plain, **others}))
