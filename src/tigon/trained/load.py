"""Loads a trained model for generation: weights, adapters, heads and tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tigon import medusa
from tigon.data.tokenizer import load_tokenizer
from tigon.errors import OptionError, PatchError, UsageError
from tigon.models.loading import weight_files
from tigon.models.loading.auto_class import auto_class
from tigon.trained.find import TrainedModel
from tigon.trainer.checkpoint.checkpoint import no_pickles
from tigon.trainer.checkpoint.whole_files import consolidate


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, with its tokenizer."""

    model: Any
    tokenizer: Any
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
        UsageError: the weights, adapters or heads cannot be loaded, or a tensor of the model is missing.
        RecipeError: the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer_of(trained)
    with whole(trained) as trained:
        model = load_weights(trained, dtype=dtype)
        if trained.adapter is not None:
            model = with_adapter(model, trained)
    model = model.to(device).eval()
    if trained.heads is not None:
        _attach_heads(model, trained)
    return Loaded(model, tokenizer, has_heads=trained.heads is not None)


def load_tokenizer_of(trained: TrainedModel) -> Any:
    """The tokenizer. Raises RecipeError if it cannot be loaded."""
    return load_tokenizer(trained.tokenizer, revision=trained.revision, trust_remote_code=trained.trust_remote_code)


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
    with tempfile.TemporaryDirectory(prefix=".whole-", dir=near) as folder:
        try:
            consolidate(trained.checkpoint, Path(folder))
        except (RuntimeError, OSError) as error:
            raise UsageError(f"{trained.checkpoint} cannot be loaded: {weight_files.one_line(error)}") from None
        place = {"weights": folder} if trained.adapter is None else {"adapter": Path(folder)}
        try:
            yield replace(trained, checkpoint=None, **place)
        except UsageError as error:
            raise UsageError(str(error).replace(folder, str(trained.checkpoint))) from None


def load_weights(trained: TrainedModel, *, dtype: torch.dtype | str = "auto") -> Any:
    """The whole model on the CPU, without adapters. transformers would fill missing tensors with random numbers."""
    from safetensors import SafetensorError
    from transformers import AutoConfig

    from tigon.techniques.mechanisms import mxfp4_experts  # loads transformers

    options: dict[str, Any] = {"revision": trained.revision, "trust_remote_code": trained.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(trained.weights, **options)
        if mxfp4_experts.is_stored(config):
            options |= mxfp4_experts.dense_reading()
        model, info = auto_class(config).from_pretrained(
            trained.weights, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{trained.weights} cannot be loaded: {weight_files.one_line(error)}") from None
    report = weight_files.report_of(info)
    if report.problem:
        raise UsageError(f"{trained.weights}: {report.problem}")
    mxfp4_experts.forget_stored_names(model)
    return model


def with_adapter(model: Any, trained: TrainedModel) -> Any:
    """The model inside PEFT's wrapper, with the saved adapters."""
    import peft

    assert trained.adapter is not None
    try:
        return peft.PeftModel.from_pretrained(model, str(trained.adapter))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(
            f"{trained.adapter}: its adapters cannot be loaded into {trained.weights}: {weight_files.one_line(error)}"
        ) from None


def _attach_heads(model: Any, trained: TrainedModel) -> None:
    assert trained.heads is not None
    spec, state = medusa.load_heads(trained.heads)
    try:
        heads = medusa.attach(model, spec, medusa.Objective(stage=2), state)
    except PatchError as error:
        raise UsageError(f"{trained.heads}: {error} Leave them out with --no-heads.") from None
    weight = model.get_output_embeddings().weight
    heads.to(device=weight.device, dtype=weight.dtype).eval()
