"""Checks before the run folder exists: packages, device, precision, sizes, memory and disk space."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tigon
from tigon._install import install_command
from tigon.errors import RecipeError, RunFolderError
from tigon.models import packed_documents
from tigon.models.hybrid_layers import LayerPath, refused_backward
from tigon.planner.search import space
from tigon.planner.simulate.optimizer_cost import Parameter, cost_of
from tigon.profiler.recording.device_memory import total_bytes
from tigon.recipe.keys import TRACKERS, Recipe
from tigon.techniques import matrix, model_kernels
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.lora import frozen_dtype, keeps_mxfp4
from tigon.techniques.precision import check_gpu
from tigon.trainer.checkpoint import nvme_swap
from tigon.trainer.distributed import launch, launcher_variables
from tigon.trainer.guards import system_limits
from tigon.trainer.model import is_preset
from tigon.units import in_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYER_NUMBER = re.compile(r"\.\d+\.")
_OF_TRAINING = ("transformers", "accelerate", "tokenizers", "safetensors", "tensorboard")
EXTRAS = (*_OF_TRAINING, "yaml", "rich", "matplotlib", "jinja2")
OLDEST_TRANSFORMERS = (5, 8)


def check_packages() -> None:
    """Raise RecipeError if a required package is missing or transformers is too old."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(f"tigon train needs {', '.join(missing)}, not installed here: {install_command('train')}")
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRANSFORMERS:
        raise RecipeError(f"transformers {version} is installed, 5.8 or newer is needed: {install_command('train')}")


def check_trackers(names: Sequence[str]) -> None:
    """Raise RecipeError if the package of a tracker in `train.report_to` is not installed."""
    for name in names:
        spec = importlib.util.find_spec(name) if name in TRACKERS else None
        # A folder of that name, such as wandb's own output in the current folder, has a spec without an origin.
        if name in TRACKERS and (spec is None or spec.origin is None):
            raise RecipeError(f"train.report_to: {name} is not installed here: pip install {name}")


def check_process(workers: int = 0) -> None:
    """Raise the limit of open files, check the variables of launchers, and remove Accelerate's with a warning.

    Args:
        workers: Processes that prepare batches.

    Raises:
        RecipeError: The limit is too low for the workers.
        ProcessError: The variables of a launcher are incomplete; the message names the variable.
    """
    system_limits.raise_open_files(workers)
    launcher_variables.check_environment()
    for text in launcher_variables.ignore_accelerate_variables():
        if launch.rank() == 0:
            print(f"warning  {text}", flush=True)


def gpu_present() -> bool:
    return torch.cuda.is_available()


def check_device(recipe: Recipe) -> torch.device:
    """The device of the run.

    Raises:
        RecipeError: The device is not there, too few GPUs are visible, or the device lacks the recipe's precision or
            attention.
    """
    wanted = recipe.train.device
    if wanted == "cuda" and not gpu_present():
        raise RecipeError("train.device is cuda, but PyTorch finds no GPU; use --set train.device=cpu")
    on_gpu = wanted != "cpu" and gpu_present()
    if on_gpu and not launch.started_by_launcher() and recipe.sharding.gpus > torch.cuda.device_count():
        raise RecipeError(
            f"sharding.gpus is {recipe.sharding.gpus}, but PyTorch finds {torch.cuda.device_count()} GPUs; lower it"
        )
    here = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())) if on_gpu else 0
    device = torch.device("cuda", here) if on_gpu else torch.device("cpu")
    settings = settings_here(recipe, device)
    check_gpu(settings, device)
    model_kernels.check_attention(settings, device)
    return device


def check_techniques(recipe: Recipe, device: torch.device) -> Settings:
    """The techniques of this run.

    Raises:
        RecipeError: They exclude one another, or this machine lacks the device or package for one of them.
    """
    settings = settings_here(recipe, device)
    matrix.check(settings, device=device.type)
    matrix.check_machine(settings, device)
    if recipe.comparison.steps and "liger" in recipe.comparison.kernels:
        model_kernels.check_liger("comparison.kernels", device)
    return settings


def settings_here(recipe: Recipe, device: torch.device) -> Settings:
    """The settings of a recipe on this device, with all processes that run."""
    settings = recipe.settings(precision=resolve_precision(recipe.train.precision, device))
    return settings.having({"sharding.gpus": max(recipe.sharding.gpus, launch.world_size())})


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision that `auto` stands for on `device`; any other precision unchanged."""
    if precision != "auto":
        return precision
    return "amp-bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"


def most_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions of the model; None without a limit, which XLNet's config writes as -1."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def check_lengths(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise RecipeError if `data.sequence_length` exceeds the model's number of positions."""
    limit = most_positions(config)
    length = recipe.data.sequence_length
    if limit is not None and length > limit:
        raise RecipeError(
            f"data.sequence_length is {length}, but {recipe.model.name} takes at most {limit} tokens; lower it"
        )


