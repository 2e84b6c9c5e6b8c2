"""Measures one point with the model, techniques, arguments and Trainer of `tigon train`.

On a GPU the peaks are those of PyTorch's allocator, from the model's first tensor to the check of the weights after the
last step. The CPU allocator keeps no peak. On a CPU the run therefore trains one more step and sums up PyTorch's
allocations and releases in it; the peak is that of this step. The peak resident set of the process is recorded too.
Step times are taken between synchronisations. Reading data, evaluation, saving and the report are not measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from tigon.bench import record
from tigon.errors import TigonError
from tigon.objectives.choose import objective_of
from tigon.profiler.recording.device_memory import used_bytes
from tigon.recipe.keys import Recipe
from tigon.sweep.worker import limit, samples
from tigon.techniques.keys.settings import Settings
from tigon.trainer import engine
from tigon.trainer import model as models
from tigon.trainer import trainer as trainers
from tigon.trainer.checkpoint import atomic_save
from tigon.trainer.distributed import extension_lock, launch
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.guards import preflight
from tigon.trainer.measuring.timed_run import MeteredSteps, StepMeter
from tigon.trainer.setup import Setup, TrainingData

PACKAGES = ("accelerate", "peft", "deepspeed", "bitsandbytes", "torchao")


class TrainingStopped(Exception):
    """Training stopped with a TigonError, e.g. a loss that is not finite. This counts as failed, not as refused."""


class _Steps(MeteredSteps):
    """Counts the positions of every step. On a CPU, memory is metered in one more step after the last timed one."""

    def __init__(self, meter: StepMeter, trainer: GuardedTrainer, metered_step: int | None) -> None:
        super().__init__(meter, trainer, metered_step)
        self.positions: list[int] = []

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        self._positions_before = self.trainer.step.speed.n_positions
        super().on_step_begin(args, state, control, **kwargs)

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        self.positions.append(self.trainer.step.speed.n_positions - self._positions_before)


def measure(
    recipe: Recipe,
    *,
    how_rows: str,
    unchecked: bool,
    limit_bytes: int | None,
    folder: Path,
    wrong_ops: Mapping[str, str],
) -> dict[str, Any]:
    """Train `recipe` and return its peaks, times and losses. Raises what the training raises.

    Args:
        recipe: the point's recipe.
        how_rows: the sweep's `rows`: recipe, random or alpaca.
        unchecked: train even if `tigon train` refuses the combination of techniques.
        limit_bytes: memory limit of the process, including memory outside PyTorch's allocator; None for no limit.
        folder: for temporary files (checkpoints, quantised weights).
        wrong_ops: op -> why it is left out of the patch.
    """
    begin_s = time.perf_counter()
    device = preflight.check_device(recipe)
    settings = _settings(recipe, device, unchecked=unchecked)
    limit.cap(device, limit_bytes, settings)
    if recipe.sharding.zero and launch.is_first_of_node():
        extension_lock.wait_for_compilers()
    launch.init_distributed(device, alone=recipe.sharding.divides_states)
    config = models.load_config(recipe.model)
    preflight.check_lengths(recipe, config)
    shapes = models.parameter_shapes(config)
    models.check_weights(recipe.model, config)
    objective = objective_of(recipe, config, lambda: shapes)
    assert recipe.train.steps is not None, "a sweep counts steps"
    metered_step = recipe.train.steps if device.type == "cpu" else None
    if metered_step is not None:
        train = dataclasses.replace(recipe.train, steps=recipe.train.steps + 1)
        recipe = dataclasses.replace(recipe, train=train)
    with launch.main_process_first():
        data, collator = samples.make(recipe, config, objective, how_rows, processes=launch.world_size(), folder=folder)
    meter = StepMeter(device)
    load_s = time.perf_counter()
    setup = Setup(
        recipe=recipe,
        device=device,
        settings=settings,
        config=config,
        shapes=shapes,
        objective=objective,
        wrong_ops=wrong_ops,
    )
    built, _ = engine.build(setup, folder / "base")
    engine.refuse_nonfinite(built, recipe.model)
    built = objective.attach(built)
    meter.mark("load")
    trainer = trainers.make(setup, built, TrainingData(train=data, collator=collator), folder)
    steps = _Steps(meter, trainer, metered_step)
    trainer.add_callback(steps)
    try:
        trainer.train()
        atomic_save.refuse_nonfinite_weights(built, trainer.state.global_step)
    except TigonError as error:
        raise TrainingStopped(error) from error
    finally:
        steps.stop()
    meter.mark("save")
    end_s = time.perf_counter()
    _, resident_bytes = used_bytes(torch.device("cpu"))
    n_steps = len(meter.step_s)  # without the one for memory
    return {
        "peak_allocated_bytes": steps.peak.peak_bytes if steps.peak is not None else meter.allocated_bytes,
        "peak_reserved_bytes": meter.reserved_bytes or None,
        "peak_resident_bytes": resident_bytes,
        "outside_bytes": _outside_bytes(device),
        "phases": meter.phases,
        "step_s": meter.step_s,
        "updated": meter.updated,
        "positions": steps.positions[:n_steps],
        "losses": steps.losses[:n_steps],
        "parameters": sum(shape.numel() for shape in map(torch.Size, shapes.values())),
        "precision": settings.train.precision,
        "prepare_s": load_s - begin_s,
        "train_s": end_s - load_s,
    }


def _settings(recipe: Recipe, device: torch.device, *, unchecked: bool) -> Settings:
    if not unchecked:
        return preflight.check_techniques(recipe, device)
    return preflight.settings_here(recipe, device)


def _outside_bytes(device: torch.device) -> int | None:
    """Used GPU memory outside this process's allocator: its CUDA context, and other processes."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def environment(device: torch.device) -> dict[str, Any]:
    """Card, memory, driver, versions, commit and date."""
    machine = record.environment(device, PACKAGES)
    gpu = device.type == "cuda"
    machine["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory if gpu else None
    machine["gpus"] = torch.cuda.device_count() if gpu else 0
    return machine
