"""Builds the model with its techniques, and makes the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

from tigon.errors import RecipeError
from tigon.models import packed_documents
from tigon.models.spec import SINKS_FLAG
from tigon.objectives.base import Objective
from tigon.recipe.keys import ModelConfig, Recipe, TrainConfig
from tigon.techniques import TECHNIQUES, model_kernels
from tigon.techniques.keys.lora import LOFTQ
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora import loftq, lora
from tigon.techniques.optimizers import galore
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.techniques.sharding.deepspeed_config import partitioned_loading
from tigon.techniques.sharding.sharding import (
    are_drawn_in_place,
    are_read_in_parts,
    fit_whole,
    name_present_layers,
)
from tigon.techniques.technique import RunInfo
from tigon.trainer import model as models
from tigon.trainer.checkpoint import adapter_files
from tigon.trainer.distributed import launch
from tigon.trainer.guarded import MakeOptimizer
from tigon.trainer.guards import adapter_checks
from tigon.trainer.guards.nan_guard import first_nonfinite


def run_info_of(
    recipe: Recipe, config: Any, shapes: dict[str, tuple[int, ...]], device: torch.device, objective: Objective
) -> RunInfo:
    """The run info that techniques need: device, parameter shapes, processes and their settings."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return RunInfo(
        device=device.type, shapes=shapes, hidden_size=int(getattr(text, "hidden_size", 0)),
        processes=launch.world_size(),
        runs_layers_once=objective.trl is None and objective.planned().own_parameters is None,
    )  # fmt: skip


def make_optimizer(train: TrainConfig, settings: Settings) -> MakeOptimizer | None:
    """The function that makes the optimizer; None if the Trainer makes it from its name."""
    if OPTIMIZERS[settings.train.optimizer].needs_compiler and settings.sharding.fsdp:
        # With sharded weights, PyTorch's cache of traced graphs has one key for 8-bit and 4-bit moments. A run with one
        # would load the graph of the other and fail (torch 2.13). The cache of compiled kernels is not affected.
        functorch_config.enable_autograd_cache = False
    if OPTIMIZERS[settings.train.optimizer].trainer_name is not None:
        return None

    return partial(
        galore.build, lr=train.learning_rate, betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.weight_decay, rank=settings.train.galore_rank, gap=train.galore_gap,
        layerwise=OPTIMIZERS[settings.train.optimizer].in_backward,
    )  # fmt: skip


