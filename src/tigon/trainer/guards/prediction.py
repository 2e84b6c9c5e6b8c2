"""What the planner says about a run on this machine's GPU: before it, beside what was measured, and when it fails.

On a CPU nothing is said: the estimate is of a GPU, and what could be measured there is the whole process.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tigon.errors import RecipeError, TigonError
from tigon.objectives.choose import objective_of
from tigon.planner.engines.non_allocator_memory import group_bytes, non_allocator_bytes
from tigon.planner.gpus import GIB, GPUS, Gpu, find_gpu, size_bytes
from tigon.planner.render import as_recipe
from tigon.planner.render.terminal import gib, seconds
from tigon.planner.request import Request
from tigon.planner.search import space
from tigon.planner.search.recommend import Option, estimate_option, label, search
from tigon.planner.search.space import SearchProblem
from tigon.profiler.recording.device import host_free_bytes
from tigon.recipe.keys import Recipe
from tigon.techniques import SEARCHED
from tigon.techniques.choices import Choices
from tigon.trainer import model as models
from tigon.trainer.distributed import launch
from tigon.trainer.guards import preflight

GPUS_PER_HOST = 8
"""More than these are taken to be spread over several machines."""
SNAPSHOT = "memory_snapshot-{rank}.pickle"
ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
"""The name that every version reads."""
# What PyTorch's OutOfMemoryError says of the request, and of what it has reserved and not given out.
_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_IDLE = re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The estimate of a run on a GPU."""

    option: Option
    gpu: Gpu
    free: frozenset[str]

    def lines(self, command: str) -> list[str]:
        """For the console: the peak and the time, and what to do where it will not fit."""
        estimate = self.option.estimate
        lines = [
            f"plan     peak {gib(estimate.peak_allocated_bytes)} allocated, "
            f"{gib(estimate.peak_reserved_bytes)} reserved a "
            f"GPU ({estimate.peak_phase}), {seconds(estimate.step_s)} a step"
        ]
        if not self.option.fits(self.gpu):
            lines.append(
                f"warning  needs {gib(estimate.device_bytes)}, the CUDA context counted, and {self.gpu} has "
                f"{gib(self.gpu.memory_bytes)}: it will run out of memory. {next_rung(self, command)}"
            )
        host_bytes = estimate.host_bytes * min(self.option.request.choices.gpus, GPUS_PER_HOST)
        if host_bytes > host_free_bytes():
            lines.append(
                f"warning  offloading needs {gib(host_bytes)} of the host's memory, and {gib(host_free_bytes())} are "
                "free: it will be killed or swap. Take more GPUs, sharding.offload: none, or nvme"
            )
        return lines

    def as_mapping(self) -> dict[str, Any]:
        estimate = self.option.estimate
        names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "step_s", "peak_phase")
        return {name: getattr(estimate, name) for name in names} | {"components": dict(estimate.components)}


# --- before a run ----------------------------------------------------------------------------------------------------


def gpu_here(device: torch.device, choices: Choices) -> Gpu:
    """The row of this GPU with the memory that this process can have of it."""
    properties = torch.cuda.get_device_properties(device)
    row = _row_of(properties.name, properties.total_memory)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_reserved(device) + row.context_bytes
    if launch.world_size() > 1 and distributed.is_initialized():  # what it shares with the others is there already
        own_bytes += group_bytes(row, choices)
    return replace(row, memory_bytes=min(free_bytes + own_bytes, properties.total_memory))


def _row_of(name: str, total_bytes: int) -> Gpu:
    """By name as the driver says it (`NVIDIA A100-SXM4-80GB`), else the rates of one with as much memory."""
    words = set(re.split(r"[\s_-]+", name.lower()))
    rows = [row for row in GPUS.values() if set(row.name.split("-")) <= words]
    return max(rows, key=lambda row: len(row.name)) if rows else find_gpu(f"{total_bytes / GIB:.2f}GiB")


def predict(recipe: Recipe, config: Any, choices: Choices, gpu: Gpu, *, evaluated: bool) -> Prediction:
    """The estimate of a recipe. Raises UsageError for a model that cannot be traced."""
    request = request_of(recipe, config, choices, evaluated=evaluated)
    return Prediction(option=estimate_option(request, gpu), gpu=gpu, free=free_in(recipe))


