"""The files of a run's adapters in PEFT's layout, and the weights that they refer to.

A run with adapters leaves `adapters/` with adapter_config.json and adapter_model.safetensors. A preset's random weights
are in no checkpoint, so the run keeps them in `base/`, to which the adapters refer.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tigon.errors import RunFolderError
from tigon.models.kv_cache import cache_as_in
from tigon.models.loading.config import is_hub_id
from tigon.models.loading.weight_files import one_line
from tigon.recipe.keys import ModelConfig
from tigon.techniques.lora import is_saved_as_difference, quiet_peft
from tigon.techniques.records.choices import Choices
from tigon.techniques.sharding import weights_are_sharded
from tigon.trainer import model as models
from tigon.trainer.distributed import launch

ADAPTERS, INITIAL = "adapters", "initial-adapters"
_ADAPTER = "default"  # PEFT's name of a model's first adapter


def keep_base(built: Any, config: Any, folder: Path) -> None:
    """Save a preset's random weights in `folder`, unless they are there.

    Args:
        built: The model, before it gets adapters.
        config: Its config as it was loaded.
        folder: The folder of the checkpoint.
    """
    if launch.rank() == 0 and not (folder / "config.json").exists():
        with cache_as_in(built, config):
            built.save_pretrained(folder)


def name_base(wrapped: Any, model: ModelConfig, base: Path) -> None:
    """Write the model that the adapters belong to into their config, for AutoPeftModel and inference servers.

    Args:
        wrapped: The model with adapters.
        model: The `model` section of the recipe.
        base: The folder of a preset's random weights.
    """
    config = wrapped.peft_config[_ADAPTER]
    if is_hub_id(model.name):
        config.base_model_name_or_path, config.revision = model.name, model.revision
    else:
        folder = base if models.is_preset(model.name) else Path(model.name)
        config.base_model_name_or_path = str(folder.resolve())


def keep_initial(wrapped: Any, choices: Choices, folder: Path) -> None:
    """Save the adapters before training if the trained ones are saved as the difference from them.

    The difference belongs to the weights of the checkpoint.
    """
    if is_saved_as_difference(choices) and launch.rank() == 0:
        wrapped.save_pretrained(folder, save_embedding_layers=False)


def save(wrapped: Any, trainer: Any, choices: Choices, folder: Path) -> None:
    """Save the adapters in `folder`. Every process calls it."""
    if weights_are_sharded(choices):  # gathered by all processes, written by the first
        trainer.save_model(str(folder))
    elif trainer.is_world_process_zero():
        initial = folder.with_name(INITIAL)
        converts = is_saved_as_difference(choices)
        with quiet_peft():
            wrapped.save_pretrained(
                folder, save_embedding_layers=False,
                path_initial_model_for_weight_conversion=str(initial) if converts else None,
            )  # fmt: skip
        if converts:
            shutil.rmtree(initial)
    if trainer.is_world_process_zero():
        (folder / "training_args.bin").unlink(missing_ok=True)
        generation = getattr(wrapped.get_base_model(), "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)


def merged_with_base(adapters: Path, model: ModelConfig, *, dtype: torch.dtype) -> Any:
    """The base model with the saved adapters merged into its weights, on the CPU.

    The weights in the GPU's memory may be quantised, sharded, or narrower than the checkpoint's.

    Args:
        adapters: The folder of the adapters.
        model: The checkpoint that they belong to.
        dtype: The dtype in which the base model is read and the sums are rounded.

    Raises:
        RunFolderError: The adapters' file lacks a tensor.
    """
    import peft
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # with stage 3 alive, from_pretrained would partition the weights as it loads them
    plain = models.read(model, models.load_config(model), dtype=dtype)
    with quiet_peft():
        warnings.filterwarnings("error", message="Found missing adapter keys")  # PEFT would use zeros for them
        try:
            adapted = peft.PeftModel.from_pretrained(plain, str(adapters))
        except UserWarning as error:
            raise RunFolderError(f"{adapters} is not complete: {one_line(error)}") from None
    return merged(adapted)


def merged(wrapped: Any) -> Any:
    """Merge the adapters of a PEFT model into its base model, and return the base model.

    A head tied to the embeddings is untied first, because merging into one of them would change both.
    """
    base = wrapped.get_base_model()
    own = [_own_weights(module) for module in (base.get_output_embeddings(), base.get_input_embeddings())]
    if any(adapted for _, adapted in own) and own[0][0].weight is own[1][0].weight:
        own[0][0].weight = nn.Parameter(own[0][0].weight.detach().clone())
        base.config.tie_word_embeddings = False
    return wrapped.merge_and_unload(progressbar=False)


def _own_weights(module: Any) -> tuple[Any, bool]:
    """Returns (the module with the checkpoint's own weight, whether it has an adapter or a trained copy)."""
    for name in ("base_layer", "original_module"):
        if hasattr(module, name):
            return getattr(module, name), True
    return module, False
