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
from typing import TYPE_CHECKING, Any, cast

import datasets

from tigon.errors import RecipeError, UsageError
from tigon.integrations.trl import GraphGeneration, UnfusedWarning, decode_in_graphs, fuse
from tigon.integrations.trl.layers import SameLayers
from tigon.objectives.base import TrlTraining
from tigon.objectives.rules.post_training import generator_obstacle, writes_by_generate
from tigon.trainer import engine
from tigon.trainer.arguments import arguments, learning_rates, make_optimizer, without_data_parallel
from tigon.trainer.guarded import GuardedTrainer, Safeguards
from tigon.trainer.model import load_config
from tigon.trainer.post_training.completions import CompletionLog
from tigon.trainer.post_training.reward_stop import RewardStop
from tigon.trainer.post_training.rewards import load_rewards
from tigon.trainer.post_training.tools_and_environments import load_environment, load_tools
from tigon.trainer.setup import Setup, TrainingData

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrlCounters:
    """TRL's metrics since the last record and its count of tokens, which its checkpoints lack."""

    trainer: GuardedTrainer

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


def make(setup: Setup, model: nn.Module, data: TrainingData, run: Path, safeguards: Safeguards) -> GuardedTrainer:
    """TRL's trainer of a run, ready to train. `trainer.make` describes the arguments and the error."""
    spec, recipe = setup.objective.trl, setup.recipe
    assert spec is not None, "trainer.make has looked"
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")  # TRL's own use
    package = importlib.import_module(spec.package)
    # TRL's own defaults are bf16 and activation checkpointing; here both are techniques of the recipe.
    values = {"bf16": False, "gradient_checkpointing": False}
    values |= {**arguments(setup, run, evaluate=data.eval is not None), **spec.options}
    others = _other_models(spec, setup, run)
    bases = (GuardedTrainer, getattr(package, spec.trainer))
    kind = cast("type[GuardedTrainer]", type("Guarded" + spec.trainer, bases, {"reference": others.get("ref_model")}))
    completions = CompletionLog(spec.rewards, recipe.post_training.log_completions)
    if spec.scores:
        others |= _scorers(spec, completions)
    adapters = {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        trainer = kind(
            model=model,
            args=without_data_parallel(getattr(package, spec.config)(**values)),
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=data.tokenizer,
            **others,
        )
    except (ValueError, TypeError, NotImplementedError, ImportError, ConnectionError) as error:
        raise RecipeError(
            f"train.objective: {recipe.train.objective}: TRL refuses it: {' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        kind.reference = None  # the class would hold the weights for as long as it exists
    for name, weight in model.named_parameters():  # TRL rounds those of a 4-bit model to bf16
        if name in adapters:
            weight.data = adapters[name]
    adapted = getattr(trainer.model, "peft_config", {})
    if "ref" in adapted:  # a copy of the new adapter; without it TRL switches the adapters off, which is the same model
        trainer.model.delete_adapter("ref")
    trainer.guard(setup.objective, safeguards, make_optimizer(setup), learning_rates(setup))
    trainer.counters.append(TrlCounters(trainer))
    if spec.scores:
        trainer.completions, trainer.reward_stop = completions, RewardStop(recipe.post_training)
        trainer.add_callback(trainer.reward_stop)
        trainer.counters.append(trainer.reward_stop)
    if recipe.model.kernels == "tigon":
        trainer.fused = _fused(trainer, spec.shared_prefix)
    else:
        trainer.add_callback(SameLayers(trainer))  # GRPO's reference, which TRL loads
    if hasattr(trainer, "generation_config"):
        trainer.generator = _generator(trainer, setup)
        trainer.completions_line = trainer.generator if isinstance(trainer.generator, str) else ""
    return trainer


def _scorers(spec: TrlTraining, completions: CompletionLog) -> dict[str, Any]:
    """The reward functions, tools and environment, by the names of TRL's arguments."""
    given: dict[str, Any] = {"reward_funcs": load_rewards(spec.rewards, note=completions.note)}
    if spec.tools:
        given["tools"] = load_tools(spec.tools)
    if spec.environment is not None:
        given["environment_factory"] = load_environment(spec.environment)
    return given


def _generator(trainer: GuardedTrainer, setup: Setup) -> GraphGeneration | str:
    """tigon's generator in place of `generate`, or a line for the user on why TRL calls that of transformers."""
    chosen = setup.recipe.post_training.generator
    if chosen == "transformers" or not writes_by_generate(setup.recipe):
        return ""
    if chosen == "auto" and trainer.args.device.type != "cuda":
        return ""
    if obstacle := generator_obstacle(setup.settings, chosen):
        return "completions  transformers' generate, because of {}; {} uses tigon's generator".format(*obstacle)
    try:
        return decode_in_graphs(trainer, required=chosen == "tigon")
    except UsageError as error:
        if chosen == "tigon":
            raise RecipeError(f"post_training.generator: {error} Set generator: transformers.") from None
        return f"completions  transformers' generate, because {error}"


def _other_models(spec: TrlTraining, setup: Setup, run: Path) -> dict[str, Any]:
    """The frozen models that TRL's trainer takes: the model before training, and the teacher.

    Adapters need no reference, because TRL can switch them off.
    """
    found = {}
    if spec.takes_reference and not setup.settings.lora.used:
        found["ref_model"] = _frozen(setup.with_model(setup.starting_model(run)), run)
    if spec.teacher is not None:
        teacher = spec.teacher(run)
        found["teacher_model"] = _frozen(setup.with_model(teacher, load_config(teacher)), run)
    return found


def _frozen(setup: Setup, run: Path) -> nn.Module:
    """A model that is not trained, with tigon's kernels."""
    model, _ = engine.build(setup.without_adapters(), run / "base")
    engine.refuse_nonfinite(model, setup.recipe.model)
    return model.requires_grad_(False).eval()


def _fused(trainer: GuardedTrainer, shared_prefix: bool) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfusedWarning)  # the report says it
        result = fuse(trainer, shared_prefix=shared_prefix)
    lines = [f"TRL's {name}: tigon's head" for name in result.fused]
    lines += [f"TRL's {name}: the layers of the trained model" for name in result.layers]
    lines += ["TRL's batches: beginnings that sequences share are computed once"] if result.shared_prompts else []
    return "\n".join([*lines, *(f"TRL's {name}: not fused, {why}" for name, why in result.unfused.items())])
