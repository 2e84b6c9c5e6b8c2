"""A model by name: its transformers config, and the model itself on the meta device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from tigon.errors import UsageError
from tigon.models.presets import PRESETS

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """`owner/model` that is not a folder here."""
    return not Path(name).exists() and _HUB_ID.fullmatch(name) is not None


def load_config(name: str) -> Any:
    """The transformers config behind a preset, folder, config.json or hub id. Raises UsageError.

    Nothing is downloaded unless `name` is a hub id, and no code that comes with a checkpoint is run.
    """
    if name in PRESETS:
        from transformers import AutoConfig

        shape = dict(PRESETS[name])
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

    if not file.is_file():
        raise UsageError(f"{file.parent}: there is no config.json in it; give the folder of a Hugging Face checkpoint.")
    try:
        declared = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{file} is not a JSON file that can be read: {error}") from None
    if not isinstance(declared, dict) or "model_type" not in declared:
        raise UsageError(f"{file} has no model_type, so it is not the config.json of a Hugging Face model.")
    _refuse_remote_code(str(file), declared)
    try:
        return AutoConfig.from_pretrained(file)
    except Exception as error:  # transformers and huggingface_hub raise a dozen types for a config they cannot take
        raise UsageError(f"{file}: transformers cannot read it: {_one_line(error)}") from None


def _config_from_hub(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # as above, and those of the connection
        raise UsageError(f"{name}: its config cannot be had from the hub: {_one_line(error)}") from None


def _refuse_remote_code(name: str, declared: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    if "auto_map" in declared and declared["model_type"] not in CONFIG_MAPPING:
        raise UsageError(
            f"{name}: the model's code comes with the checkpoint, and is not run only to look at its config. Load "
            "the model yourself and print(tigon.patch(model))."
        )


def build_on_meta(name: str, config: Any) -> torch.nn.Module:
    """The model of a config without memory for its weights; `name` is for the message. Raises UsageError."""
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
        raise UsageError(f"{name}: transformers cannot build {what} from its config: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    """The first sentence of a message that may be a page."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0][:240]}"
