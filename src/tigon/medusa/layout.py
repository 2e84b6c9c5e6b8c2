"""Saves and loads heads. tigon, vLLM and FasterDecoding/Medusa can all read the folder:

    config.json          The authors' names. vLLM renames any key with `num` and `heads` to num_heads, and any key with
                         `num` and `layers` to num_hidden_layers (vllm/transformers_utils/configs/medusa.py).
    model.safetensors    vLLM's names: blocks.k.layers.i.{weight,bias}, lm_heads.k.weight. With `original_lm_head` there
                         is a single lm_heads.0.weight (vllm/model_executor/models/medusa.py). `medusa_fc_bias` is set,
                         because vLLM's blocks lack biases by default.
    medusa_lm_head.pt    FasterDecoding/Medusa's names: k.i.linear.{weight,bias} and k.n.weight
                         (medusa/model/medusa_model.py).

Other programs read MTP modules only as part of a model family. They are saved with the names of DeepSeek-V3's
checkpoints, model.layers.N.*, where N continues after the model's last layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon._files import read_text
from tigon.errors import UsageError
from tigon.medusa.spec import HeadsSpec

CONFIG, WEIGHTS, AUTHORS_WEIGHTS = "config.json", "model.safetensors", "medusa_lm_head.pt"


def save_heads(
    spec: HeadsSpec, state: Mapping[str, Tensor], folder: Path, *, head: Tensor, base: str, n_layers: int
) -> None:
    """Save heads to a folder.

    Args:
        spec: the shape of the heads.
        state: the heads' state_dict.
        folder: the target folder; created if missing.
        head: the model's lm_head weight (V, H), which is saved with shared heads.
        base: the name or folder of the model, for FasterDecoding/Medusa.
        n_layers: number of decoder layers of the model.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocab, hidden = head.shape
    config: dict[str, Any] = {
        "architectures": ["MedusaModel" if spec.kind == "medusa" else "MtpModules"],
        "model_type": spec.kind,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "base_model_name_or_path": base,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if spec.kind == "medusa":
        config |= {"medusa_num_heads": spec.count, "medusa_num_layers": spec.layers}
        config |= {"medusa_fc_bias": True, "original_lm_head": spec.shared}
    else:
        config |= {"num_nextn_predict_layers": spec.count, "base_layers": n_layers}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if spec.kind == "mtp":
        save_file({_mtp_name(name, n_layers): t for name, t in on_cpu.items()}, folder / WEIGHTS, {"format": "pt"})
        return
    lm_head = head.detach().cpu().contiguous()
    written = {**on_cpu, **({"lm_heads.0.weight": lm_head} if spec.shared else {})}
    save_file(written, folder / WEIGHTS, {"format": "pt"})
    authors = {_authors_name(name, spec): tensor for name, tensor in on_cpu.items()}
    if spec.shared:  # one tensor under several names; the file holds it once
        authors |= {f"{k}.{spec.layers}.weight": lm_head for k in range(spec.count)}
    torch.save(authors, folder / AUTHORS_WEIGHTS)


def load_heads(folder: Path) -> tuple[HeadsSpec, dict[str, Tensor]]:
    """Load (spec, state_dict) of heads from a folder written by `save_heads` or by FasterDecoding/Medusa's trainer.

    Raises:
        UsageError: a file is missing, cannot be read, or does not hold heads.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} has no {CONFIG}; give a folder of heads, which `tigon medusa` writes into its run.")
    try:
        config = json.loads(read_text(folder / CONFIG))
        if not isinstance(config, dict):
            raise UsageError(
                f"{folder / CONFIG} holds a {type(config).__name__}, not an object; give a folder of heads."
            )
        spec, state = _load(folder, config)
    except UsageError:
        raise
    except Exception as error:  # the three file formats raise different errors for damaged files
        raise UsageError(f"{folder}: its heads cannot be read ({type(error).__name__}: {error}).") from None
    if not state:
        raise UsageError(f"{folder}: its files contain no weights; give the folder that `tigon medusa` wrote.")
    return spec, state


def _load(folder: Path, config: dict[str, Any]) -> tuple[HeadsSpec, dict[str, Tensor]]:
    from safetensors.torch import load_file

    if "num_nextn_predict_layers" in config:
        spec = HeadsSpec(kind="mtp", count=_number(folder, config, "num_nextn_predict_layers"), shared=True)
        read = load_file(folder / WEIGHTS)
        return spec, {_mtp_name_back(name, config["base_layers"]): tensor for name, tensor in read.items()}
    spec = HeadsSpec(
        count=_number(folder, config, "medusa_num_heads", "num_heads"),
        layers=_number(folder, config, "medusa_num_layers", "num_hidden_layers", default=1),
        shared=bool(config.get("original_lm_head", False)),
    )
    if not spec.count:
        raise UsageError(f"{folder / CONFIG} lacks medusa_num_heads, so the folder does not hold Medusa heads.")
    if (folder / WEIGHTS).is_file():
        read = load_file(folder / WEIGHTS)
    elif (folder / AUTHORS_WEIGHTS).is_file():
        state = torch.load(folder / AUTHORS_WEIGHTS, map_location="cpu", weights_only=True)
        read = {_name_of_authors(name, spec): tensor for name, tensor in state.items()}
    else:
        raise UsageError(f"{folder} contains neither {WEIGHTS} nor {AUTHORS_WEIGHTS}.")
    return spec, {name: t for name, t in read.items() if not (spec.shared and name.startswith("lm_heads."))}


def _number(folder: Path, config: dict[str, Any], *names: str, default: int = 0) -> int:
    """The value of the first of `names` in the config. Raises UsageError unless it is a whole number."""
    name = next((name for name in names if name in config), None)
    value = default if name is None else config[name]
    if type(value) is not int or value < 0:
        raise UsageError(f"{folder / CONFIG}: {name} is {value!r}; it must be a whole number.")
    return value


def _authors_name(name: str, spec: HeadsSpec) -> str:
    block = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
    if block:
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    return f"{name.split('.')[1]}.{spec.layers}.weight"


def _name_of_authors(name: str, spec: HeadsSpec) -> str:
    block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
    if block:
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    return f"lm_heads.{name.split('.')[0]}.weight"


_MTP_LAYER, _MTP_NORM = "layer.", "norm."


def _mtp_name(name: str, n_layers: int) -> str:
    _, depth, rest = name.split(".", 2)
    if rest.startswith(_MTP_LAYER):
        rest = rest.removeprefix(_MTP_LAYER)
    elif rest.startswith(_MTP_NORM):
        rest = f"shared_head.{rest}"
    return f"model.layers.{n_layers + int(depth)}.{rest}"


def _mtp_name_back(name: str, n_layers: int) -> str:
    _, _, number, rest = name.split(".", 3)
    if rest.startswith("shared_head."):
        rest = rest.removeprefix("shared_head.")
    elif not rest.startswith(("enorm.", "hnorm.", "eh_proj.")):
        rest = _MTP_LAYER + rest
    return f"mtp.{int(number) - n_layers}.{rest}"
