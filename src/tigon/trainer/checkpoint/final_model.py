"""Writes the trained model: adapters in PEFT's layout, or whole weights in the dtypes of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tigon.models.kv_cache import cache_as_in
from tigon.recipe.keys import ModelConfig, OutputConfig
from tigon.techniques.keys.settings import Settings
from tigon.trainer import model as models
from tigon.trainer.checkpoint import adapter_files
from tigon.trainer.guards.nan_guard import first_overflow

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from tigon.trainer.guarded import GuardedTrainer

MODEL = "model"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def folders_in(run: Path) -> list[Path]:
    """The folders in the run folder `run` that hold a trained model."""
    return [folder for name in (adapter_files.ADAPTERS, MODEL) if (folder := run / name).is_dir()]


def save_as_trained(built: PreTrainedModel, trainer: GuardedTrainer, settings: Settings, folder: Path) -> None:
    """Save a model without adapters in `folder`, with the dtypes of training. Every process calls it."""
    if settings.sharding.divides_weights:  # gathered by all processes, written by the first
        trainer.save_model(str(folder))
        (folder / "training_args.bin").unlink(missing_ok=True)
    elif trainer.is_world_process_zero():
        built.save_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class FinalModel:
    """Saves the trained model of a run."""

    run: Path
    """The run folder."""
    model: ModelConfig
    """The `model` section of the model that was loaded."""
    config: PreTrainedConfig
    """Its transformers config."""
    settings: Settings
    output: OutputConfig

    def save(self, built: PreTrainedModel, trainer: GuardedTrainer, *, merges: bool = False) -> None:
        """Save the trained weights. Every process calls it. It changes the dtype of the weights of `built`.

        Args:
            built: The trained model.
            trainer: Its trainer.
            merges: Whether to merge adapters even if `output.merge` is not set.
        """
        if not self.settings.lora.used:
            self._save_whole(built, trainer)
            return
        adapters = self.run / adapter_files.ADAPTERS
        adapter_files.save(built, trainer, self.settings, adapters)
        if (merges or self.output.merge) and trainer.is_world_process_zero():
            base = self._base_checkpoint()
            merged = adapter_files.merged_with_base(adapters, base, dtype=self._dtypes({}).widest())
            self._dtypes(dict(merged.named_parameters())).cast(merged)
            self._write(merged)

    def save_state(self, built: PreTrainedModel, state: dict[str, torch.Tensor]) -> None:
        """Save `state`, gathered from all processes, as `model/`. Only the main process calls it."""
        state = self._dtypes(state).cast_state(state)
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        self._write(built, state)  # it empties `state`
        _declare_dtype(self.run / MODEL / "config.json", dtype)

    def _save_whole(self, built: PreTrainedModel, trainer: GuardedTrainer) -> None:
        if self.settings.sharding.divides_weights:
            state = trainer.gathered_state()
            if state is not None and trainer.is_world_process_zero():
                self.save_state(built, state)
        elif trainer.is_world_process_zero():
            self._dtypes(dict(built.named_parameters())).cast(built)
            self._write(built)

    def _write(self, built: PreTrainedModel, state: dict[str, torch.Tensor] | None = None) -> None:
        size = self.output.max_shard_size
        with cache_as_in(built, self.config):
            built.save_pretrained(self.run / MODEL, state_dict=state, **({"max_shard_size": size} if size else {}))

    def _dtypes(self, weights: Mapping[str, torch.Tensor]) -> SavedDtypes:
        """The dtypes for these weights. A run is not lost because a weight is too large for `output.dtype`."""
        if self.output.dtype != "auto":
            wanted = _DTYPES[self.output.dtype]
            overflow = first_overflow(weights.items(), wanted)
            if overflow is None:
                return SavedDtypes(wanted, {})
            print(
                f"warning  output.dtype: {self.output.dtype}: {overflow}; all weights are saved as with output.dtype: "
                "auto instead",
                flush=True,
            )
        return SavedDtypes(None, models.stored_dtypes(self._base_checkpoint(), self.config))

    def _base_checkpoint(self) -> ModelConfig:
        """The `model` section of the base checkpoint: the run's `base/` for adapters on a preset, else the recipe's."""
        if not self.settings.lora.used or not models.is_preset(self.model.name):
            return self.model
        return ModelConfig(name=str(self.run / "base"), attention=self.model.attention)


@dataclass(frozen=True)
class SavedDtypes:
    """The dtype of each saved weight."""

    wanted: torch.dtype | None
    """The dtype of every weight; None: its dtype in the checkpoint."""
    stored: Mapping[str, torch.dtype]
    """Name -> dtype of the checkpoint's floating-point tensors. Empty for random weights, which keep their dtype."""

    def of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of the weight `name`. A weight under another name than in the files gets their usual dtype."""
        if not tensor.is_floating_point():
            return tensor.dtype
        if self.wanted is not None:
            return self.wanted
        return self.stored.get(name) or self._usual() or tensor.dtype

    def _usual(self) -> torch.dtype | None:
        dtypes = list(self.stored.values())
        return max(set(dtypes), key=dtypes.count) if dtypes else None

    def widest(self) -> torch.dtype:
        """The dtype in which all weights can be summed: the widest one, and not fp16, whose largest value is 65,504."""
        dtypes = {self.wanted} if self.wanted is not None else set(self.stored.values())
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        return torch.float32 if widest == torch.float16 else widest

    def cast(self, built: PreTrainedModel) -> None:
        """Give the weights their dtypes in place, one by one, so that no second copy of the model is needed."""
        for name, parameter in built.named_parameters():
            parameter.data = parameter.data.to(self.of(name, parameter))

    def cast_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.of(name, tensor)) for name, tensor in state.items()}


def _declare_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the saved weights into config.json. transformers writes that of the sharded model."""
    declared = json.loads(config.read_text(encoding="utf-8"))
    declared["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(declared, indent=2, sort_keys=True) + "\n", encoding="utf-8")
