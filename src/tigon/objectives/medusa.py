"""Heads on the model that predict several tokens ahead: their checks, their plan and their training.

The trainer handles them through a callback, tigon.medusa.callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tigon import medusa
from tigon.errors import RecipeError, UsageError
from tigon.medusa.attach import NAME, check_fits, scoring
from tigon.medusa.heads import make_heads
from tigon.medusa.spec import HeadsSpec, scheduled, shares_head
from tigon.models.loading.config import build_on_meta
from tigon.models.loading.presets import PRESETS
from tigon.objectives.base import AddedModules, BaseTraining, Objective, PlannedObjective, Reduce
from tigon.objectives.recipe_checks import heads_refusals
from tigon.recipe.keys import HeadsConfig, Recipe
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEADS = "heads"


# --- before the model -------------------------------------------------------------------------------------------------


def check(recipe: Recipe, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> HeadsSpec:
    """Check the heads of a recipe against its model, and return their spec.

    Args:
        recipe: A recipe with heads.
        config: The model's config.
        shapes: The shapes of the model's parameters by name.

    Raises:
        RecipeError: The heads do not fit the model, or heads.base_steps is set for a trained model.
    """
    heads = recipe.heads
    if heads.base_steps and recipe.model.name not in PRESETS:
        raise RecipeError(
            f"heads.base_steps is {heads.base_steps}, but {recipe.model.name} has trained weights, because it is not "
            "a preset; set it to 0"
        )
    text = config.get_text_config()
    if heads.start is not None:
        spec, state = _read(heads.start)
        wide, width = _width(state), text.hidden_size
        if wide != width:
            raise RecipeError(
                f"heads.start: {heads.start} has heads for hidden states of width {wide}, but {recipe.model.name} has "
                f"width {width}; give heads that were trained on this model"
            )
        _check_agrees(heads, spec)
        try:
            check_fits(make_heads(spec, build_on_meta(recipe.model.name, config)), state)
        except UsageError as error:
            raise RecipeError(f"heads.start: {heads.start}: {error}") from None
        return spec
    asked = {name: getattr(heads, name) for name in ("kind", "count", "layers")}
    new = HeadsSpec(**{name: value for name, value in asked.items() if value is not None})
    model = sum(math.prod(shape) for shape in shapes.values())
    shared = shares_head(heads.output, new.kind, new.count, model, text.vocab_size * text.hidden_size)
    if shared and new.kind == "medusa" and new.layers == 0:
        raise RecipeError(
            "heads.layers is 0 and the heads share the model's lm_head, so the heads have no weights to train; set "
            "heads.layers to 1"
        )
    return replace(new, shared=shared)


def _check_agrees(heads: HeadsConfig, spec: HeadsSpec) -> None:
    """Raise RecipeError if a key of the recipe does not match the heads in `heads.start`."""
    output = "shared" if spec.shared else "separate"
    of_start = {"kind": spec.kind, "count": spec.count, "layers": spec.layers, "output": output}
    for name, is_there in of_start.items():
        wanted = getattr(heads, name)
        if wanted not in (None, "auto", is_there):
            raise RecipeError(
                f"heads.{name} is {wanted}, but the heads in {heads.start} have {name} {is_there}; leave heads.{name} "
                "out, or leave heads.start out to train new heads"
            )


def _width(state: Mapping[str, torch.Tensor]) -> int:
    """H, the width of the hidden states that the heads take.

    An MTP module has an (H, 2H) projection. Medusa heads have (H, H) blocks, or without blocks a (V, H) output layer.
    """
    joins = [tensor.shape[0] for name, tensor in state.items() if name.endswith("eh_proj.weight")]
    return int(joins[0] if joins else next(iter(state.values())).shape[-1])


def _read(start: str) -> tuple[HeadsSpec, dict[str, torch.Tensor]]:
    try:
        return medusa.load_heads(Path(start))
    except UsageError as error:
        raise RecipeError(f"heads.start: {' '.join(str(error).split())[:240]}") from None


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedMedusa(PlannedObjective):
    """These heads, ready to be attached to a model that the planner traces."""

    reads_whole_weights: ClassVar[bool] = True
    own_parameters: ClassVar[str | None] = f"{NAME}."
    spec: HeadsSpec
    minimised: medusa.Objective

    def attach(self, model: PreTrainedModel) -> Any:
        medusa.attach(model, self.spec, self.minimised)
        return model

    def evaluation_passes(self, model: PreTrainedModel) -> tuple[AbstractContextManager[Any], ...]:
        return (*super().evaluation_passes(model), scoring(model))

    def refusals(self, settings: Settings) -> tuple[str, ...]:
        return tuple(heads_refusals(self.minimised.stage, self.spec.kind, settings))

    def recipe_keys(self) -> Mapping[str, Any]:
        spec = self.spec
        output = "shared" if spec.shared else "separate"
        own = {} if spec.kind == "mtp" else {"heads.layers": spec.layers, "heads.output": output}
        common = {"heads.stage": self.minimised.stage, "heads.kind": spec.kind, "heads.count": spec.count}
        return common | own

    def description(self) -> str:
        what = "MTP modules" if self.spec.kind == "mtp" else "Medusa heads"
        output = "the model's lm_head" if self.spec.shared else "an output weight each"
        return f"{self.spec.count} {what} with {output}, stage {self.minimised.stage}"


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class MedusaTraining(Objective):
    """Medusa heads or MTP modules, trained on a frozen model (stage 1) or with it (stage 2)."""

    recipe: Recipe = field(kw_only=True)
    spec: HeadsSpec = field(kw_only=True)

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: PreTrainedConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> MedusaTraining | None:
        if recipe.heads.stage is None:
            return None
        return cls(recipe.model, recipe=recipe, spec=check(recipe, config, shapes()))

    @property
    def name(self) -> str:
        return HEADS

    @property
    def heads(self) -> HeadsConfig:
        return self.recipe.heads

    @property
    def announcement(self) -> str:
        spec = self.spec
        what = "MTP modules" if spec.kind == "mtp" else f"Medusa heads of {spec.layers} residual blocks"
        output = "the model's lm_head" if spec.shared else "an output weight each"
        learning = "trains the heads, the model is frozen" if self.heads.stage == 1 else "trains model and heads"
        return f"{self.name:<8} {spec.count} {what}, {output}; stage {self.heads.stage}: {learning}"

    @property
    def base(self) -> BaseTraining | None:
        if not self.heads.base_steps:
            return None
        train = self.recipe.train.shortened(self.heads.base_steps)
        return BaseTraining(train=replace(train, checkpointing="none"))

    @property
    def added(self) -> AddedModules:
        from tigon.medusa.callback import HeadsCallback  # loads transformers

        heads, model = self.heads, self.recipe.model
        return HeadsCallback(
            stage=self._minimised().stage,
            multiplier=heads.learning_rate_multiplier,
            schedule=partial(scheduled, heads.schedule, ramp=heads.ramp),
            trained_on=None if model.name in PRESETS else model.name,
            sample_tokens=self.recipe.output.sample_tokens,
        )

    def attach(self, built: PreTrainedModel) -> Any:
        start = self.heads.start
        state = _read(start)[1] if start is not None else None
        try:
            medusa.attach(built, self.spec, self._minimised(), state)
        except UsageError as error:
            raise RecipeError(f"heads.start: {start}: {error}") from None
        return built

    def metrics(self, model: PreTrainedModel, reduce: Reduce) -> dict[str, float]:
        metrics: dict[str, float] = medusa.heads_of(model).state.take(reduce)
        return metrics

    def planned(self) -> PlannedMedusa:
        return PlannedMedusa(self.spec, self._minimised())

    def _minimised(self) -> medusa.Objective:
        heads = self.heads
        assert heads.stage is not None
        return medusa.Objective(stage=heads.stage, decay=heads.decay, coefficient=heads.coefficient)


OBJECTIVE = MedusaTraining
