"""Finds a model by name: its transformers config, and the model on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tigon._files import refuse_odd_files
from tigon.errors import UsageError, one_line
from tigon.models.loading.presets import MULTIMODAL_SHAPES, PRESETS
from tigon.models.loading.weight_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The deepest models with published weights have 126 layers (Llama-3.1-405B). The widest mixtures have some hundred
# experts.
MAX_LAYERS, MAX_EXPERTS = 1024, 16384
_LAYERS = re.compile(r"(num_|n_)?((hidden|decoder|encoder|nextn_predict)_)?layers?|num_nextn_predict_layers")
_EXPERTS = re.compile(r"(num|n)_(local_|routed_|shared_)?experts")

GENERATION_CONFIG = "generation_config.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `owner/model` and is not a local path."""
    return not Path(name).exists() and _HUB_ID.fullmatch(name) is not None


def load_config(name: str) -> Any:
    """The transformers config of a preset, folder, config.json or hub id.

    Only a hub id may be downloaded, and code that comes with a checkpoint is never run.

    Raises:
        UsageError: the name is not a preset, folder, config.json or hub id, or transformers cannot read the config.
    """
    if name in PRESETS or name in MULTIMODAL_SHAPES:
        from transformers import AutoConfig

        shape = dict(PRESETS.get(name) or MULTIMODAL_SHAPES[name])
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    path = Path(name)
    if name and path.exists():
        return _config_from_file(path / "config.json" if path.is_dir() else path)
    if is_hub_id(name):
        return _config_from_hub(name)
    raise UsageError(
        f"{name!r} is neither a file, nor a folder, nor a hub id (owner/model), nor a preset; presets are "
        f"{', '.join(PRESETS)}."
    )


def _config_from_file(file: Path) -> Any:
    from transformers import AutoConfig

    if not file.exists():
        raise UsageError(f"{file.parent} contains no config.json; give the folder of a Hugging Face checkpoint.")
    _refuse_remote_code(str(file), declared_in(file))
    try:
        config = AutoConfig.from_pretrained(file)
    except Exception as error:  # transformers and huggingface_hub raise a dozen types for a bad config
        raise UsageError(f"{file}: transformers cannot read it: {one_line(error)}") from None
    return checked(config, str(file))


def declared_in(file: Path) -> dict[str, Any]:
    """The content of a config.json. Raises UsageError for a file without model_type or with impossible counts."""
    declared = read_json(file)
    if not isinstance(declared.get("model_type"), str):
        raise UsageError(f"{file} has no model_type, so it is not the config.json of a Hugging Face model.")
    check_counts(declared, str(file))
    names = declared.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"{file}: architectures is {str(names)[:80]}; it must be a list of class names.")
    depth = declared.get("num_hidden_layers", 1)
    if isinstance(depth, int) and depth < 1:
        raise UsageError(f"{file}: num_hidden_layers is {depth}; a model has at least one layer.")
    return declared


def checked(config: PreTrainedConfig, where: str) -> Any:
    """A config that transformers has read from somebody's file.

    Args:
        config: The config.
        where: The start of the message.

    Raises:
        UsageError: It names a kernel on the hub, whose code transformers would download and run, or a part of it is
            that of another type of model.
    """
    from transformers import PreTrainedConfig

    text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise UsageError(f"{where}: its text_config does not belong to a model of type {config.model_type}; remove it")
    parts = [config, text, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, name, None)):
                raise UsageError(
                    f"{where}: {name.lstrip('_')} is {getattr(part, name)!r}, whose code transformers would fetch and "
                    "run; remove it from config.json"
                )
    return config


def check_folder(folder: Path) -> None:
    """Check the files of a checkpoint's folder that transformers opens beside the weights and config.json.

    Raises:
        UsageError: The folder holds a pipe, a device or a huge text, or generation_config.json is not an object.
    """
    try:
        refuse_odd_files(folder)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; remove it from the folder of the checkpoint") from None
    if (folder / GENERATION_CONFIG).exists():
        read_json(folder / GENERATION_CONFIG)


def check_counts(values: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if a config, or a nested one, has more layers or experts than the limits.

    Building 10,000 layers takes minutes, and a billion would never finish. where: the start of the message.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            check_counts(value, f"{where}: {name}")
        limit = MAX_LAYERS if _LAYERS.fullmatch(name) else MAX_EXPERTS if _EXPERTS.fullmatch(name) else None
        if limit is not None and isinstance(value, (int, float)) and value > limit:
            raise UsageError(f"{where}: {name} is {value:,}, but tigon builds at most {limit:,}; lower it")


def _config_from_hub(name: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers, huggingface_hub and the connection raise many types
        raise UsageError(f"{name}: its config cannot be loaded from the hub: {one_line(error)}") from None
    return checked(config, name)


def _refuse_remote_code(name: str, declared: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    if "auto_map" in declared and declared["model_type"] not in CONFIG_MAPPING:
        raise UsageError(
            f"{name}: the model's code comes with the checkpoint, and tigon does not run it to read a config. Load "
            "the model yourself and print(tigon.patch(model))."
        )


def build_on_meta(name: str, config: PreTrainedConfig) -> torch.nn.Module:
    """Build the model of a config on the meta device, without memory for its weights.

    name: for the message. Raises UsageError if transformers cannot build it.
    """
    import transformers

    (architecture,) = (getattr(config, "architectures", None) or [""])[:1]
    cls = getattr(transformers, architecture, None) if architecture else None
    try:
        with torch.device("meta"):
            if cls is not None:
                return cls(config)  # type: ignore[no-any-return]
            sees = "vision_config" in getattr(config, "sub_configs", {})
            auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
            return auto.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:  # a config can be wrong in as many ways as there are models
        what = architecture or "a language model"
        raise UsageError(f"{name}: transformers cannot build {what} from its config: {one_line(error)}") from None
