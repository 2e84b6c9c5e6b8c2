"""Loads exported files as the programs do that will read them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from tigon._quiet import quiet_peft
from tigon.errors import UsageError
from tigon.models.loading.weight_files import one_line
from tigon.trained.find import TrainedModel
from tigon.trained.load import load_tokenizer_of, load_weights
from tigon.trained.verify import Reader


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


def of_peft(trained: TrainedModel, folder: Path) -> Reader:
    """The adapters in a folder as PEFT loads them into the base model.

    Raises:
        UsageError: PEFT cannot load them.
    """
    import peft

    base = load_weights(trained)
    try:
        with quiet_peft():
            model = peft.PeftModel.from_pretrained(base, str(folder))
    except Exception as error:  # PEFT raises any type of error for files that it cannot read
        raise UsageError(f"PEFT cannot load what was written: {one_line(error)}") from None
    return Reader(_named("peft"), model, load_tokenizer_of(trained))


def _named(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
