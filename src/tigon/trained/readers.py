"""Loads exported files as the programs do that will read them."""

from __future__ import annotations

import importlib.metadata
import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tigon._quiet import quiet_peft
from tigon.errors import UsageError, one_line
from tigon.models.loading.reward_model import with_score
from tigon.trained.find import TrainedModel
from tigon.trained.load import load_tokenizer_of, load_weights
from tigon.trained.part_folder import part_folder
from tigon.trained.verify import Reader
from tigon.trainer.checkpoint.adapter_files import has_sequence_head


def of_transformers(model_class: Any, folder: Path) -> Reader:
    """The folder as transformers loads it.

    Raises:
        UsageError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        model = model_class.from_pretrained(str(folder), dtype="auto", use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # transformers raises any type of error for files that it cannot read
        raise UsageError(f"transformers cannot load what was written: {one_line(error)}") from None
    return Reader(_named("transformers"), model, tokenizer)


def of_compressed(model_class: Any, folder: Path) -> Reader:
    """A folder in compressed-tensors' format as transformers loads it, with its weights decompressed.

    Raises:
        UsageError: transformers cannot load it.
    """
    from compressed_tensors.compressors import ModelCompressor

    with redirect_stderr(io.StringIO()):  # its progress bars have no switch
        reader = of_transformers(model_class, folder)
        ModelCompressor.from_compression_config(reader.model.config.quantization_config).decompress_model(reader.model)
    return replace(reader, name=f"{reader.name} with {_named('compressed-tensors')}")


def of_peft(trained: TrainedModel, folder: Path) -> Reader:
    """The adapters in a folder as PEFT loads them into the base model, and the folder's tokenizer if it has one.

    Raises:
        UsageError: PEFT cannot load them, or the tokenizer cannot be loaded.
    """
    import peft

    base = load_weights(trained)
    if has_sequence_head(folder):
        base = with_score(base)
    try:
        with quiet_peft():
            model = peft.PeftModel.from_pretrained(base, str(folder))
    except Exception as error:  # PEFT raises any type of error for files that it cannot read
        raise UsageError(f"PEFT cannot load what was written: {one_line(error)}") from None
    copied = replace(trained, tokenizer=str(folder), revision=None)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return Reader(_named("peft"), model, load_tokenizer_of(copied) if has_tokenizer else None)


def of_gguf(file: Path, model: Any, ends: tuple[int, ...], *, splits_text: bool) -> Reader:
    """A GGUF file as transformers loads it, from a folder that holds nothing else.

    Args:
        file: The file.
        model: The model that was written, for its class and for what transformers does not read of the config.
        ends: The ids at which a program that reads the file ends an answer.
        splits_text: Whether transformers splits text by the rules that the file names.

    Raises:
        UsageError: transformers cannot load it.
    """
    from transformers import AutoConfig, AutoTokenizer

    unread, trained = [], model.config
    with part_folder(file.parent, "gguf") as alone:
        (alone / file.name).symlink_to(file.resolve())
        named = {"pretrained_model_name_or_path": str(alone), "gguf_file": file.name}
        try:
            with redirect_stderr(io.StringIO()):  # its progress bar has no switch
                config = AutoConfig.from_pretrained(**named)
                if trained.rope_parameters.get("rope_type", "default") != "default":
                    config.rope_parameters = trained.rope_parameters
                    unread.append("transformers does not read the rotary scaling, which was set from the config")
                read = type(model).from_pretrained(**named, config=config, dtype=torch.float32)
                tokenizer = AutoTokenizer.from_pretrained(**named)
        except Exception as error:  # transformers raises any type of error for files that it cannot read
            raise UsageError(f"transformers cannot load {file.name}: {one_line(error)}") from None
    if not splits_text:
        unread.append("transformers does not know how this tokenizer splits text, so tokens were not compared")
    return Reader(f"{_named('transformers')} from {file.name}", read, tokenizer, ends, unread, splits_text)


def _named(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
