"""Writes a trained model for other programs: in another dtype, with adapters merged, as GGUF, or to the hub.

A folder is written under a scratch name and renamed at the end, so that a failed export leaves nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tigon.errors import OptionError, TigonError, UsageError, one_line
from tigon.models.loading.classifier import set_pad_id, task_of
from tigon.models.loading.config import is_hub_id
from tigon.objectives.recipe_checks import loads_saved
from tigon.techniques.qat.qat import NONE
from tigon.trained import gguf_export, quantized_export, readers
from tigon.trained.find import TrainedModel
from tigon.trained.load import load_tokenizer_of, load_weights, refuse_nonfinite, whole
from tigon.trained.part_folder import part_folder
from tigon.trained.probes import probes_of
from tigon.trained.verify import Verification
from tigon.trainer.checkpoint.adapter_files import ADAPTER_FILE, attached, check_files, merged
from tigon.trainer.checkpoint.checkpoint import disk_is_full
from tigon.trainer.folder.run_folder import METRICS, RECIPE
from tigon.trainer.guards.nan_guard import first_overflow
from tigon.trainer.report import model_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""The files of a model that reads images, beside those of its tokenizer."""
_UNVERIFIED = "not verified: the files were not read back, so weights, tokens, chat template and stop tokens may differ"
_UNVERIFIED_COPY = "copied: the adapters are the run's files; --verify has PEFT load them and compares the answers"
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
    """One of `gguf_export.TYPES`, to write a GGUF file beside the weights."""
    format: str | None = None
    """One of `quantized_export.FORMATS`, to write the weights in 4 or 8 bits instead."""
    verify: bool | None = None
    """Whether the written files are read back and compared. None: unless adapters are copied as they are."""

    def check(self, trained: TrainedModel) -> None:
        """Refuse what cannot be written, before anything is loaded.

        Raises:
            OptionError: an unknown dtype or GGUF type; the folder exists; options that need merged weights.
        """
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"--dtype {self.dtype} is not known; choose one of {', '.join(DTYPES)}.")
        if self.format is not None:
            quantized_export.check_format(self.format)
        if self.gguf is not None:
            gguf_export.check_type(self.gguf)
        self._check_target(trained)
        if trained.adapter is None and self.merge:
            raise OptionError(f"--merge: {trained.weights} has no adapters to merge; leave --merge out.")
        if trained.adapter is not None and not self.merge and (self.dtype or self.gguf or self.format):
            given = "--dtype" if self.dtype else "--gguf" if self.gguf else "--format"
            raise OptionError(f"{given} changes whole weights, and this run trained adapters; add --merge.")
        if self.gguf is not None:
            gguf_export.check(trained, self.gguf)
        if self.format is not None:
            self._check_format(trained, self.format)

    def _check_format(self, trained: TrainedModel, name: str) -> None:
        if self.gguf is not None:
            raise OptionError(f"--gguf {self.gguf} has its own formats, so --format {name} has no effect; give one.")
        if self.dtype not in (None, "bf16"):
            raise OptionError(f"--dtype {self.dtype}: --format {name} has scales in bf16; leave --dtype out.")
        quantized_export.check(trained, name, verified=self.verify is not False)

    def _check_target(self, trained: TrainedModel) -> None:
        """Refuse a target that cannot be a new folder, or that lies within what is read.

        A new folder in a checkpoint is not in its manifest, and a folder of adapters would be copied into itself.
        """
        target = self.target
        if target.is_symlink() and not target.exists():
            raise OptionError(f"{target} is a link to {os.readlink(target)}, which does not exist; name a new folder.")
        if target.exists():
            raise OptionError(f"{target} exists; name a new folder.")
        parent = target.parent
        while not parent.exists() and not parent.is_symlink():
            parent = parent.parent
        if not parent.is_dir():
            raise OptionError(f"{target}: {parent} is not a folder; name a new folder.")
        above = target.resolve().parents
        sources = [source.resolve() for source in trained.folders()]
        for folder in above:
            if folder in sources or all((folder / name).is_file() for name in (RECIPE, METRICS)):
                raise OptionError(f"{target} lies in {folder}, which is read or is a run; name a folder outside of it.")


@dataclass(frozen=True)
class Written:
    """What an export has written."""

    files: list[Path]
    lines: list[str]
    """How the files were verified, or that they were not."""