def build(
    model: ModelConfig, config: Any, settings: Settings, run_info: RunInfo, *, device: torch.device, seed: int,
    kernels: str,
    base: Path, saves_adapters: bool = False, reads_whole_weights: bool = False, ops: Mapping[str, bool] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Load the model, patch it, and apply the techniques in use.

    The model is on `device` unless FSDP2 or ZeRO-3 shards a checkpoint. FSDP2 moves its layers one by one from CPU
    memory; ZeRO-3 loads it into its partitions.

    Args:
        model: The `model` section of the recipe.
        config: The transformers config.
        settings: The techniques' keys.
        run_info: What the techniques need to know about the run.
        device: The device to train on.
        seed: The seed of random weights.
        kernels: The value of `model.kernels`.
        base: The folder for a preset's random weights. They are saved and loaded from there if they are quantised on
            loading, or if the trained adapters belong to weights that are then sharded.
        saves_adapters: Whether the trained adapters will be saved. The run then keeps the weights that they refer to.
        reads_whole_weights: Whether the objective reads whole weights (`Objective.reads_whole_weights`).
        ops: Flags of `tigon.patch`; an op whose flag is False is not patched.

    Returns:
        The model, and the patch report or None.
    """
    dtype = lora.frozen_dtype(settings)
    used = [technique for technique in TECHNIQUES.values() if technique.used_by(settings)]
    loading: dict[str, Any] = {}
    for technique in used:
        loading |= technique.load(settings, run_info)
    if models.is_preset(model.name) and not are_drawn_in_place(settings):
        with launch.main_process_first():
            model = saved_preset(model, config, seed=seed, folder=base, through=device)
    load = partial(models.build, model, config, dtype=dtype, seed=seed)
    if loading or not settings.sharding.divides_weights:
        built = load(device=device, loading=loading)
    elif models.is_preset(model.name):
        stays = _stays_on(device, settings, run_info, dtype)
        built = load(device=device) if stays else load(device=None, through=device)
    elif are_read_in_parts(settings, reads_whole_weights=reads_whole_weights):
        with partitioned_loading(settings, run_info):
            built = load(device=None)
        models.make_buffers_anew(built, model, config, dtype=dtype)
    else:
        built = load(device=None)
    if not model.attention.startswith("flash") and settings.sharding.sequence == 1:
        packed_documents.keep_apart(built)
    if settings.sharding.fsdp:
        name_present_layers(built)
    saves_adapters = saves_adapters and settings.lora.rank is not None
    if saves_adapters and models.is_preset(model.name):
        adapter_files.keep_base(built, config, base)
    flags = {SINKS_FLAG: model_kernels.sinks_flag(settings), **(ops or {})}
    report = models.patch(built, kernels, **flags)
    for technique in used:
        built = technique.model(built, settings, run_info)
    if settings.lora.rank is not None and settings.lora.init == LOFTQ:
        loftq.initialise(built, models.read(model, config, dtype="auto"))
    if settings.lora.rank is not None:
        models.patch_adapters(built, kernels, **flags)
        adapter_checks.check_fused_experts(built, settings)
    if settings.train.precision == "fp8":
        models.patch_fp8(built, settings, report)
    if saves_adapters:
        adapter_files.name_base(built, model, base)
        adapter_files.keep_initial(built, settings, base.with_name(adapter_files.INITIAL))
    return built, report


def refuse_nonfinite(built: Any, model: ModelConfig) -> None:
    """Refuse weights that are NaN or infinite before the first step. Every process calls it with its own shards.

    Raises:
        RecipeError: In the main process, if a weight is not finite in any process.
        SystemExit: In the other processes, with code 2.
    """
    index = first_nonfinite(built)
    indices = launch.all_gather_ints(-1 if index is None else index) or [-1 if index is None else index]
    if max(indices) < 0:
        return
    if launch.rank() > 0:
        raise SystemExit(2)
    name = [name for name, _ in built.named_parameters()][max(indices)]
    if models.is_preset(model.name):
        raise RecipeError(
            f"model.config: the random weights of {name} are not finite (NaN or infinite); lower initializer_range"
        )
    raise RecipeError(
        f"model.name: {model.name}: {name} holds values that are not finite (NaN or infinite) in the checkpoint, and "
        "training cannot start from them; use an earlier checkpoint"
    )


def _stays_on(device: torch.device, settings: Settings, run_info: RunInfo, dtype: torch.dtype) -> bool:
    """Whether random weights stay on `device` until the engine shards them.

    They do not if they do not fit, or if they are offloaded to CPU memory: the whole model on the GPU would be the
    peak of such a run.
    """
    if device.type != "cuda":
        return True
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    room_bytes = min(free_bytes, int(total_bytes * torch.cuda.get_per_process_memory_fraction(device)))
    sizes = (math.prod(shape) * dtype.itemsize for shape in run_info.shapes.values())
    return settings.sharding.offload == "none" and fit_whole(sizes, room_bytes)


def kept_base(model: ModelConfig, settings: Settings, base: Path) -> ModelConfig:
    """The `model` section of a resumed run: its adapters belong to the random weights in `base`.

    The engine that made them may have rounded them, so another engine must not draw them again.
    """
    if settings.lora.rank is None or not models.is_preset(model.name) or not (base / "config.json").exists():
        return model
    return ModelConfig(name=str(base), kernels=model.kernels, attention=model.attention)


def saved_preset(model: ModelConfig, config: Any, *, seed: int, folder: Path, through: torch.device) -> ModelConfig:
    """Save a preset's random weights as a bf16 checkpoint in `folder`, unless it exists. The main process does it.

    Args:
        model: The `model` section that names the preset.
        config: The preset's transformers config.
        seed: The seed of the random weights.
        folder: The folder of the checkpoint.
        through: The device that draws the random numbers.

    Returns:
        A `model` section that names the checkpoint.
    """
    if launch.rank() == 0 and not (folder / "config.json").exists():
        built = models.build(model, config, dtype=torch.bfloat16, device=None, seed=seed, through=through)
        adapter_files.keep_base(built, config, folder)
    return ModelConfig(name=str(folder), kernels=model.kernels, attention=model.attention)