def request_of(recipe: Recipe, config: Any, choices: Choices, *, evaluated: bool) -> Request:
    """The question that a recipe is."""
    data, train = recipe.data, recipe.train
    objective = objective_of(recipe, config, partial(models.parameter_shapes, config))
    flash = recipe.model.attention.startswith("flash")
    return Request(
        model=recipe.model.name, config=config, batch=train.batch_size, seq=data.sequence_length, choices=choices,
        masked=not flash and not (data.packing and data.cross_document_attention), clipped=train.max_grad_norm > 0,
        evaluated=evaluated, objective=objective.planned(),
    )  # fmt: skip


def free_in(recipe: Recipe) -> frozenset[str]:
    """The settings that a recipe leaves at their defaults and that --auto and the next rung may change."""
    default, choices = Choices(), recipe.choices()
    free = {name for name in SEARCHED if getattr(choices, name) == getattr(default, name)}
    if recipe.train.precision != "auto":
        free.discard("precision")
    return frozenset(free)


# --- what to do instead ----------------------------------------------------------------------------------------------


def alternative(request: Request, gpu: Gpu, free: frozenset[str]) -> Option | None:
    """The fastest recipe that fits among those that change least of the numbers; None: there is none."""
    recommendations, _ = search(
        SearchProblem(request=request, free=free, gpu=space.with_headroom(gpu), runnable_here=True)
    )
    if not recommendations:
        return None
    least = min(space.change_rank(one.option.request.choices) for one in recommendations)
    return next(one.option for one in recommendations if space.change_rank(one.option.request.choices) == least)


def changed_keys(before: Request, after: Request) -> dict[str, Any]:
    """The recipe keys that lead from one to the other; those gone back to their default with it."""
    old, new = as_recipe.keys(before), as_recipe.keys(after)
    default = as_recipe.keys(replace(before, choices=Choices()))
    keys = {key: value for key, value in new.items() if old.get(key, default.get(key)) != value}
    return {key: value for key, value in keys.items() if key != "model.name"}


def next_rung(prediction: Prediction, command: str, *, failed: bool = False) -> str:
    """A sentence: what fits, and the command that runs it. failed: the recipe has run out of memory, whatever was
    predicted, so that what is named has to fit where this one cannot."""
    gpu, own = prediction.gpu, prediction.option.estimate
    if failed:
        outside = non_allocator_bytes(gpu, prediction.option.request.choices)
        gpu = replace(gpu, memory_bytes=min(gpu.memory_bytes, own.peak_allocated_bytes + outside - 1))
    best = alternative(prediction.option.request, gpu, prediction.free)
    if best is None:
        return (
            "Nothing that the recipe leaves free makes it fit: lower data.sequence_length or train.batch_size, take "
            "more GPUs, or train adapters with lora.rank."
        )
    changed = changed_keys(prediction.option.request, best.request)
    words = shlex.join(part for key, value in changed.items() for part in ("--set", f"{key}={as_recipe.word(value)}"))
    costs = "".join(f" ({name}: {cost})" for name, cost in space.changes(best.request.choices).items())
    return f"Next rung: {label(best.request.choices)}, {gib(best.estimate.device_bytes)}{costs}: {command} {words}"


def choose(recipe: Recipe, config: Any, choices: Choices, gpu: Gpu) -> tuple[list[str], str]:
    """(`--set` assignments that make the recipe the fastest that fits, what they are in words), for --auto.

    Raises RecipeError when nothing fits.
    """
    evaluated = recipe.data.eval_fraction > 0 or bool(recipe.data.eval_source)
    request = request_of(recipe, config, choices, evaluated=evaluated)
    recommendation = alternative(request, gpu, free_in(recipe))
    if recommendation is None:
        needs = estimate_option(request, gpu).estimate.device_bytes
        raise RecipeError(
            f"--auto: nothing that the recipe leaves free fits {gpu} ({gib(gpu.memory_bytes)}; as it is, the run needs "
            f"{gib(needs)}); lower data.sequence_length or train.batch_size, or set lora.rank"
        )
    changed = changed_keys(request, recommendation.request)
    assignments = [f"{key}={as_recipe.word(value)}" for key, value in changed.items()]
    description = ", ".join(assignments) if assignments else "nothing to change"
    return (
        assignments,
        f"{description}; {gib(recommendation.estimate.device_bytes)}, {seconds(recommendation.estimate.step_s)} a step",
    )