def export(trained: TrainedModel, wanted: Export) -> Written:
    """Write a trained model to `wanted.target`.

    Raises:
        OptionError: as `Export.check`.
        UsageError: the model cannot be loaded, the GGUF file cannot be written, or what was written computes otherwise
            than the trained model.
    """
    wanted.check(trained)
    with _new_folder(wanted.target) as folder, whole(trained, near=folder) as trained:
        if trained.adapter is not None and not wanted.merge:
            _copy_adapters(trained.adapter, folder)
            lines = _verify_adapters(trained, folder) if wanted.verify else [_UNVERIFIED_COPY]
        else:
            lines = _write_weights(trained, wanted, folder)
        if wanted.format != (chosen := _qat_of(trained)) and chosen is not None:
            lines.append(
                f"note       the run computed with weights in {chosen} (train.qat), which these files do not hold; "
                f"--format {chosen} writes them"
            )
    return Written(sorted(path for path in wanted.target.rglob("*") if path.is_file()), lines)


def _verify_adapters(trained: TrainedModel, folder: Path) -> list[str]:
    """Have PEFT load the copied adapters. Returns a line for the user."""
    assert trained.adapter is not None
    tokenizer = load_tokenizer_of(trained)
    checked = _verification(trained, tokenizer, None)
    model = attached(load_weights(trained), trained.adapter)
    checked.see_trained(model)
    expected = checked.expect(model, changed=False)
    del model
    return [checked.check(readers.of_peft(trained, folder), expected)]


def _verification(trained: TrainedModel, tokenizer: Any, name: str | None) -> Verification:
    """The comparison with the trained model, whose frozen weights are not rounded as they were in a QLoRA run.

    name: The format of the export.
    """
    lora = loads_saved(trained.run / RECIPE).lora if trained.run is not None and trained.adapter is not None else None
    trained_over = lora.quantize_to.upper() if lora is not None and lora.quantize else None
    rounded_to = name if name is not None and name == _qat_of(trained) else None
    return Verification(tokenizer, probes_of(trained.run, tokenizer), trained_over, rounded_to)


def _qat_of(trained: TrainedModel) -> str | None:
    """The format of the weights that the run's loss saw, if it rounded them."""
    chosen = loads_saved(trained.run / RECIPE).train.qat if trained.run is not None else NONE
    return None if chosen == NONE else chosen


def _copy_adapters(adapters: Path, folder: Path) -> None:
    """Copy a folder of adapters, after checking the files that PEFT reads.

    Raises:
        RunFolderError: As `adapter_files.check_files`.
        UsageError: A tensor is not finite, or a file cannot be copied.
    """
    from safetensors import safe_open

    headers = check_files(adapters)
    with safe_open(adapters / ADAPTER_FILE, framework="pt") as file:
        for name in headers:
            if not bool(torch.isfinite(file.get_tensor(name).float()).all()):
                raise UsageError(f"{adapters}: {name} holds values that are not finite; use an earlier checkpoint")
    for path in adapters.rglob("*"):
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is no regular file; remove it")
    shutil.copytree(adapters, folder, dirs_exist_ok=True)


