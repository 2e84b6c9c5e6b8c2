"""The files of a run's adapters in PEFT's layout, and the weights that they refer to.

A run with adapters leaves `adapters/` with adapter_config.json and adapter_model.safetensors. A preset's random weights
are in no checkpoint, so the run keeps them in `base/`, to which the adapters refer.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tigon._quiet import quiet_peft
from tigon.errors import RunFolderError, UsageError, one_line
from tigon.models.kv_cache import cache_as_in
from tigon.models.loading.classifier import PEFT_TASKS, SEQUENCE, as_classifier, beside_adapters, labels_of
from tigon.models.loading.config import is_hub_id
from tigon.models.loading.reward_model import with_score
from tigon.models.loading.weight_files import AGAIN, DTYPES, Header, listed, read_headers, read_json
from tigon.recipe.keys import ModelConfig
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.lora import is_saved_as_difference
from tigon.trainer import model as models
from tigon.trainer.distributed import launch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer


ADAPTERS, INITIAL = "adapters", "initial-adapters"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = "default"  # PEFT's name of a model's first adapter


def name_in_file(name: str) -> str:
    """The name of an adapter's parameter in PEFT's file, which leaves out the name of the adapter."""
    return name.replace(".modules_to_save.default.", ".").replace(".default", "")


def keep_base(built: PreTrainedModel, config: PreTrainedConfig, folder: Path) -> None:
    """Save a preset's random weights in `folder`, unless they are there.

    Args:
        built: The model, before it gets adapters.
        config: Its config as it was loaded.
        folder: The folder of the checkpoint.
    """
    if launch.rank() == 0 and not (folder / "config.json").exists():
        with cache_as_in(built, config):
            built.save_pretrained(folder)


def name_base(wrapped: PeftModel, model: ModelConfig, base: Path) -> None:
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


def keep_initial(wrapped: PeftModel, settings: Settings, folder: Path) -> None:
    """Save the adapters before training if the trained ones are saved as the difference from them.

    The difference belongs to the weights of the checkpoint.
    """
    if is_saved_as_difference(settings) and launch.rank() == 0:
        wrapped.save_pretrained(folder, save_embedding_layers=False)


def save(wrapped: PeftModel, trainer: Trainer, settings: Settings, folder: Path) -> None:
    """Save the adapters in `folder`. Every process calls it."""
    if settings.sharding.divides_weights:  # gathered by all processes, written by the first
        trainer.save_model(str(folder))
    elif trainer.is_world_process_zero():
        initial = folder.with_name(INITIAL)
        converts = is_saved_as_difference(settings)
        with quiet_peft():
            before = str(initial) if converts else None
            wrapped.save_pretrained(
                folder, save_embedding_layers=False, path_initial_model_for_weight_conversion=before
            )
        if converts:
            shutil.rmtree(initial)
    if trainer.is_world_process_zero():
        declare_head(wrapped, folder)
        (folder / "training_args.bin").unlink(missing_ok=True)
        generation = getattr(wrapped.get_base_model(), "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)


def declare_head(model: Any, folder: Path) -> None:
    """Write config.json beside adapters over a model with a classification head: its labels and its padding token.

    adapter_config.json has neither, and the base model's config may lack both.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    base = model.get_base_model()
    task = next((task for task, name in PEFT_TASKS.items() if name == model.peft_config[_ADAPTER].task_type), None)
    if task is not None:
        config = as_classifier(base.config, task, labels_of(base.config))
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # of the run, not of the checkpoint
        config.save_pretrained(folder)


