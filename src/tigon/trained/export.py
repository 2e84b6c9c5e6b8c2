"""Writes a trained model for other programs: in another dtype, with adapters merged, as GGUF, or to the hub.

A folder is written under a scratch name and renamed at the end, so that a failed export leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tigon.errors import OptionError, UsageError
from tigon.models.loading.config import is_hub_id
from tigon.trained.find import TrainedModel
from tigon.trained.load import load_tokenizer_of, load_weights, refuse_nonfinite, whole
from tigon.trainer.checkpoint.adapter_files import attached, merged
from tigon.trainer.guards.nan_guard import first_overflow
from tigon.trainer.report import model_card

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONVERTER, CONVERTER_FOLDER = "convert_hf_to_gguf.py", "LLAMA_CPP"
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "auto")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""The files of a model that reads images, beside those of its tokenizer."""
SHARD_BYTES = 5 * 10**9  # the hub's advice for one file


@dataclass(frozen=True)
class Export:
    """What to write."""

    target: Path
    dtype: str | None = None
    """A name of `DTYPES`; None keeps the dtype of the files."""
    merge: bool = False
    """Whether adapters are added to the weights. Without it a model with adapters is exported as its adapters."""
    gguf: str | None = None
    """One of `GGUF_TYPES`, to write a GGUF file beside the weights."""

    def check(self, trained: TrainedModel) -> None:
        """Refuse what cannot be written, before anything is loaded.

        Raises:
            OptionError: an unknown dtype or GGUF type; the folder exists; options that need merged weights.
        """
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"--dtype {self.dtype} is not known; choose one of {', '.join(DTYPES)}.")
        if self.gguf is not None and self.gguf not in GGUF_TYPES:
            raise OptionError(f"--gguf {self.gguf} is not known; choose one of {', '.join(GGUF_TYPES)}.")
        if self.target.exists():
            raise OptionError(f"{self.target} exists; name a new folder.")
        if trained.adapter is None and self.merge:
            raise OptionError(f"--merge: {trained.weights} has no adapters to merge; leave --merge out.")
        if trained.adapter is not None and not self.merge and (self.dtype or self.gguf):
            given = "--dtype" if self.dtype else "--gguf"
            raise OptionError(f"{given} changes whole weights, and this run trained adapters; add --merge.")
        if self.gguf is not None:
            find_converter()


def export(trained: TrainedModel, wanted: Export) -> list[Path]:
    """Write a trained model to `wanted.target`.

    Returns:
        The files that were written.

    Raises:
        OptionError: as `Export.check`.
        UsageError: the model cannot be loaded, or the GGUF converter failed.
    """
    wanted.check(trained)
    with _new_folder(wanted.target) as folder, whole(trained, near=folder.parent) as trained:
        if trained.adapter is not None and not wanted.merge:
            shutil.copytree(trained.adapter, folder, dirs_exist_ok=True)
        else:
            _write_weights(trained, wanted, folder)
        if wanted.gguf is not None:
            _write_gguf(folder, f"{wanted.target.name}-{wanted.gguf}.gguf", wanted.gguf)
    return sorted(path for path in wanted.target.rglob("*") if path.is_file())


def _write_weights(trained: TrainedModel, wanted: Export, folder: Path) -> None:
    tokenizer = load_tokenizer_of(trained)
    # A merged weight is rounded once, to the dtype that is written, even if the base model's files are in bf16.
    widens = trained.adapter is not None and wanted.dtype in ("fp32", "fp16")
    model = load_weights(trained, dtype=torch.float32 if widens else "auto")
    if trained.adapter is not None:
        model = merged(attached(model, trained.adapter))
    refuse_nonfinite(model, str(trained.adapter or trained.weights))
    if wanted.dtype is not None:
        if (overflow := first_overflow(model.named_parameters(), DTYPES[wanted.dtype])) is not None:
            raise OptionError(f"--dtype {wanted.dtype}: {overflow}; use --dtype bf16 or fp32.")
        model = model.to(DTYPES[wanted.dtype])
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(folder)
    model_card.copy(trained.adapter or Path(trained.weights), folder, merged=trained.adapter is not None)
    for name in PROCESSOR_FILES:
        if (file := Path(trained.tokenizer) / name).is_file():
            shutil.copy(file, folder / name)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target` if nothing fails, and is deleted otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find_converter() -> Path:
    """llama.cpp's converter, in $LLAMA_CPP or on PATH. Raises OptionError if there is none."""
    if folder := os.environ.get(CONVERTER_FOLDER):
        converter = Path(folder) / CONVERTER
        if converter.is_file():
            return converter
        raise OptionError(f"{CONVERTER_FOLDER}={folder} holds no {CONVERTER}; name a checkout of llama.cpp.")
    if on_path := shutil.which(CONVERTER):
        return Path(on_path)
    raise OptionError(
        f"--gguf needs llama.cpp's {CONVERTER}, which is not on PATH; git clone https://github.com/ggml-org/llama.cpp, "
        f"install its requirements, and set {CONVERTER_FOLDER} to that folder."
    )


def _write_gguf(folder: Path, name: str, kind: str) -> None:
    command = [sys.executable, str(find_converter()), str(folder), "--outfile", str(folder / name), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / name).is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it wrote no file").splitlines()[-1]
        raise UsageError(f"{CONVERTER} failed (exit code {done.returncode}): {last}")


def push(folder: Path, repository: str, *, private: bool, api: Any = None) -> str:
    """Upload a folder to the hub; the repository is created if it does not exist.

    Args:
        folder: the exported folder.
        repository: `owner/name`.
        private: whether a new repository is private.
        api: a `huggingface_hub.HfApi`; None: one with the token of `hf auth login`.

    Returns:
        The address of the commit.

    Raises:
        OptionError: `repository` does not have the form owner/name.
        UsageError: the hub cannot be reached, or refuses.
    """
    check_repository(repository)
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=str(folder), repo_id=repository))
    except Exception as error:  # huggingface_hub and the connection raise many types
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--push {repository}: {type(error).__name__}: {reason}; {folder} is complete, so push it with "
            f"`hf upload {repository} {folder}`."
        ) from None


def check_repository(repository: str) -> None:
    """Raise OptionError if `repository` does not have the form owner/name."""
    if not is_hub_id(repository):
        raise OptionError(f"--push {repository!r} is not owner/name; give a repository such as me/my-model.")
