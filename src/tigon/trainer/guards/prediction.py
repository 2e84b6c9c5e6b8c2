"""The planner's prediction of a run on this machine's GPU: before the run, compared with its peak, and if it fails.

On a CPU nothing is predicted, because the planner's estimates are for GPUs.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from tigon.errors import RecipeError, TigonError
from tigon.objectives.choose import config_for, objective_of
from tigon.planner import request as planner_request
from tigon.planner.engines.non_allocator_memory import group_bytes, non_allocator_bytes
from tigon.planner.gpus import Gpu, row_of, size_bytes
from tigon.planner.render import as_recipe
from tigon.planner.render.terminal import gib, seconds
from tigon.planner.request import Request
from tigon.planner.search import space
from tigon.planner.search.option import Option, estimate_option
from tigon.planner.search.recommend import label, search
from tigon.planner.search.space import SearchProblem
from tigon.planner.simulate.allocator import ALLOCATOR_SETTINGS, has_expandable_segments
from tigon.profiler.recording.device_memory import host_free_bytes
from tigon.recipe.keys import Recipe
from tigon.techniques import SEARCHES
from tigon.techniques.keys.settings import Settings
from tigon.trainer import model as models
from tigon.trainer.distributed import launch
from tigon.trainer.guards import preflight, segments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tigon.trainer.setup import Setup

SNAPSHOT = "memory_snapshot-{rank}.pickle"
"""The variable's name that every version of PyTorch reads."""
# The parts of PyTorch's OutOfMemoryError with the size of the request and with the memory reserved but not in use.
_REQUESTED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_UNUSED = re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The estimate of a run on a GPU."""

    option: Option
    gpu: Gpu
    free: frozenset[str]
    """The settings that a recommendation may change."""

    def lines(self, command: str) -> list[str]:
        """Console lines with the peak and the time per step, and a warning if the run will not fit."""
        estimate = self.option.estimate
        lines = [
            f"plan     peak per GPU {gib(estimate.peak_allocated_bytes)} allocated, "
            f"{gib(estimate.peak_reserved_bytes)} reserved "
            f"({estimate.peak_phase}), {seconds(estimate.step_s)} per step"
        ]
        if not self.option.fits(self.gpu):
            lines.append(
                f"warning  the run needs {gib(estimate.device_bytes)} with the CUDA context, but {self.gpu} has "
                f"{gib(self.gpu.memory_bytes)}: it will run out of memory. {what_fits(self, command)}"
            )
        host_bytes = self.option.all_host_bytes
        if host_bytes > host_free_bytes():
            lora = self.option.request.settings.lora
            fix = "Lower data.sequence_length, or train a smaller model"
            if not lora.base_offload:
                fix = "Use more GPUs, or set sharding.offload to none or nvme"
            elif not lora.quantize:
                fix = "Set lora.quantize: true"
            lines.append(
                f"warning  offloading needs {gib(host_bytes)} of host memory, but {gib(host_free_bytes())} are free: "
                f"the run will swap or be killed. {fix}"
            )
        return lines

    def as_mapping(self) -> dict[str, Any]:
        estimate = self.option.estimate
        names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "step_s", "peak_phase")
        return {name: getattr(estimate, name) for name in names} | {"components": dict(estimate.components)}


# --- before a run ----------------------------------------------------------------------------------------------------


def gpu_here(device: torch.device, settings: Settings) -> Gpu:
    """The planner's row for this GPU, with the memory that this process can use.

    Raises:
        RecipeError: Other processes have left too little for this one to begin.
    """
    properties = torch.cuda.get_device_properties(device)
    row = row_of(properties.name, properties.total_memory)
    try:
        free_bytes, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RecipeError(
            f"{device}: other processes have filled this GPU ({gib(properties.total_memory)}), so that this one "
            "cannot begin; nvidia-smi lists them"
        ) from error
    own_bytes = torch.cuda.memory_reserved(device) + row.context_bytes
    if launch.world_size() > 1 and distributed.is_initialized():  # NCCL's buffers are already allocated
        own_bytes += group_bytes(row, settings)
    return replace(row, memory_bytes=min(free_bytes + own_bytes, properties.total_memory))


def predict(recipe: Recipe, config: PreTrainedConfig, settings: Settings, gpu: Gpu, *, evaluated: bool) -> Prediction:
    """The prediction for a recipe on `gpu`.

    Raises:
        UsageError: The objective cannot be planned with these settings, or the model cannot be traced.
    """
    request = request_of(recipe, config, settings, evaluated=evaluated)
    return Prediction(option=estimate_option(request, gpu), gpu=gpu, free=free_in(recipe))


def request_of(recipe: Recipe, config: PreTrainedConfig, settings: Settings, *, evaluated: bool) -> Request:
    """The plan request for a recipe.

    Raises:
        UsageError: The planner cannot predict the objective with these settings, although a run can train it.
    """
    config = config_for(recipe, config)
    objective = objective_of(recipe, config, partial(models.parameter_shapes, config))
    return planner_request.request_of(recipe, config, settings, objective.planned(), evaluated=evaluated)


def free_in(recipe: Recipe) -> frozenset[str]:
    """The settings that a recipe leaves at their defaults, so that --auto and recommendations may change them."""
    default = Recipe()
    return frozenset(key for key in SEARCHES if recipe.value(key) == default.value(key))


# --- what to do instead ----------------------------------------------------------------------------------------------


def alternative(request: Request, gpu: Gpu, free: frozenset[str]) -> Option | None:
    """The fastest recommendation of those that change the training numbers least; None if nothing fits."""
    problem = SearchProblem(
        request=request,
        free=free,
        gpu=space.with_headroom(gpu),
        runnable_here=True,
        host_bytes=host_free_bytes(),
    )
    recommendations, _ = search(problem)
    last = space.layers_on_host(request.settings)
    if not recommendations and last is not None:
        recommendations, _ = search(replace(problem, request=last.applied(request)))
    if not recommendations:
        return None
    least = min(space.change_rank(one.option.request.settings) for one in recommendations)
    return next(one.option for one in recommendations if space.change_rank(one.option.request.settings) == least)


def what_fits(prediction: Prediction, command: str, *, failed: bool = False) -> str:
    """A sentence that names a configuration that fits and the command that runs it.

    Args:
        prediction: The prediction of the run.
        command: The run's command, to which the changed keys are appended.
        failed: The run has run out of memory, so the configuration must need less than this run's predicted peak.
    """
    gpu, own = prediction.gpu, prediction.option.estimate
    if failed:
        context_bytes = non_allocator_bytes(gpu, prediction.option.request.settings)
        gpu = replace(gpu, memory_bytes=min(gpu.memory_bytes, own.peak_allocated_bytes + context_bytes - 1))
    best = alternative(prediction.option.request, gpu, prediction.free)
    if best is None:
        return (
            "No setting that the recipe leaves at its default makes it fit: lower data.sequence_length or "
            "train.batch_size, use more GPUs, or train adapters with lora.rank."
        )
    changed = as_recipe.changed_keys(prediction.option.request, best.request)
    words = shlex.join(part for key, value in changed.items() for part in ("--set", f"{key}={as_recipe.word(value)}"))
    costs = "".join(f" ({name}: {cost})" for name, cost in space.changes(best.request.settings).items())
    return f"This fits: {label(best.request.settings)}, {gib(best.estimate.device_bytes)}{costs}: {command} {words}"


def choose(recipe: Recipe, config: PreTrainedConfig, settings: Settings, gpu: Gpu) -> tuple[list[str], str]:
    """Choose the settings of --auto: the fastest recommendation that fits the GPU.

    Returns:
        The `--set` assignments that change the recipe to it, and a description with its memory and time per step.

    Raises:
        RecipeError: Nothing fits.
    """
    request = request_of(recipe, config, settings, evaluated=recipe.data.has_eval)
    recommendation = alternative(request, gpu, free_in(recipe))
    if recommendation is None:
        needs = estimate_option(request, gpu).estimate.device_bytes
        raise RecipeError(
            f"--auto: no setting that the recipe leaves at its default makes the run fit {gpu} "
            f"({gib(gpu.memory_bytes)}; unchanged, it needs {gib(needs)}); lower data.sequence_length or "
            "train.batch_size, or set lora.rank"
        )
    changed = as_recipe.changed_keys(request, recommendation.request)
    assignments = [f"{key}={as_recipe.word(value)}" for key, value in changed.items()]
    description = ", ".join(assignments) if assignments else "nothing to change"
    return (
        assignments,
        f"{description}; {gib(recommendation.estimate.device_bytes)}, "
        f"{seconds(recommendation.estimate.step_s)} per step",
    )


def choices_of_auto(recipe: Recipe, device: torch.device, *, resume: bool) -> list[str]:
    """The assignments of --auto, which are printed.

    Raises:
        RecipeError: A launcher other than tigon's has started the processes, `resume` is set, the run is on the CPU, a
            check refuses the recipe, or nothing fits.
        SystemExit: In the other processes under such a launcher, with code 2.
    """
    from rich.console import Console

    if launch.LAUNCHER in os.environ:  # `tigon train` has chosen before it started this process
        return []
    if launch.started_by_launcher():
        if launch.rank() > 0:
            raise SystemExit(2)
        raise RecipeError(
            "--auto under a launcher such as torchrun: tigon chooses before the processes start; leave --auto out and "
            "set what `tigon plan` prints for the recipe, or start the run with `tigon train --gpus N --auto`"
        )
    if resume:
        raise RecipeError("--auto with --resume: a resumed run keeps its techniques; leave --auto out")
    if device.type != "cuda":
        raise RecipeError("--auto chooses for a GPU, but this run is on the CPU; leave --auto out, or use `tigon plan`")
    config = models.load_config(recipe.model)
    preflight.check_lengths(recipe, config)
    settings = preflight.check_techniques(recipe, device)
    assignments, description = choose(recipe, config, settings, gpu_here(device, settings))
    Console(highlight=False).out(f"auto     {description}")
    return assignments


# --- beside and after a run ------------------------------------------------------------------------------------------


def announce(setup: Setup, command: str, *, evaluated: bool) -> tuple[Prediction | None, list[str]]:
    """(the prediction or None, console lines). If the planner cannot trace the model, a line gives the reason."""
    device, settings = setup.device, setup.settings
    if device.type != "cuda":
        return None, []
    try:
        gpu = gpu_here(device, settings)
        estimated = predict(setup.recipe, setup.config, settings, gpu, evaluated=evaluated)
        return estimated, estimated.lines(command)
    except TigonError as error:
        return None, [f"plan     no prediction: {error}"]


def measured(device: torch.device) -> Mapping[str, int]:
    """The peaks of PyTorch's allocator so far, in bytes."""
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def compared(prediction: Prediction | None, device: torch.device) -> dict[str, Any] | None:
    """The predicted and the measured peak for the run's summary; None without a prediction."""
    if prediction is None:
        return None
    return {"predicted": prediction.as_mapping(), "measured": dict(measured(device))}


