"""Checks whether the weight files of a checkpoint are complete and belong to the model, from their headers alone.

transformers initialises a tensor that the files lack with random numbers and only logs it. This check runs its loader
on the meta device with the names, shapes and dtypes of the files. The loader's renaming and merging of tensors are
therefore included, and no weight is read.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tigon._files import open_regular, read_text, refuse_special
from tigon.errors import UsageError, one_line
from tigon.models.loading.auto_class import auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
AGAIN = "copy or download it again"
NAMED = 4  # tensors that a message names; it counts the others

_KINDS = {"F": "float", "I": "int", "U": "uint"}
DTYPES = {
    **{f"{kind}{bits}": getattr(torch, f"{name}{bits}") for kind, name in _KINDS.items() for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


class Header(NamedTuple):
    """The header of a tensor in a file. dtype: safetensors' name, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LoadReport:
    """The differences between the tensors of a checkpoint and of a model. The files hold tied tensors once."""

    missing: tuple[str, ...] = ()
    """Tensors of the model that the files lack."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the files that the model does not have."""
    mismatched: tuple[str, ...] = ()
    """Descriptions of tensors whose shape or dtype kind differs from the model's."""

    @property
    def problem(self) -> str | None:
        """Why the model must not be trained from these files, or None."""
        if self.mismatched:
            return f"{listed(self.mismatched, 'tensor')}; its weights and its config.json belong to different models"
        if not self.missing:
            return None
        reason = f"the model needs {listed(self.missing, 'tensor')}, and the weight files lack these names"
        if self.unexpected:
            reason += f"; the model does not have {listed(self.unexpected, 'tensor')} of the files"
        return f"{reason}; training would start with random numbers in their place: restore or rename the tensors"


def listed(names: Sequence[str], noun: str) -> str:
    """`2 tensors: a, b`, with the first few names."""
    rest = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{len(names):,} {noun}{'s' if len(names) != 1 else ''}: {', '.join(names[:NAMED])}{rest}"


def files_in(folder: Path, named: str | None = None) -> tuple[Path, ...]:
    """The safetensors files that transformers reads from a folder: `model.safetensors`, else those of the index.

    Args:
        folder: the folder of a checkpoint.
        named: the file or index that the config names instead (`transformers_weights`).

    Raises:
        UsageError: the files are missing; or the index is damaged, or names a file that the folder does not hold.
    """
    single, index = folder / (named or SINGLE), folder / (named or INDEX)
    if single.is_file() and not single.name.endswith(".json"):
        return (single,)
    if not index.is_file() or not index.name.endswith(".json"):
        lacks = f"no {named}" if named else f"neither {SINGLE} nor {INDEX}"
        raise UsageError(f"{folder} has {lacks}; save the model there as safetensors, with save_pretrained")
    names = shards(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{folder} lacks {listed(missing, 'file')}, which {index.name} names; download again")
    return tuple(folder / name for name in names)


def shards(index: Path) -> tuple[str, ...]:
    """The files that an index names, in the order in which transformers reads them.

    Raises UsageError if the file is not an index, or names a file outside its folder.
    """
    declared = read_json(index)
    weight_map = declared.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(declared.get("metadata"), dict):
        raise UsageError(f"{index} is not an index of weight files: weight_map or metadata is missing; {AGAIN}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "\0" in name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UsageError(f"{index} places {tensor} in {name!r}, which is not a file in this folder; correct it")
        if not name.endswith(".safetensors"):
            raise UsageError(f"{index} places {tensor} in {name!r}, which is not a .safetensors file; correct it")
    return tuple(sorted(set(weight_map.values())))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UsageError, in one line, if the file cannot be read or is not an object."""
    try:
        declared = json.loads(read_text(file))
    except (ValueError, OSError, RecursionError) as error:
        raise UsageError(f"{file} is not a JSON file that can be read: {one_line(error)}") from None
    if not isinstance(declared, dict):
        raise UsageError(f"{file} holds a {type(declared).__name__}, not an object in braces; {AGAIN}")
    return declared


def read_headers(files: Sequence[Path]) -> dict[str, Header]:
    """Every tensor of the files by name. Raises UsageError for an incomplete file, or a name in two files."""
    from safetensors import safe_open

    headers: dict[str, Header] = {}
    owners: dict[str, Path] = {}
    for file in files:
        try:
            refuse_special(file)  # opening a FIFO would wait forever
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (the handle is not a mapping)
                    if name in headers:
                        raise UsageError(f"{name} is in {owners[name]} and in {file.name}; remove one of them")
                    slice_ = handle.get_slice(name)
                    headers[name], owners[name] = Header(slice_.get_dtype(), tuple(slice_.get_shape())), file
        except UsageError:
            raise
        except Exception as error:  # safetensors' own error class, OSError and those of memory maps
            raise UsageError(_unreadable(file, error)) from None
    return headers


def _unreadable(file: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), open_regular(file) as handle:
        if handle.read(len(LFS_POINTER)) == LFS_POINTER:
            return f"{file} is a Git LFS pointer instead of the weights; run `git lfs pull` in its folder"
    return f"{file} is not a complete safetensors file ({one_line(error)}); {AGAIN}"


def compare(
    config: PreTrainedConfig,
    headers: Mapping[str, Header],
    *,
    attention: str | None = None,
    trust_remote_code: bool = False,
    cls: type[PreTrainedModel] | None = None,
) -> LoadReport:
    """Compare the tensors of these headers with a model, as transformers does when it loads them.

    Args:
        config: the model's config.
        cls: the model's class; by default the causal language model of the config.
        headers: the headers of its files, from `read_headers`.
        attention: the `attn_implementation` with which the model will be loaded.
        trust_remote_code: whether the checkpoint's own code may run.

    Raises:
        UsageError: transformers cannot build the model, or cannot convert the tensors.
    """
    tensors = {
        name: torch.empty(header.shape, dtype=DTYPES.get(header.dtype, torch.float32), device="meta")
        for name, header in headers.items()
    }
    with _unheard():
        try:
            if cls is None:
                with torch.device("meta"):
                    drawn = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
                cls, config = type(drawn), drawn.config  # the text part's, if the class reads text alone
            built, info = cls.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                attn_implementation=attention,
            )
        except Exception as error:  # a config can be wrong in as many ways as there are models
            kind = config.model_type if cls is None else cls.__name__
            raise UsageError(f"transformers cannot load these files as {kind}: {one_line(error)}") from None
    report = report_of(info)
    kinds = {name: tensor.is_floating_point() for name, tensor in built.state_dict().items()}
    prefix = f"{built.base_model_prefix}."
    wrong = [
        f"{name} is {header.dtype}, which is not a floating-point type"
        for name, header in headers.items()
        # an expert's weight is part of a larger tensor in the model, which has another name
        if kinds.get(name, kinds.get(prefix + name, name.endswith(".weight") and name not in report.unexpected))
        and not tensors[name].is_floating_point()
    ]
    return LoadReport(report.missing, report.unexpected, (*report.mismatched, *wrong))


def report_of(info: Mapping[str, Any]) -> LoadReport:
    """The report from the loading info of `from_pretrained(..., output_loading_info=True)`."""
    mismatched = [
        f"{name} is {_shape(there)}, and the model's {_shape(own)}" for name, there, own in info["mismatched_keys"]
    ]
    return LoadReport(
        tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])), tuple(sorted(mismatched))
    )


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Silence transformers and disable DeepSpeed's config while a temporary model is loaded.

    transformers would report on the temporary model and show a progress bar, and DeepSpeed would partition it.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from transformers.utils import logging

    unset_hf_deepspeed_config()
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