def mixes_documents(recipe: Recipe, config: PreTrainedConfig) -> str | None:
    """Why a run of this recipe would mix the documents of a packed sample, or None."""
    if (reason := packed_documents.objection(config)) is not None or not packed_documents.has_states(config):
        return reason
    settings = recipe.settings()
    if settings.sharding.zero == 3:
        return "its layers with a state run once per document, and sharding.zero: 3 was not tried with that"
    if settings.train.cuda_graphs:
        return "its layers with a state run once per document, which train.cuda_graphs cannot record"
    return None


def check_documents(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise RecipeError if the model cannot keep the documents of a packed sample apart, and packing was asked for.

    If it was not, `auto_packing.chosen` switches it off.
    """
    data = recipe.data
    if not data.packing or data.cross_document_attention:
        return
    if (reason := mixes_documents(recipe, config)) is not None:
        raise RecipeError(
            f"data.packing is true, but {recipe.model.name} mixes the documents of a sample: {reason}; set "
            "data.packing: false, or data.cross_document_attention: true to let it"
        )


def check_backward(name: str, paths: Iterable[LayerPath], device: torch.device) -> None:
    """Raise RecipeError if the installed kernels of layers with a state refuse their backward pass on this GPU."""
    if device.type == "cuda" and (said := refused_backward(paths)):
        raise RecipeError(f"model.name is {name}: {said}")


def check_sample(recipe: Recipe, config: PreTrainedConfig, n_prompt: int) -> None:
    """Raise RecipeError if a prompt of `n_prompt` tokens and the text sample exceed the model's number of positions."""
    limit = most_positions(config)
    n_tokens = recipe.output.sample_tokens
    if limit is None or not n_tokens or n_prompt + n_tokens <= limit:
        return
    fix = "shorten output.sample_prompt"
    if n_prompt < limit:
        fix = f"set output.sample_tokens to {limit - n_prompt} or less"
    raise RecipeError(
        f"output.sample_tokens is {n_tokens}, after a prompt of {n_prompt} tokens, but {recipe.model.name} takes at "
        f"most {limit} tokens; {fix}"
    )


def check_vocabulary(recipe: Recipe, config: PreTrainedConfig, tokenizer_size: int) -> None:
    """Raise RecipeError if the tokenizer has more tokens than the model's embedding has rows."""
    rows = config.get_text_config().vocab_size  # a config of text and images has it inside
    if tokenizer_size > rows:
        if recipe.data.tokenizer == "auto":
            fix = f"set data.vocab_size to {rows} or less"
        else:
            fix = f"use the model's own tokenizer, or set model.config.vocab_size to {tokenizer_size} or more"
        raise RecipeError(
            f"the tokenizer has {tokenizer_size} tokens, but {recipe.model.name} has a vocabulary of {rows}; {fix}"
        )


@dataclass(frozen=True)
class Sizes:
    """Bytes of weights, gradients and optimizer states, from shapes alone."""

    weights: int
    gradients: int
    states: int


def sizes(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
    """The sizes of the model states in bytes, without sharding and without adapters, which are small."""
    optimizer = cost_of(settings)
    itemsize = frozen_dtype(settings).itemsize
    numel = sum(math.prod(shape) for shape in shapes.values())
    if settings.lora.used:
        if keeps_mxfp4(settings):
            of_experts = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 3)
            return Sizes(of_experts // 2 + (numel - of_experts) * itemsize, 0, 0)
        quantized = numel // 2 if settings.lora.quantize_to == "nf4" else numel
        return Sizes(quantized if settings.lora.quantize else numel * itemsize, 0, 0)
    vocabulary = max(max(shape, default=0) for shape in shapes.values())
    matrices = {name: len(shape) == 2 and vocabulary not in shape for name, shape in shapes.items()}
    parameters = [  # Muon leaves out a vision tower too, which is small and counted here
        Parameter(s, itemsize, projected=matrices[name], by_muon=matrices[name] and bool(_LAYER_NUMBER.search(name)))
        for name, s in shapes.items()
    ]
    states = optimizer.state_bytes(parameters)
    return Sizes(numel * itemsize, 0 if settings.train.optimizer_row.in_backward else numel * itemsize, states)


def check_memory(
    recipe: Recipe, settings: Settings, device: torch.device, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise RecipeError if weights, gradients and optimizer states together exceed the memory that holds them."""
    if settings.sharding.divides_states:
        return  # their place depends on stage and offload, which `tigon plan` takes into account
    if settings.lora.base_offload:
        device = torch.device("cpu")
    model_sizes, has_bytes = sizes(settings, shapes), total_bytes(device)
    needed_bytes = model_sizes.weights + model_sizes.gradients + model_sizes.states
    n_parameters = sum(math.prod(shape) for shape in shapes.values())
    if needed_bytes > has_bytes:
        streams = device.type == "cuda" and space.layers_on_host(settings) is not None
        raise RecipeError(
            f"{recipe.model.name} has {n_parameters / 1e9:.1f} G parameters: weights, gradients and "
            f"{settings.train.optimizer} states take {needed_bytes / 2**30:.0f} GiB, but {device} has "
            f"{has_bytes / 2**30:.0f} GiB; choose a smaller model{', or set lora.base_offload: true' * streams}"
        )


def check_disk(recipe: Recipe, settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the disk space for the kept checkpoints, the one being written, the final model, and the NVMe swap.

    DeepSpeed does not notice if a write to its swap files fails on a full disk.

    Raises:
        RunFolderError: The space is too small.
    """
    model_sizes = sizes(settings, shapes)
    needed_bytes = 32 * 2**20  # reports, charts, logs
    train = recipe.train
    if (train.save_steps is not None or train.load_best or recipe.eval.lm_eval) and not settings.lora.used:
        n_checkpoints = train.keep_checkpoints + 1 + train.load_best
        needed_bytes += n_checkpoints * (model_sizes.weights + model_sizes.states)
    writes_weights = not settings.lora.used or recipe.output.merge or is_preset(recipe.model.name)
    if recipe.output.save_model and writes_weights:
        needed_bytes += model_sizes.weights
    fix = "set another output.folder, or lower train.keep_checkpoints"
    _check_room(recipe.output.folder, needed_bytes, 0, "checkpoints and model", fix)
    path = recipe.sharding.nvme_folder
    if path is not None:
        same_disk = _disk(path).stat().st_dev == _disk(recipe.output.folder).stat().st_dev
        output_bytes = needed_bytes if same_disk else 0
        needed_bytes = model_sizes.weights if settings.train.precision == "fp32" else model_sizes.weights // 2
        if not settings.lora.used:  # adapters are too small to count
            needed_bytes += model_sizes.weights + model_sizes.gradients + model_sizes.states
        local_share = int(os.environ.get("LOCAL_WORLD_SIZE", recipe.sharding.gpus)) / settings.sharding.gpus
        what = "weights and states in files" + (", and for checkpoints and model" if output_bytes else "")
        fix = "set another sharding.nvme_folder, or sharding.offload: cpu"
        _check_room(path, int(needed_bytes * local_share) + output_bytes, nvme_swap.left_bytes(path), what, fix)


def _disk(path: str) -> Path:
    """The deepest folder of a path that exists already."""
    existing = Path(path).resolve()
    while not existing.exists():
        existing = existing.parent
    return existing


def _check_room(path: str, needed_bytes: int, removed_bytes: int, what: str, fix: str) -> None:
    """Raise RunFolderError without enough space. removed_bytes: Bytes of old files that the run removes first."""
    free_bytes = shutil.disk_usage(_disk(path)).free + removed_bytes
    if free_bytes < needed_bytes:
        raise RunFolderError(
            f"{path}: {in_bytes(free_bytes)} free, but the run needs {in_bytes(needed_bytes)} for {what}; "
            f"free some space, {fix}"
        )


OF_SOME_RUNS = ("bitsandbytes", "deepspeed", "torchao", "trl")
"""Packages that environment.json names only where they are installed."""


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware for environment.json. It leaves out environment variables and user and host names."""
    packages = ("torch", "triton", "transformers", "accelerate", "peft", "tokenizers", "safetensors")
    fields = {"tigon": tigon.__version__, "python": platform.python_version()}
    for name in packages:
        try:
            fields[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fields[name] = "not installed"
    for name in OF_SOME_RUNS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            fields[name] = importlib.metadata.version(name)
    hardware: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware["gpu"] = properties.name
        hardware["gpu_memory_bytes"] = properties.total_memory
    hardware["cpu_threads"] = torch.get_num_threads()
    return {"versions": fields, "hardware": hardware}