def _write_weights(trained: TrainedModel, wanted: Export, folder: Path) -> list[str]:
    """Write whole weights. Returns the lines about their verification."""
    tokenizer = load_tokenizer_of(trained)
    checked = _verification(trained, tokenizer, wanted.format) if wanted.verify is not False else None
    dtype = "bf16" if wanted.format is not None else wanted.dtype
    # A merged weight is rounded once, to the dtype or type that is written, even if the base model's files are in bf16.
    # In fp32 a reader also has numbers in fp32 that no file holds, such as the factor of Gemma's embeddings.
    widens = dtype == "fp32" or (trained.adapter is not None and dtype == "fp16")
    model = load_weights(trained, dtype=torch.float32 if widens else "auto")
    saved_dtype = DTYPES[dtype] if dtype is not None else model.dtype
    in_fp32 = trained.adapter is not None and gguf_export.rounds(model.config, tokenizer, wanted.gguf)
    if in_fp32:
        _cast(model, torch.float32)
    if trained.adapter is not None:
        model = attached(model, trained.adapter)
    if task_of(model.config) is not None:
        pad_id = tokenizer.pad_token_id
        set_pad_id(model.config, tokenizer.eos_token_id if pad_id is None else pad_id)
    if checked is not None:
        checked.see_trained(model)
    if trained.adapter is not None:
        model = merged(model)
    refuse_nonfinite(model, str(trained.adapter or trained.weights))
    if dtype is not None and (overflow := first_overflow(model.named_parameters(), DTYPES[dtype])) is not None:
        raise OptionError(f"--dtype {dtype}: {overflow}; use --dtype bf16 or fp32.")
    # The fp32 weights stay in memory for the GGUF file, beside the cast ones: 4 bytes more per weight.
    merged_fp32 = [tensor.data for tensor in _tensors(model)] if in_fp32 else []
    if dtype is not None or in_fp32:
        _cast(model, saved_dtype)
    changed = trained.adapter is not None or dtype is not None
    expected = checked.expect(model, changed=changed) if checked is not None else None
    if wanted.format is not None:
        rounded = quantized_export.round_weights(model, wanted.format)
        _save(model, tokenizer, trained, folder, rounded.state, _stored_as(wanted))
        return quantized_export.finish(rounded, folder, wanted.target, checked)
    _save(model, tokenizer, trained, folder, stored=_stored_as(wanted))
    lines = [_UNVERIFIED]
    if checked is not None and expected is not None:
        if wanted.gguf is None:
            model.to("meta")  # the weights of the reader take their place in memory
        lines = [checked.check(readers.of_transformers(type(model), folder), expected)]
    if wanted.gguf is not None:
        for tensor, in_memory in zip(_tensors(model), merged_fp32, strict=True) if in_fp32 else ():
            tensor.data = in_memory
        lines += gguf_export.write(model, tokenizer, gguf_export.Target(folder, wanted.target, wanted.gguf), checked)
    return lines


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Cast the weights. `Module.to` would also round the rotary embedding's frequencies, which are in no file."""
    for tensor in _tensors(model):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _tensors(model: Any) -> list[torch.Tensor]:
    """The tensors that a file holds."""
    return [*model.parameters(), *(t for name, t in model.named_buffers() if name in model.state_dict())]


def _stored_as(wanted: Export) -> str:
    """What the model card says of a format that the run itself does not write; empty for Hugging Face's own."""
    if wanted.format is not None:
        return f"The linear layers are in {wanted.format}. Answers can differ from those of the trained model."
    if wanted.gguf is not None:
        file = gguf_export.Target(wanted.target, wanted.target, wanted.gguf).file.name
        return (
            f"`{file}` is the model for llama.cpp and Ollama, in {wanted.gguf}. The other files are for transformers."
        )
    return ""


def _save(
    model: Any,
    tokenizer: Any,
    trained: TrainedModel,
    folder: Path,
    state: dict[str, torch.Tensor] | None = None,
    stored: str = "",
) -> None:
    """Save weights, config, tokenizer, model card and the files of a processor.

    state: The tensors to save; None: those of the model. stored: The format, for the model card.
    """
    try:
        model.save_pretrained(folder, max_shard_size=SHARD_BYTES, state_dict=state)
    # A generation config that it refuses, or weights in a format that it only reads.
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        raise UsageError(f"{trained.weights}: transformers cannot save it: {one_line(error)}") from None
    tokenizer.save_pretrained(folder)
    model_card.copy(trained.adapter or Path(trained.weights), folder, merged=trained.adapter is not None, stored=stored)
    for name in PROCESSOR_FILES:
        if (file := Path(trained.tokenizer) / name).is_file():
            shutil.copy(file, folder / name)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` if nothing fails, and is deleted otherwise.

    Raises:
        UsageError: Another process has written `target`, or the disk is full or cannot be written.
    """
    made = _make_parents(target)
    try:
        with part_folder(target.parent, target.name) as scratch:
            folder = scratch / target.name
            folder.mkdir()  # with the permissions of a new folder, which a temporary one does not have
            yield folder
            _rename(folder, target)
    except TigonError:
        raise
    except Exception as error:
        if disk_is_full(error, target.parent):
            raise UsageError(f"{target}: the disk is full; free some space, and export again") from None
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"{target}: cannot be written: {error.strerror or one_line(error)}") from None
    finally:
        for parent in made:
            with suppress(OSError):  # it holds the export, or something of others
                parent.rmdir()


def _make_parents(target: Path) -> list[Path]:
    """Make the folders above `target`.

    Returns:
        The folders that were made, the deepest first.

    Raises:
        UsageError: They cannot be made.
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target.parent}: cannot be made: {error.strerror}; name another folder") from None
    return missing


def _rename(scratch: Path, target: Path) -> None:
    """Rename the complete folder. Raises UsageError if another export has been faster."""
    try:
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise
        raise UsageError(f"{target}: another process has written this folder meanwhile; name another one") from None


def push(folder: Path, repository: str, *, private: bool, api: HfApi | None = None) -> str:
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