def comparison_line(memory: Mapping[str, Any]) -> str:
    """The predicted and the measured peaks in one line, for the console and the report."""
    parts = []
    for name in ("allocated", "reserved"):
        predicted, actual = (memory[kind][f"peak_{name}_bytes"] for kind in ("predicted", "measured"))
        error = f" ({predicted / actual - 1:+.1%})" if actual else ""
        parts.append(f"{name} {gib(predicted)} predicted, {gib(actual)} measured{error}")
    return "; ".join(parts)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device is out of memory: from PyTorch, cuBLAS, Triton or the driver."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("out of memory", "STATUS_ALLOC_FAILED", "DefaultCPUAllocator"))
    )


def out_of_memory(error: BaseException, setup: Setup, prediction: Prediction | None, folder: Path, command: str) -> str:
    """The message for a run that is out of memory: what it needed, and the command of a configuration that fits.

    On CUDA it also writes a memory snapshot into the run folder `folder`.
    """
    recipe = setup.recipe
    sentences = [
        f"out of GPU memory with train.batch_size {recipe.train.batch_size} and data.sequence_length "
        f"{recipe.data.sequence_length}"
    ]
    if setup.device.type == "cuda":
        snapshot = folder / SNAPSHOT.format(rank=launch.rank())
        torch.cuda.memory._dump_snapshot(str(snapshot))
        sentences.append(f"snapshot in {snapshot}, for pytorch.org/memory_viz")
    if match := _REQUESTED.search(str(error)):
        sentences.append(f"the last allocation requested {match[1]}")
    if not segments.used(setup.settings, setup.device):
        sentences += _fragmentation_hint(str(error), command)
    if prediction is None:
        return "; ".join([*sentences, "lower one of the two, or set train.checkpointing: full"])
    needed = prediction.option.estimate.device_bytes
    sentences.append(f"needed {gib(needed)}, had {gib(prediction.gpu.memory_bytes)}")
    try:
        sentences.append(what_fits(prediction, command, failed=True))
    except TigonError as why:
        sentences.append(f"no recommendation: {why}")
    return "; ".join(sentences)


def _fragmentation_hint(text: str, command: str) -> list[str]:
    """A sentence if PyTorch had enough unused memory for the request, but not in one piece."""
    requested, unused = _REQUESTED.search(text), _UNUSED.search(text)
    if requested is None or unused is None or has_expandable_segments():
        return []
    if (size_bytes(unused[1]) or 0) < (size_bytes(requested[1]) or 0):
        return []
    return [
        f"{unused[1]} were free but fragmented; PyTorch can use them with "
        f"{ALLOCATOR_SETTINGS}=expandable_segments:True {command}"
    ]
