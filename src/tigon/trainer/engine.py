"""Builds the model with its techniques, and makes the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tigon.errors import RecipeError
from tigon.models import PatchReport, packed_documents
from tigon.models.spec import SINKS_FLAG
from tigon.recipe.keys import ModelConfig
from tigon.techniques import TECHNIQUES, model_kernels
from tigon.techniques.keys.lora import LOFTQ
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora import loftq, lora
from tigon.techniques.precision import number_format
from tigon.techniques.sharding.deepspeed_config import partitioned_loading
from tigon.techniques.sharding.sharding import (
    are_drawn_in_place,
    are_read_in_parts,
    fit_whole,
    name_present_layers,
)
from tigon.techniques.technique import RunInfo
from tigon.trainer import model as models
from tigon.trainer import random_weights
from tigon.trainer.checkpoint import adapter_files
from tigon.trainer.distributed import launch
from tigon.trainer.guards import adapter_checks, segments, self_test
from tigon.trainer.guards.nan_guard import first_nonfinite
from tigon.trainer.setup import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build(setup: Setup, base: Path, *, saves_adapters: bool = False) -> tuple[nn.Module, PatchReport | str | None]:
    """Load the model, patch it, and apply the techniques in use.

    The model is on `device` unless FSDP2 or ZeRO-3 shards a checkpoint. FSDP2 moves its layers one by one from CPU
    memory; ZeRO-3 loads it into its partitions. With `lora.base_offload` frozen layers never are on `device` together.

    Args:
        setup: The recipe, with the model to load, its seed and its kernels, and the techniques.
        base: The folder for a preset's random weights. They are saved and loaded from there if they are quantised on
            loading, or if the trained adapters belong to weights that are then sharded.
        saves_adapters: Whether the trained adapters will be saved. The run then keeps the weights that they refer to.

    Returns:
        The model, and the patch report, Liger's version or None.
    """
    settings, run_info = setup.settings, setup.run_info
    segments.switch_on(settings, setup.device)
    used = [technique for technique in TECHNIQUES.values() if technique.used_by(settings)]
    loading = {name: value for one in used for name, value in one.load(settings, run_info).items()}
    if models.is_preset(setup.recipe.model.name) and not are_drawn_in_place(settings):
        with launch.main_process_first():
            setup = setup.with_model(saved_preset(setup, base))
    model = setup.recipe.model
    built = _loaded(setup, loading)
    if settings.sharding.fsdp:
        name_present_layers(built)
    saves_adapters = saves_adapters and settings.lora.used
    if saves_adapters and models.is_preset(model.name):
        adapter_files.keep_base(built, setup.config, base)
    flags = {SINKS_FLAG: model_kernels.sinks_flag(settings), **self_test.without(setup.wrong_ops)}
    report = models.patch(built, model.kernels, **flags)
    if settings.sharding.sequence == 1:  # flash attention reads the documents itself
        (packed_documents.states_apart if model.flash_attention else packed_documents.keep_apart)(built)
    built = setup.objective.with_head(built)
    torch.manual_seed(setup.recipe.train.seed)  # adapters do not depend on whether the weights were drawn or read
    for technique in used:
        built = technique.model(built, settings, run_info)
    if settings.lora.used:
        if settings.lora.init == LOFTQ:
            loftq.initialise(built, models.read(model, setup.config, dtype="auto"))
        models.patch_adapters(built, model.kernels, **flags)
        adapter_checks.check_fused_experts(built, settings)
    if settings.train.in_fp8:
        models.patch_fp8(built, settings, report)
    if saves_adapters:
        adapter_files.name_base(built, model, base)
        adapter_files.keep_initial(built, settings, base.with_name(adapter_files.INITIAL))
    return built, report


def _loaded(setup: Setup, loading: Mapping[str, Any]) -> PreTrainedModel:
    """The model where its engine expects it. loading: The techniques' options of from_pretrained."""
    model, config, settings, device = setup.recipe.model, setup.config, setup.settings, setup.device
    dtype = lora.frozen_dtype(settings)
    load = partial(models.build, model, config, dtype=dtype, seed=setup.recipe.train.seed)
    if settings.lora.base_offload:  # its technique brings all but the frozen layers to the device
        return load(device=torch.device("cpu"), loading=loading) if loading else load(device=None, through=device)
    if loading and settings.sharding.fsdp:  # FSDP2 moves the layers to the device one by one
        return load(device=torch.device("cpu"), loading=loading)
    if loading or not settings.sharding.divides_weights:
        return load(device=device, loading=loading)
    if models.is_preset(model.name):
        stays = _stays_on(device, settings, setup.run_info, dtype)
        return load(device=device) if stays else load(device=None, through=device)
    if are_read_in_parts(settings, reads_whole_weights=setup.objective.planned().reads_whole_weights):
        with partitioned_loading(settings, setup.run_info):
            built = load(device=None)
        random_weights.make_buffers_anew(built, model, config, dtype=dtype)
        return built
    return load(device=None)


def refuse_nonfinite(built: PreTrainedModel, model: ModelConfig) -> None:
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
    return not settings.sharding.offloads and fit_whole(sizes, room_bytes)


def kept_base(model: ModelConfig, settings: Settings, base: Path) -> ModelConfig:
    """The `model` section of a resumed run: its adapters belong to the random weights in `base`.

    The engine that made them may have rounded them, so another engine must not draw them again.
    """
    if not settings.lora.used or not models.is_preset(model.name) or not (base / "config.json").exists():
        return model
    return ModelConfig(name=str(base), kernels=model.kernels, attention=model.attention)


def saved_preset(setup: Setup, folder: Path) -> ModelConfig:
    """Save a preset's random weights in `folder`, unless it exists. The main process does it.

    They have the dtype of the matmuls, as the frozen weights of a run that draws them in place.

    Returns:
        A `model` section that names the checkpoint.
    """
    model, seed = setup.recipe.model, setup.recipe.train.seed
    if launch.rank() == 0 and not (folder / "config.json").exists():
        dtype = number_format(setup.settings).compute_dtype
        draw = partial(models.build, dtype=dtype, device=None, seed=seed, through=setup.device)
        built = draw(model, setup.config)
        adapter_files.keep_base(built, setup.config, folder)
    return ModelConfig(name=str(folder), kernels=model.kernels, attention=model.attention)
