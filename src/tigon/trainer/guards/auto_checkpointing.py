"""Replaces `train.checkpointing: auto` by the planner's choice for this machine, before the run is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tigon.errors import TigonError
from tigon.models import packed_documents
from tigon.objectives.recipe_checks import auto_divides_batch, has_one_shape
from tigon.planner.gpus import Gpu
from tigon.planner.render.terminal import gib, seconds
from tigon.planner.request import Request
from tigon.planner.search import space
from tigon.planner.search.checkpointing import Beside, choose
from tigon.profiler.recording.device_memory import host_free_bytes
from tigon.recipe.keys import Recipe
from tigon.trainer import model as models
from tigon.trainer.distributed import launch
from tigon.trainer.guards import prediction, preflight

MAX_SPLITS = 12
"""Micro-batches to choose from. More would only matter for more than 2,000 samples per step."""


def resolved(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the planner's choice in place of `train.checkpointing: auto`; on a CPU that is `none`.

    On a GPU the main process chooses for all and prints a line. If `train.gradient_accumulation` is 1, it also divides
    `train.batch_size` into micro-batches, with accumulation fusion where it pays. If the model cannot be predicted,
    nothing is recomputed.
    """
    if not recipe.train.auto_checkpointing:
        return recipe
    if device.type != "cuda":
        return _with(recipe, checkpointing="none")
    if launch.rank() > 0:
        return launch.broadcast(recipe)
    try:
        config = models.load_config(recipe.model)
        preflight.check_lengths(recipe, config)
        settings = preflight.check_techniques(recipe, device)
        evaluated = recipe.data.has_eval
        request = prediction.request_of(recipe, config, settings, evaluated=evaluated)
        chosen, line = chosen_for(recipe, request, prediction.gpu_here(device, settings))
    except TigonError as error:  # the checks that follow refuse the recipe, or the planner cannot trace the model
        chosen = _with(recipe, checkpointing="none")
        line = f"nothing is recomputed, because the planner has no prediction: {error}"
    print(f"auto     {line}", flush=True)
    return launch.broadcast(chosen)


def chosen_for(recipe: Recipe, request: Request, gpu: Gpu) -> tuple[Recipe, str]:
    """Returns the recipe with the choice for `gpu`, and a line that describes it.

    Args:
        recipe: The recipe with `auto`.
        request: Its plan request.
        gpu: The GPU.

    Raises:
        TigonError: The planner cannot trace the model.
    """
    gpu = space.with_headroom(gpu)
    alike = has_one_shape(recipe) and not packed_documents.has_states(request.config)
    beside = Beside(host=True, host_bytes=host_free_bytes(), fusion=auto_divides_batch(recipe), graphs=alike)
    option = choose(request, gpu, _splits(recipe, request), beside=beside).option
    settings, estimate = option.request.settings, option.estimate
    fused, graphs = settings.train.gradient_accumulation_fusion, settings.train.cuda_graphs
    chosen = _with(
        recipe,
        checkpointing=settings.train.checkpointing,
        batch_size=option.request.batch,
        gradient_accumulation=option.request.micro_batches,
        gradient_accumulation_fusion=fused,
        cuda_graphs=graphs,
    )
    words = f"train.checkpointing={settings.train.checkpointing}"
    if option.request.batch != recipe.train.batch_size:
        words += f", train.batch_size={option.request.batch}"
        words += f", train.gradient_accumulation={option.request.micro_batches}"
    if fused and not recipe.train.gradient_accumulation_fusion:
        words += ", train.gradient_accumulation_fusion=true"
    if graphs and not recipe.train.cuda_graphs:
        words += ", train.cuda_graphs=true"
    words += f"; {gib(estimate.device_bytes)} of {gib(gpu.memory_bytes)}, {seconds(estimate.step_s)} per step"
    return chosen, words if option.fits(gpu) else f"{words}: no recomputation of layers makes it fit"


def _splits(recipe: Recipe, request: Request) -> Sequence[tuple[int, int]]:
    """The micro-batches to choose from."""
    one = [(request.batch, request.micro_batches)]
    if not auto_divides_batch(recipe):
        return one
    samples, refused = request.batch, request.objective.batch_refusal
    sizes = [size for size in range(samples, 0, -1) if samples % size == 0 and refused(size) is None]
    return [(size, samples // size) for size in sizes[:MAX_SPLITS]] or one


def _with(recipe: Recipe, **train: Any) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **train))