def merged_with_base(adapters: Path, model: ModelConfig, *, dtype: torch.dtype) -> Any:
    """The base model with the saved adapters merged into its weights, on the CPU.

    The weights in the GPU's memory may be quantised, sharded, or narrower than the checkpoint's.

    Args:
        adapters: The folder of the adapters.
        model: The checkpoint that they belong to.
        dtype: The dtype in which the base model is read and the sums are rounded.

    Raises:
        RunFolderError: As `attached`.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # with stage 3 alive, from_pretrained would partition the weights as it loads them
    plain = models.read(model, beside_adapters(models.load_config(model), adapters), dtype=dtype)
    return merged(attached(plain, adapters))


def attached(plain: PreTrainedModel, adapters: Path) -> Any:
    """The model inside PEFT's wrapper, with the saved adapters. Every command that reads adapters calls this.

    PEFT initialises a tensor that the file lacks as for a new run, and ignores a tensor that it does not know.

    Args:
        plain: The base model, on the CPU.
        adapters: The folder of the adapters.

    Raises:
        RunFolderError: The folder cannot be read, lacks a tensor, or does not belong to the model.
    """
    import peft

    headers = check_files(adapters)
    if getattr(plain, "is_loaded_in_4bit", False) or getattr(plain, "is_loaded_in_8bit", False):
        plain = plain.dequantize()  # a sum rounded to 4 bits would be another one, and cannot be saved
    if has_sequence_head(adapters):
        plain = with_score(plain)
    with quiet_peft():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = peft.PeftModel.from_pretrained(plain, str(adapters))
        except UserWarning as error:
            raise RunFolderError(f"{adapters} is not complete: {one_line(error)}; {AGAIN}") from None
        except Exception as error:  # PEFT raises any type of error for a wrong adapter_config.json
            raise RunFolderError(
                f"{adapters}: its adapters cannot be loaded into {plain.config.name_or_path or 'the model'}: "
                f"{one_line(error)}; {AGAIN}"
            ) from None
    _compare_names(adapters, headers, adapted, renamed=bool(getattr(plain, "_checkpoint_conversion_mapping", None)))
    return adapted


def has_sequence_head(adapters: Path) -> bool:
    """Whether the adapters are those of a reward model, or of a classifier of texts."""
    return read_json(adapters / ADAPTER_CONFIG).get("task_type") == PEFT_TASKS[SEQUENCE]


def check_against(wrapped: PeftModel, adapters: Path) -> None:
    """Check a checkpoint's adapters before the Trainer loads them into `wrapped`.

    Raises:
        RunFolderError: As `attached`.
    """
    _compare_names(adapters, check_files(adapters), wrapped, renamed=False)


def check_files(adapters: Path) -> Mapping[str, Header]:
    """The headers of a folder's adapters, after checking its two files without making a tensor.

    Raises:
        RunFolderError: A file is missing, damaged, a pickle or no regular file, or the config is not one of adapters.
    """
    file = adapters / ADAPTER_FILE
    try:
        declared = read_json(adapters / ADAPTER_CONFIG)
        if not file.exists():
            raise UsageError(f"{adapters} has no {ADAPTER_FILE}; save the adapters as safetensors, or {AGAIN}")
        headers = read_headers([file])
    except UsageError as error:
        raise RunFolderError(str(error)) from None
    if not headers:
        raise RunFolderError(f"{file} holds no tensors; {AGAIN}")
    if declared.get("megatron_config") is not None:
        raise RunFolderError(
            f"{adapters / ADAPTER_CONFIG}: megatron_config has PEFT import the module that the file names; remove it"
        )
    rank, largest = declared.get("r"), max(max(header.shape, default=0) for header in headers.values())
    if isinstance(rank, (int, float)) and rank > largest:
        raise RunFolderError(f"{adapters / ADAPTER_CONFIG}: r is {rank:,}, but {file.name} holds no such rank; {AGAIN}")
    wrong = [f"{name} is {header.dtype}" for name, header in headers.items() if not _is_floating(header)]
    if wrong:
        raise RunFolderError(f"{file}: {listed(wrong, 'tensor')}, which is not a floating-point type; {AGAIN}")
    return headers


def _is_floating(header: Header) -> bool:
    dtype = DTYPES.get(header.dtype)
    return dtype is not None and dtype.is_floating_point


def _compare_names(adapters: Path, held: Collection[str], wrapped: PeftModel, *, renamed: bool) -> None:
    """Refuse a file that lacks tensors, and warn of tensors that were not used. PEFT reports only some of the former.

    renamed: Whether PEFT renames the tensors when it loads them, so that only their numbers can be compared.
    """
    import peft

    with quiet_peft():
        expected = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    missing = sorted(set(expected) - set(held))
    own = {name.replace(".base_layer", "") for name, _ in wrapped.named_parameters()}  # an embedding saved beside them
    unused = sorted(set(held) - set(expected) - own)
    if renamed:
        missing, unused = missing[: max(0, len(expected) - len(held))], unused[: max(0, len(held) - len(expected))]
    if missing:
        rest = f"; it holds {listed(unused, 'tensor')} instead" if unused else ""
        raise RunFolderError(f"{adapters} is not complete: it lacks {listed(missing, 'tensor')}{rest}; {AGAIN}")
    if unused:
        what = f"{listed(unused, 'tensor')}, which {ADAPTER_CONFIG} does not name; they stay unused"
        print(f"warning  {adapters} holds {what}", file=sys.stderr, flush=True)


def merged(wrapped: PeftModel) -> Any:
    """Merge the adapters of a PEFT model into its base model, and return the base model.

    A head tied to the embeddings is untied first, because merging into one of them would change both.
    """
    base = wrapped.get_base_model()
    if base.get_output_embeddings() is None:  # it has a classification head
        return wrapped.merge_and_unload(progressbar=False)
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