def with_auto(recipe: Recipe, overrides: Sequence[str], device: torch.device, *, resume: bool) -> list[str]:
    """`overrides` and what --auto adds to them, which is printed. Raises RecipeError."""
    from rich.console import Console

    if launch.started_by_launcher():  # the process that started this one has chosen
        return list(overrides)
    if resume:
        raise RecipeError("--auto with --resume: a run goes on with the techniques it began with; leave --auto out")
    if device.type != "cuda":
        raise RecipeError("--auto chooses for a GPU, and this run is on the CPU; leave it out, or ask `tigon plan`")
    config = models.load_config(recipe.model)
    preflight.check_lengths(recipe, config)
    choices = preflight.check_techniques(recipe, device)
    assignments, description = choose(recipe, config, choices, gpu_here(device, choices))
    Console(highlight=False).print(f"auto     {description}", markup=False, soft_wrap=True)
    return [*overrides, *assignments]


# --- beside and after a run ------------------------------------------------------------------------------------------


def announce(recipe: Recipe, config: Any, choices: Choices, device: torch.device, *, evaluated: bool,
             command: str) -> tuple[Prediction | None, list[str]]:  # fmt: skip
    """(the prediction, lines for the console). A model that cannot be predicted is trained all the same."""
    if device.type != "cuda":
        return None, []
    try:
        estimated = predict(recipe, config, choices, gpu_here(device, choices), evaluated=evaluated)
        return estimated, estimated.lines(command)
    except TigonError as error:
        return None, [f"plan     no prediction: {error}"]


def measured(device: torch.device) -> Mapping[str, int]:
    """The allocator's own peaks so far."""
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def compared(prediction: Prediction | None, device: torch.device) -> dict[str, Any] | None:
    """For the summary: predicted and measured; None where nothing was predicted."""
    if prediction is None:
        return None
    return {"predicted": prediction.as_mapping(), "measured": dict(measured(device))}


def comparison_line(memory: Mapping[str, Any]) -> str:
    """One line for the console and the report."""
    predicted, prediction = memory["predicted"], memory["measured"]
    words = []
    for name in ("allocated", "reserved"):
        ours, theirs = predicted[f"peak_{name}_bytes"], prediction[f"peak_{name}_bytes"]
        off = f" ({ours / theirs - 1:+.1%})" if theirs else ""
        words.append(f"{name} {gib(ours)} predicted, {gib(theirs)} measured{off}")
    return "; ".join(words)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is the device's memory, whoever asked for it: PyTorch, cuBLAS, Triton or the driver."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("out of memory", "STATUS_ALLOC_FAILED", "DefaultCPUAllocator"))
    )


def out_of_memory(
    error: BaseException, prediction: Prediction | None, recipe: Recipe, *, folder: Path, device: torch.device,
    command: str,
) -> RecipeError:  # fmt: skip
    """The error to raise instead: needed, had, next rung with its command; a memory snapshot is written on CUDA."""
    sentences = [
        f"out of GPU memory with train.batch_size {recipe.train.batch_size} and data.sequence_length "
        f"{recipe.data.sequence_length}"
    ]
    if device.type == "cuda":
        snapshot = folder / SNAPSHOT.format(rank=launch.rank())
        torch.cuda.memory._dump_snapshot(str(snapshot))
        sentences.append(f"snapshot in {snapshot}, for pytorch.org/memory_viz")
    if match := _ASKED.search(str(error)):
        sentences.append(f"the last allocation asked for {match[1]}")
    sentences += _in_pieces(str(error), command)
    if prediction is None:
        return RecipeError("; ".join([*sentences, "lower one of them, or set train.checkpointing: full"]))
    needed = prediction.option.estimate.device_bytes
    sentences.append(f"needed {gib(needed)}, had {gib(prediction.gpu.memory_bytes)}")
    try:
        sentences.append(next_rung(prediction, command, failed=True))
    except TigonError as why:
        sentences.append(f"no next rung: {why}")
    return RecipeError("; ".join(sentences))


def _in_pieces(text: str, command: str) -> list[str]:
    """What to say where PyTorch held as much as was asked for, but nowhere in one piece."""
    asked, idle = _ASKED.search(text), _IDLE.search(text)
    if asked is None or idle is None or "expandable_segments:True" in os.environ.get(ALLOCATOR_SETTINGS, ""):
        return []
    if (size_bytes(idle[1]) or 0) < (size_bytes(asked[1]) or 0):
        return []
    return [
        f"{idle[1]} were free in pieces, which PyTorch can join: "
        f"{ALLOCATOR_SETTINGS}=expandable_segments:True {command}"
    ]
