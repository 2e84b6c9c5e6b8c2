"""Finds the files of a trained model, by the name of its run, folder or hub id."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tigon.errors import RunFolderError, UsageError
from tigon.models.loading.config import is_hub_id
from tigon.models.loading.presets import PRESETS
from tigon.models.loading.weight_files import listed, read_json
from tigon.objectives.recipe_checks import loads_saved
from tigon.recipe.keys import OutputConfig
from tigon.techniques.keys.lora import LOFTQ
from tigon.trainer.checkpoint.checkpoint import MANIFEST, problem_of, step_of
from tigon.trainer.checkpoint.distributed_checkpoint import is_distributed

RECIPE, MODEL, ADAPTERS, HEADS, TOKENIZER = "recipe.yaml", "model", "adapters", "heads", "tokenizer"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"

RUNS = Path(OutputConfig().folder)


@dataclass(frozen=True)
class TrainedModel:
    """The locations of a trained model's files."""

    weights: str
    """Folder or hub id of the whole model."""
    tokenizer: str
    """Folder or hub id of the tokenizer."""
    adapter: Path | None = None
    """Folder of adapters in PEFT's layout, which change the weights."""
    heads: Path | None = None
    """Folder of heads that predict several tokens ahead."""
    revision: str | None = None
    """Commit, tag or branch of weights on the hub."""
    checkpoint: Path | None = None
    """A checkpoint of a run whose weights or adapters are in PyTorch's distributed format, to be made whole first."""
    run: Path | None = None
    """The run folder, which names the data, if the model is that of a run."""
    trust_remote_code: bool = False
    """Whether to run code that comes with the weights or the tokenizer. Only the caller says so, never a folder."""

    def folders(self) -> list[Path]:
        """The folders on this machine that are read."""
        named = (self.weights, self.tokenizer, self.adapter, self.heads, self.checkpoint)
        return [Path(name) for name in named if name is not None and Path(name).is_dir()]


def find(name: str, *, trust_remote_code: bool = False) -> TrainedModel:
    """The files of a run folder, a model folder, a folder of adapters, or a hub id.

    Args:
        name: A run folder, a model folder, a folder of adapters, or a hub id.
        trust_remote_code: Whether the caller allows code that comes with the weights. A recipe in a run folder
            cannot allow it, because its author is that of the folder.

    Raises:
        RunFolderError: a run folder that holds no trained model yet.
        UsageError: `name` is none of these, or a preset, whose weights are random.
    """
    return replace(_find(name), trust_remote_code=trust_remote_code)


def _find(name: str) -> TrainedModel:
    path = Path(name)
    if name and path.is_dir():
        return _in_folder(path)
    if name in PRESETS:
        raise UsageError(f"{name} is a preset, whose weights are random; give a run folder or a checkpoint.")
    if path.parent == RUNS:
        held = sorted(entry.name for entry in RUNS.iterdir()) if RUNS.is_dir() else []
        there = f"{RUNS} holds {listed(held, 'folder')}" if held else f"there is no folder {RUNS}"
        raise UsageError(f"{name} is not a folder, and {there}; give the folder of a run, or a checkpoint.")
    if is_hub_id(name):
        return TrainedModel(weights=name, tokenizer=name)
    if path.suffix == ".gguf":
        raise UsageError(
            f"{name} is a GGUF file, which Ollama and llama.cpp run; give the folder that `tigon export` "
            "wrote it into, or the run's folder."
        )
    known = name if name and (RUNS / name).is_dir() else "run"
    raise UsageError(
        f"{name!r} is not a folder or a hub id (owner/model); give a run folder such as {RUNS / known}, or a "
        "checkpoint."
    )


def _in_folder(folder: Path) -> TrainedModel:
    if (folder / RECIPE).is_file() and not (folder / CONFIG).is_file():
        return _in_run(folder)
    found: TrainedModel | None = None
    if os.path.lexists(folder / ADAPTER_CONFIG):  # a pipe or a dangling link is refused when it is read
        found = _with_adapter(folder)
    elif (folder / CONFIG).is_file():
        found = TrainedModel(weights=str(folder), tokenizer=str(folder))
    if found is not None:
        return _of_checkpoint(found, folder) if (folder / MANIFEST).is_file() else found
    raise UsageError(
        f"{folder} holds no {RECIPE}, {CONFIG} or {ADAPTER_CONFIG}; give a run folder, a checkpoint or a folder of "
        "adapters."
    )


def _of_checkpoint(found: TrainedModel, folder: Path) -> TrainedModel:
    """The model of a run's checkpoint, after comparing it with its manifest. The run folder has the tokenizer."""
    if re.fullmatch(r"checkpoint-\d+", folder.name) and (problem := problem_of(folder, step_of(folder))):
        raise RunFolderError(f"{folder} {problem}; use another checkpoint")
    run = folder.resolve().parent.parent
    tokenizer = str(run / TOKENIZER) if (run / TOKENIZER).is_dir() else found.tokenizer
    recipe = loads_saved(run / RECIPE) if (run / RECIPE).is_file() else None
    if recipe is not None and found.adapter is not None and recipe.lora.init == LOFTQ:
        raise UsageError(
            f"{folder}: with lora.init: loftq a checkpoint's adapters belong to the run's 4-bit weights; finish the "
            f"run with `tigon train {run / RECIPE} --resume`, and use {run}."
        )
    divided = folder if is_distributed(folder) else None
    return replace(found, tokenizer=tokenizer, checkpoint=divided, run=run if recipe is not None else None)


def _in_run(run: Path) -> TrainedModel:
    """The result of a run: its adapters, or else its model, and its heads."""
    recipe = loads_saved(run / RECIPE)
    for name, config in ((ADAPTERS, ADAPTER_CONFIG), (HEADS, CONFIG)):
        if (run / name).exists() and not (run / name / config).is_file():  # another part must not take its place unsaid
            raise RunFolderError(f"{run / name} is not complete: it has no {config}; restore it, or remove {name}/")
    heads = run / HEADS if (run / HEADS).exists() else None
    for folder in (run / ADAPTERS, run / MODEL):
        if os.path.lexists(folder / ADAPTER_CONFIG):
            trained = _with_adapter(folder)
            break
        if (folder / CONFIG).is_file():
            trained = TrainedModel(weights=str(folder), tokenizer=str(folder))
            break
    else:
        # Stage 1 of Medusa leaves a checkpoint's model unchanged and saves the heads alone.
        if heads is None:
            raise RunFolderError(
                f"{run} holds no trained model: it has no {MODEL}/. Finish it with `tigon train {run / RECIPE} "
                f"--resume`, or train with output.save_model: true."
            )
        trained = TrainedModel(
            weights=recipe.model.name, tokenizer=str(run / TOKENIZER), revision=recipe.model.revision
        )
    return replace(trained, heads=heads, run=run)


def _with_adapter(folder: Path) -> TrainedModel:
    declared = read_json(folder / ADAPTER_CONFIG)
    base = declared.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(f"{folder / ADAPTER_CONFIG} names no base_model_name_or_path; add the model that it adapts.")
    if not Path(base).is_dir() and not is_hub_id(base):
        raise UsageError(
            f"{folder / ADAPTER_CONFIG}: the base model {base!r} is not a folder or a hub id; correct "
            "base_model_name_or_path."
        )
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer, revision = str(folder) if has_tokenizer else base, declared.get("revision")
    revision = revision if isinstance(revision, str) else None
    return TrainedModel(weights=base, tokenizer=tokenizer, adapter=folder, revision=revision)
