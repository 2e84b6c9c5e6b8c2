"""Loads a trained model for generation: weights, adapters, heads and tokenizer."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tigon import medusa
from tigon.data.tokenizer import load_tokenizer
from tigon.errors import OptionError, PatchError, RecipeError, RunFolderError, UsageError, one_line
from tigon.models.loading.classifier import beside_adapters, task_of
from tigon.recipe.keys import ModelConfig
from tigon.trained.find import TrainedModel
from tigon.trained.part_folder import part_folder
from tigon.trainer import model as models
from tigon.trainer.checkpoint.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    attached,
    has_sequence_head,
    name_in_file,
)
from tigon.trainer.checkpoint.checkpoint import no_pickles
from tigon.trainer.checkpoint.distributed_checkpoint import whole_weights
from tigon.trainer.guards.nan_guard import first_nonfinite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHOLE = "tigon-whole"  # of temporary folders


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    has_heads: bool = False


def device_of(name: str) -> torch.device:
    """The device named `cpu` or `cuda`; `auto` is the GPU if there is one.

    Raises:
        OptionError: another name, or no GPU for `cuda`.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise OptionError(f"--device {name} is not known; choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: PyTorch finds no GPU on this machine; use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load(trained: TrainedModel, *, device: torch.device, dtype: torch.dtype | str = "auto") -> Loaded:
    """Load a trained model.

    Args:
        trained: where its files are.
        device: the device of the model.
        dtype: the dtype of the weights; "auto" keeps the dtype of the files.

    Raises:
        UsageError: the tokenizer, the weights or the heads cannot be loaded, or a tensor of the model is missing or
            not finite.
        RunFolderError: the adapters cannot be loaded, or a tensor of them is missing.
    """
    tokenizer = load_tokenizer_of(trained)
    with whole(trained) as trained:
        model = load_weights(trained, dtype=dtype)
        if trained.adapter is not None:
            model = attached(model, trained.adapter)
        refuse_nonfinite(model, str(trained.adapter or trained.weights))
    model = model.to(device).eval()
    if trained.heads is not None:
        _attach_heads(model, trained)
    return Loaded(model, tokenizer, has_heads=trained.heads is not None)


def load_tokenizer_of(trained: TrainedModel) -> Any:
    """The tokenizer. Raises UsageError if it cannot be loaded."""
    try:
        return load_tokenizer(trained.tokenizer, revision=trained.revision, trust_remote_code=trained.trust_remote_code)
    except RecipeError as error:
        message = str(error).replace("set data.tokenizer to a folder with", "give a folder with")
        raise UsageError(_with_way_to_trust(message, trained)) from None


@contextmanager
def whole(trained: TrainedModel, *, near: Path | None = None) -> Iterator[TrainedModel]:
    """`trained` with whole weights or adapters, which are files in a temporary folder if a checkpoint divides them.

    Args:
        trained: Where its files are.
        near: The folder in which the temporary folder is made; None: that of the system.

    Raises:
        UsageError: The checkpoint cannot be read.
    """
    if trained.checkpoint is None:
        yield trained
        return
    no_pickles()
    with part_folder(near or Path(tempfile.gettempdir()), WHOLE) as made:
        folder = str(made)
        try:
            _write_whole(trained.checkpoint, made)
        except RunFolderError:
            raise
        except Exception as error:  # PyTorch raises any type of error for a damaged file
            raise UsageError(f"{trained.checkpoint} cannot be loaded: {one_line(error)}") from None
        place = {"weights": folder} if trained.adapter is None else {"adapter": Path(folder)}
        try:
            yield replace(trained, checkpoint=None, **place)
        except (UsageError, RunFolderError) as error:
            raise type(error)(str(error).replace(folder, str(trained.checkpoint))) from None


def _write_whole(checkpoint: Path, folder: Path) -> None:
    """Write the weights of a distributed checkpoint to a folder, in the layout of transformers or PEFT.

    Raises:
        RunFolderError: The file that lists the tensors is not one of PyTorch's.
        RuntimeError: A file is missing or damaged.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import save_file

    state = whole_weights(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*config.json"):
        shutil.copy(file, folder)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        adapters = {name_in_file(name): tensor for name, tensor in state.items()}
        save_file(adapters, folder / ADAPTER_FILE, metadata={"format": "pt"})
    else:
        save_torch_state_dict(state, folder)


def load_weights(trained: TrainedModel, *, dtype: torch.dtype | str = "auto") -> Any:
    """The whole model on the CPU, without adapters, read as a run reads its checkpoint.

    Raises:
        UsageError: A file is missing or damaged, the config allows no model, or a tensor is missing, has another
            shape, holds integers, or is not finite.
    """
    named = _named(trained)
    try:
        config = _config(trained)
        unused = models.check_weights(named, config)
        built = models.read(named, config, dtype=dtype)
    except RecipeError as error:
        message = str(error).removeprefix("model.name: ")
        message = message if trained.weights in message else f"{trained.weights}: {message}"
        raise UsageError(_with_way_to_trust(message, trained)) from None
    except Exception as error:  # transformers raises any type of error for a config that allows no model
        raise UsageError(f"{trained.weights} cannot be loaded: {one_line(error)}") from None
    if unused:
        print(models.unused_line(unused), file=sys.stderr, flush=True)
    return built


def load_config_of(trained: TrainedModel) -> Any:
    """The config of the whole model. Raises UsageError if it cannot be loaded."""
    try:
        return _config(trained)
    except RecipeError as error:
        raise UsageError(_with_way_to_trust(str(error).removeprefix("model.name: "), trained)) from None


def _config(trained: TrainedModel) -> Any:
    config = models.load_config(_named(trained))
    return config if trained.adapter is None else beside_adapters(config, trained.adapter)


def writes_no_text(trained: TrainedModel) -> bool:
    """Whether the model has labels or a score in place of the next token, so that it writes no text."""
    has_head = task_of(load_config_of(trained)) is not None
    return has_head or (trained.adapter is not None and has_sequence_head(trained.adapter))


def _named(trained: TrainedModel) -> ModelConfig:
    """The model as a recipe names it. The attention only has to exist for the family; the checks read no weight."""
    return ModelConfig(
        name=trained.weights, revision=trained.revision, trust_remote_code=trained.trust_remote_code, attention="eager"
    )


def refuse_nonfinite(model: PreTrainedModel, where: str) -> None:
    """Raise UsageError if a weight of the model is NaN or infinite. where: The folder, for the message."""
    index = first_nonfinite(model)
    if index is not None:
        name = [name for name, _ in model.named_parameters()][index]
        raise UsageError(
            f"{where}: {name} holds values that are not finite (NaN or infinite); use an earlier checkpoint"
        )


def _with_way_to_trust(message: str, trained: TrainedModel) -> str:
    if trained.trust_remote_code or "custom code" not in message:  # transformers' words
        return message
    return (
        f"{trained.weights}: it comes with Python code, which tigon runs only with --trust-remote-code; give "
        "that option if you trust the authors"
    )


def _attach_heads(model: PreTrainedModel, trained: TrainedModel) -> None:
    assert trained.heads is not None
    spec, state = medusa.load_heads(trained.heads)
    try:
        heads = medusa.attach(model, spec, medusa.Objective(stage=2), state)
    except PatchError as error:
        raise UsageError(f"{trained.heads}: {error} Leave them out with --no-heads.") from None
    weight = model.get_output_embeddings().weight
    heads.to(device=weight.device, dtype=weight.dtype).eval()
