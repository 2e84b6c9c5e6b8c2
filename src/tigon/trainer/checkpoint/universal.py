"""Reads a checkpoint of DeepSpeed ZeRO with another engine, through DeepSpeed's universal checkpoint.

DeepSpeed's `ds_to_universal` writes the whole fp32 weights and AdamW's moments of each parameter. It needs no GPU. The
main process runs it and reads the files; PyTorch broadcasts each tensor, and every process keeps its part.

The other direction, into ZeRO, is refused. DeepSpeed 0.19.8's loader for stage 3 gives each parameter group the
hyperparameters of the first (load_hp_checkpoint_state_from_checkpoint_dir_stage3), so that norms would decay.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from tigon.recipe.keys import OBJECTIVE_SECTIONS, Recipe
from tigon.trainer.distributed import launch
from tigon.trainer.distributed.deepspeed_classes import allow_deepspeed_globals

LATEST = "latest"
"""The file of a checkpoint in which DeepSpeed names the folder with its states."""
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = ("adamw", "adamw-foreach")
"""Those whose states the universal checkpoint has."""


def problem(before: Recipe) -> str | None:
    """Why another engine cannot read the checkpoints of a run with ZeRO, in half a sentence; None if it can."""
    reasons = (
        (before.lora.rank is not None, "with lora.rank"),
        (before.train.objective not in ("auto", "causal_lm"), f"with train.objective: {before.train.objective}"),
        (bool(before.data.images), "with data.images"),
        (before.sharding.offload != "none", "with sharding.offload"),
        (before.train.optimizer not in OPTIMIZERS, f"with train.optimizer: {before.train.optimizer}"),
        (before.train.precision == "amp-fp16", "with train.precision: amp-fp16, whose loss scale they lack,"),
    )
    plain = Recipe()
    changed = next((name for name in OBJECTIVE_SECTIONS if getattr(before, name) != getattr(plain, name)), None)
    return next((reason for applies, reason in reasons if applies), f"with the section {changed}" if changed else None)


def is_deepspeeds(checkpoint: Path) -> bool:
    """Whether DeepSpeed has written the optimizer states of a checkpoint."""
    return (checkpoint / LATEST).is_file()


def load_model(model: Any, checkpoint: Path) -> None:
    """Read the whole fp32 weights into `model`, sharded or not. Every process calls it, before `load_optimizer`."""
    state: dict[str, Any] = {}
    if launch.rank() == 0:
        _convert(checkpoint)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        state = {name: _read(checkpoint, name, "fp32").reshape(shape) for name, shape in shapes.items()}
    set_model_state_dict(model, state, options=_options(strict=False))


def load_optimizer(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Read AdamW's states, and remove the converted files. Every process calls it, after `load_model`."""
    state: dict[str, Any] = {}
    if launch.rank() == 0:
        state = _optimizer_state(model, optimizer, checkpoint)
        shutil.rmtree(_folder(checkpoint))
    set_optimizer_state_dict(model, optimizer, state, options=_options())


def _optimizer_state(model: Any, optimizer: Any, checkpoint: Path) -> dict[str, Any]:
    """The state dict of an optimizer, with parameters' names instead of numbers."""
    common = torch.load(_folder(checkpoint) / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, states = [], dict[str, Any]()
    for saved, own in zip(common["param_groups"], optimizer.param_groups, strict=True):
        group = {key: value for key, value in saved.items() if key in own}
        groups.append({**own, **group, "params": [names[parameter] for parameter in own["params"]]})
        for parameter in own["params"]:
            name = names[parameter]
            moments = {key: _read(checkpoint, name, key).reshape(parameter.shape) for key in MOMENTS}
            states[name] = {"step": _step(common, checkpoint, name), **moments}
    return {"state": states, "param_groups": groups}


def _step(common: dict[str, Any], checkpoint: Path, name: str) -> torch.Tensor:
    """AdamW's count of steps: stages 1 and 2 have one per parameter, stage 3 one in the common file."""
    by_stage_3 = common.get("optimizer_state_dict")
    step = _read(checkpoint, name, "step") if by_stage_3 is None else by_stage_3["state"][0]["step"]
    return torch.as_tensor(float(step), dtype=torch.float32)


def _read(checkpoint: Path, name: str, key: str) -> Any:
    found = torch.load(_folder(checkpoint) / "zero" / name / f"{key}.pt", map_location="cpu", weights_only=True)
    return found["param"] if isinstance(found, dict) else found


def _folder(checkpoint: Path) -> Path:
    """The folder of a checkpoint's converted files, which exists while a run reads them."""
    return checkpoint.with_name(f".universal-{checkpoint.name}")


def _convert(checkpoint: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    allow_deepspeed_globals()
    folder = _folder(checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    tag = (checkpoint / LATEST).read_text(encoding="utf-8").strip()
    options = argparse.Namespace(
        input_folder=str(checkpoint / tag), output_folder=str(folder), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # progress bars
        ds_to_universal.main(options)


def _options(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=launch.world_size() > 1, strict=strict)
