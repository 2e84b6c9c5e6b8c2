"""Makes TRL's trainer for a run: its config, data sets, reference model, teacher and reward functions.

`GuardedTrainer` stands in front of TRL's class, so that records, checkpoints, signals and steps that are not finite are
handled as in every run. Losses and metrics are TRL's. With `model.kernels: tigon` its head is tigon's.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from tigon.errors import RecipeError
from tigon.integrations.trl import UnfusedWarning, fuse
from tigon.integrations.trl.layers import SameLayers
from tigon.objectives.base import TrlTraining
from tigon.recipe.keys import ModelConfig
from tigon.trainer import engine
from tigon.trainer import model as models
from tigon.trainer import trainer as trainers
from tigon.trainer.guarded import GuardedTrainer, Safeguards
from tigon.trainer.guards import self_test
from tigon.trainer.rewards import load_rewards

if TYPE_CHECKING:
    from tigon.trainer.prepare import Prepared


@dataclass(frozen=True)
class TrlCounters:
    """TRL's metrics since the last record and its count of tokens, which its checkpoints lack."""

    trainer: Any

    def counted(self) -> dict[str, Any]:
        metrics = {name: [float(value) for value in values] for name, values in self._metrics.items()}
        return {"trl": metrics, "tokens": getattr(self.trainer, "_total_train_tokens", 0)}

    def resume_counting(self, counted: Mapping[str, Any]) -> None:
        for name, values in counted["trl"].items():
            self._metrics[name] = list(values)
        if hasattr(self.trainer, "_total_train_tokens"):
            self.trainer._total_train_tokens = counted["tokens"]

    @property
    def _metrics(self) -> dict[str, list[Any]]:
        """The values of each metric in the steps since the last record. ORPO's trainer has its own name for them."""
        stored = hasattr(self.trainer, "_stored_metrics")
        metrics: dict[str, list[Any]] = (self.trainer._stored_metrics if stored else self.trainer._metrics)["train"]
        return metrics


def make(folder: Path, prepared: Prepared, built: Any, safeguards: Safeguards) -> GuardedTrainer:
    """TRL's trainer of a run, ready to train.

    Args:
        folder: The run folder.
        prepared: The prepared run, with its rows.
        built: The model, with its techniques and what its objective attaches.
        safeguards: The settings of the guards.

    Raises:
        RecipeError: TRL refuses the options of the objective.
    """
    spec, recipe = prepared.objective.trl, prepared.recipe
    assert spec is not None and prepared.rows is not None, "a post-training run has rows"
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")  # TRL's own use
    package = importlib.import_module(spec.package)
    kind = type("Guarded" + spec.trainer, (GuardedTrainer, getattr(package, spec.trainer)), {})
    train_rows, eval_rows = (rows if len(rows) else None for rows in prepared.rows)
    more = {
        **_reference(spec, folder, prepared), **_teacher(spec, folder, prepared),
        **({"reward_funcs": load_rewards(spec.rewards)} if spec.rewards else {}),
    }  # fmt: skip
    tokenizer = prepared.tokenizer
    adapters = {name: weight.data for name, weight in built.named_parameters() if weight.requires_grad}
    try:
        args = getattr(package, spec.config)(**_arguments(spec, folder, prepared))
        trainer: GuardedTrainer = kind(
            model=built, args=trainers.without_data_parallel(args), train_dataset=train_rows, eval_dataset=eval_rows,
            processing_class=tokenizer, **more,
        )  # fmt: skip
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RecipeError(
            f"train.objective: {recipe.train.objective}: TRL refuses it: {' '.join(str(error).split())[:300]}"
        ) from error
    for name, weight in built.named_parameters():  # TRL rounds those of a 4-bit model to bf16
        if name in adapters:
            weight.data = adapters[name]
    adapted = getattr(trainer.model, "peft_config", {})
    if "ref" in adapted:  # a copy of the new adapter; without it TRL switches the adapters off, which is the same model
        trainer.model.delete_adapter("ref")
    trainer.guard(prepared.objective, safeguards, engine.make_optimizer(recipe.train, prepared.settings))
    trainer.counters.append(TrlCounters(trainer))
    if recipe.model.kernels == "tigon":
        trainer.fused = _fused(trainer)
    else:
        trainer.add_callback(SameLayers(trainer))  # GRPO's reference, which TRL loads
    return trainer


def _arguments(spec: TrlTraining, folder: Path, prepared: Prepared) -> dict[str, Any]:
    values = trainers.argument_values(
        prepared.recipe.train, prepared.settings, prepared.run_info, folder=folder / "checkpoints",
        device=prepared.device, evaluate=bool(prepared.rows and prepared.rows[1]),
    )  # fmt: skip
    # TRL's own defaults are bf16 and activation checkpointing; here both are techniques of the recipe.
    return {"bf16": False, "gradient_checkpointing": False, **values, **spec.options}


def _reference(spec: TrlTraining, folder: Path, prepared: Prepared) -> dict[str, Any]:
    """The model before training, frozen; adapters need none, because TRL can switch them off."""
    if not spec.takes_reference or prepared.settings.lora.rank is not None:
        return {}
    return {"ref_model": _frozen(prepared.starting_model(folder), prepared.config, folder, prepared)}


def _teacher(spec: TrlTraining, folder: Path, prepared: Prepared) -> dict[str, Any]:
    if spec.teacher is None:
        return {}
    teacher = spec.teacher(folder)
    return {"teacher_model": _frozen(teacher, models.load_config(teacher), folder, prepared)}


def _frozen(model: ModelConfig, config: Any, folder: Path, prepared: Prepared) -> Any:
    """A model that is not trained, with tigon's kernels."""
    recipe, settings = (
        prepared.recipe,
        prepared.settings.having({"lora.rank": None, "lora.quantize": False, "train.checkpointing": "none"}),
    )
    built, _ = engine.build(
        model, config, settings, prepared.run_info, device=prepared.device, seed=recipe.train.seed,
        kernels=recipe.model.kernels, base=folder / "base", ops=self_test.without(prepared.wrong_ops),
    )  # fmt: skip
    engine.refuse_nonfinite(built, model)
    return built.requires_grad_(False).eval()


def _fused(trainer: GuardedTrainer) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfusedWarning)  # the report says it
        result = fuse(trainer)
    lines = [f"TRL's {name}: tigon's head" for name in result.fused]
    lines += [f"TRL's {name}: the layers of the trained model" for name in result.layers]
    return "\n".join([*lines, *(f"TRL's {name}: not fused, {why}" for name, why in result.unfused.items())])
