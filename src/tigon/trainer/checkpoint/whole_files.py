"""Checkpoints with whole weights: reads them into a model sharded by FSDP2, and makes them of distributed ones.

Only the main process reads the files of a checkpoint as the Trainer writes it. PyTorch broadcasts each tensor, and
every process keeps its part.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from tigon.trainer.checkpoint import distributed_checkpoint
from tigon.trainer.distributed import launch

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE, OPTIMIZER_FILE, FSDP_FILE = "adapter_model.safetensors", "optimizer.pt", "pytorch_model_fsdp.bin"


def has_whole_files(checkpoint: Path) -> bool:
    """Whether a checkpoint has the files of a run whose weights are not sharded."""
    return (checkpoint / OPTIMIZER_FILE).is_file() and not (checkpoint / FSDP_FILE).exists()


def load_model(model: Any, checkpoint: Path) -> None:
    """Read whole weights, or adapters, into the sharded `model`. Every process calls it."""
    state: dict[str, Any] = dict(_weights(model, checkpoint)) if launch.rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=launch.world_size() > 1, strict=False)
    set_model_state_dict(model, state, options=options)


def load_optimizer(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Read whole optimizer states into the optimizer of the sharded `model`. Every process calls it."""
    state: dict[str, Any] = {}
    if launch.rank() == 0:
        saved = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        state = by_name(saved, optimizer, {parameter: name for name, parameter in model.named_parameters()})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=launch.world_size() > 1)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def by_name(saved: Mapping[str, Any], optimizer: Any, names: Mapping[Any, str]) -> dict[str, Any]:
    """An optimizer's state dict with the parameters' names instead of their numbers.

    Args:
        saved: The state dict of an optimizer with the same groups.
        optimizer: The optimizer whose parameters have the names.
        names: Parameter -> name.
    """
    name_of = {
        number: names[parameter]
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(group["params"], own["params"], strict=True)
    }
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {
        "state": {name_of[number]: state for number, state in saved["state"].items()},
        "param_groups": groups,
    }


def consolidate(checkpoint: Path, folder: Path) -> None:
    """Write the weights of a distributed checkpoint to a new folder, in the layout of transformers or PEFT.

    Raises:
        RunFolderError: The file that lists the tensors is not one of PyTorch's.
        RuntimeError: A file is missing or damaged.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import save_file

    state = distributed_checkpoint.whole_weights(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*config.json"):
        shutil.copy(file, folder)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        adapters = {_name_in_adapter_file(name): tensor for name, tensor in state.items()}
        save_file(adapters, folder / ADAPTER_FILE, metadata={"format": "pt"})
    else:
        save_torch_state_dict(state, folder)


def _weights(model: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if not (checkpoint / ADAPTER_FILE).is_file():
        return state
    # PEFT leaves the adapter's name out of the names in its file.
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: state[short] for name in trained if (short := _name_in_adapter_file(name)) in state}


def _name_in_adapter_file(name: str) -> str:
    return name.replace(".modules_to_save.default.", ".").replace(".default", "")
