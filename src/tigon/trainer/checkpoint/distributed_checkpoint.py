"""Weights and optimizer states in PyTorch's distributed checkpoint format (DCP): each process writes its own part.

`checkpoint-N/distributed/` holds one file per process and `.metadata`, which lists the tensors by name. Names do not
depend on the engine, so any number of processes of DDP or FSDP2 can read it, and so can one process without a group.
FSDP2 also reads the Trainer's files of DDP or of one process: PyTorch broadcasts each tensor, and every process keeps
its part.

`.metadata` is a pickle. `_Reader` refuses one that names anything but DCP's own records, and PyTorch reads the rest
with `weights_only=True` (see `checkpoint.no_pickles`).
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from tigon.errors import RunFolderError
from tigon.trainer.checkpoint.adapter_files import ADAPTER_FILE, name_in_file
from tigon.trainer.distributed import launch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

FOLDER, METADATA = "distributed", ".metadata"
OPTIMIZER_FILE, FSDP_FILE = "optimizer.pt", "pytorch_model_fsdp.bin"  # of the Trainer and of Accelerate
MODEL, OPTIMIZER = "model", "optimizer"
Select = Callable[[Any, dict[str, Any]], dict[str, Any] | None]
"""(model, its state by name) -> the part of the state that a checkpoint holds; None: all of it."""
_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_HARMLESS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


def is_distributed(checkpoint: Path) -> bool:
    """Whether a checkpoint folder holds weights in DCP's format."""
    return (checkpoint / FOLDER / METADATA).is_file()


def states(model: PreTrainedModel, optimizer: Optimizer, select: Select) -> dict[str, Any]:
    """The weights and optimizer states of this process by name, without copying them. Every process calls it."""
    return {MODEL: _model_state(model, select), OPTIMIZER: get_optimizer_state_dict(model, optimizer)}


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` into a folder of a checkpoint. Every process calls it.

    Args:
        folder: `FOLDER` in the checkpoint.
        state: The result of `states`.

    Raises:
        RuntimeError: A process could not write; its error is the cause.
    """
    _silence()
    try:
        save_state(state, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise _first_failure(error) from None


def save_configs(model: PreTrainedModel, folder: Path) -> None:
    """Write the configs that name the model of the weights: those of transformers, or of PEFT's adapters."""
    configs = list(getattr(model, "peft_config", {}).values()) or [model.config, model.generation_config]
    for config in configs:
        if config is not None:
            config.save_pretrained(folder)


class BackgroundSave:
    """A save (`train.save_async`) whose files are written by a thread of every process while training continues."""

    def __init__(
        self, step: int, folder: Path, state: dict[str, Any], group: ProcessGroup | None, publish: Callable[[], None]
    ) -> None:
        """Copy `state` to host memory and start to write it. Every process calls it.

        Args:
            step: The optimizer step of the checkpoint.
            folder: `FOLDER` in the checkpoint.
            state: The result of `states`.
            group: The result of `writing_group`.
            publish: Called in the thread, after every process has written its part.
        """
        self.step = step
        _silence()
        writer = FileSystemWriter(folder)
        written = cast("Future[Any]", async_save(state, storage_writer=writer, process_group=group))
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._published = pool.submit(_complete, written, publish)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until this process has written its part; in the main process until the checkpoint is in place.

        Raises:
            RuntimeError: A process could not write; its error is the cause.
            OSError: The checkpoint could not be completed.
        """
        self._published.result()


def _complete(written: Future[Any], publish: Callable[[], None]) -> None:
    try:
        written.result()
    except CheckpointException as error:
        raise _first_failure(error) from None
    publish()


def writing_group() -> ProcessGroup | None:
    """The process group of saves in the background; None for one process without a group. Every process calls it.

    It is separate from that of training, because two threads cannot use one group at a time.
    """
    return distributed.new_group(backend="gloo") if distributed.is_initialized() else None


def can_load(checkpoint: Path, *, sharded: bool) -> bool:
    """Whether `load_model` and `load_optimizer` read a checkpoint, and not the Trainer. sharded: By FSDP2."""
    whole = (checkpoint / OPTIMIZER_FILE).is_file() and not (checkpoint / FSDP_FILE).exists()
    return is_distributed(checkpoint) or (sharded and whole)


def load_model(model: PreTrainedModel, checkpoint: Path, select: Select) -> None:
    """Read a checkpoint's weights into `model`, sharded or not. Every process calls it.

    Raises:
        RunFolderError: The file that lists the tensors is not one of PyTorch's.
        RuntimeError: A tensor is missing or has another shape.
    """
    if is_distributed(checkpoint):
        state = _model_state(model, select)
        _load({MODEL: state}, checkpoint)
        set_model_state_dict(model, state, options=_options(model, strict=False))
    else:
        state = dict(_file_weights(model, checkpoint)) if launch.rank() == 0 else {}
        set_model_state_dict(model, state, options=_broadcast(strict=False))


def load_optimizer(model: PreTrainedModel, optimizer: Optimizer, checkpoint: Path) -> None:
    """Read a checkpoint's optimizer states. Every process calls it. Raises as `load_model`."""
    if is_distributed(checkpoint):
        state = get_optimizer_state_dict(model, optimizer)
        _load({OPTIMIZER: state}, checkpoint)
        set_optimizer_state_dict(model, optimizer, state)
        return
    state = {}
    if launch.rank() == 0:
        saved = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        state = by_name(saved, optimizer, {parameter: name for name, parameter in model.named_parameters()})
    set_optimizer_state_dict(model, optimizer, state, options=_broadcast())


def _broadcast(*, strict: bool = True) -> StateDictOptions:
    """For whole states that the main process alone has."""
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=launch.world_size() > 1, strict=strict)


def _file_weights(model: PreTrainedModel, checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if not (checkpoint / ADAPTER_FILE).is_file():
        return state
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: state[short] for name in trained if (short := name_in_file(name)) in state}


def by_name(saved: Mapping[str, Any], optimizer: Optimizer, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer's state dict with the parameters' names instead of their numbers.

    Args:
        saved: The state dict of an optimizer with the same groups.
        optimizer: The optimizer whose parameters have the names.
        names: Parameter -> name.
    """
    name_of = {
        number: names[parameter]
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(group["params"], own["params"], strict=True)
    }
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {
        "state": {name_of[number]: state for number, state in saved["state"].items()},
        "param_groups": groups,
    }


def whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole weights of a checkpoint by name, in host memory. It needs neither a GPU nor other processes.

    Raises:
        RunFolderError: The file that lists the tensors is not one of PyTorch's.
        RuntimeError: A file is missing or damaged.
    """
    listed = _Reader(checkpoint / FOLDER).read_metadata().state_dict_metadata
    state = {
        name.removeprefix(f"{MODEL}."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in listed.items()
        if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
    }
    _load({MODEL: dict(state)}, checkpoint)
    return state


def _model_state(model: PreTrainedModel, select: Select) -> dict[str, Any]:
    """The weights of this process that a checkpoint holds, each tied weight under one name."""
    state = get_model_state_dict(model, options=_options(model))
    selected = select(model, state)
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # second name -> the name under which it is stored
    aliases = tuple(f".{name}" for name in tied)  # PEFT puts a prefix before transformers' names
    kept = state if selected is None else selected
    parameters = {name for name, _ in model.named_parameters()}
    # bitsandbytes adds the scales of a frozen weight in 4 bits, which FSDP2's weights do not have
    scales = {name for name in kept if ".weight." in name and f"{name.partition('.weight.')[0]}.weight" in parameters}
    return {name: kept[name] for name in kept if name not in scales and not f".{name}".endswith(aliases)}


def _options(model: PreTrainedModel, *, strict: bool = True) -> StateDictOptions:
    """With adapters only the trained weights are saved: the frozen ones are those of the base model."""
    return StateDictOptions(ignore_frozen_params=hasattr(model, "peft_config"), strict=strict)


def _load(state: dict[str, Any], checkpoint: Path) -> None:
    _silence()
    reader = _Reader(checkpoint / FOLDER)
    reader.read_metadata()  # `load` would hide its error
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        raise _first_failure(error) from None


class _Reader(FileSystemReader):
    """PyTorch's reader, which refuses metadata that could run code."""

    def read_metadata(self, *args: object, **kwargs: object) -> Any:
        path = Path(str(self.path)) / METADATA
        with path.open("rb") as handle:
            try:
                metadata = _MetadataUnpickler(handle).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
                text = " ".join(str(error).split())[:160]
                raise RunFolderError(f"{path}: not a list of tensors: {text}; use another checkpoint") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the records of DCP's metadata, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.partition(".")[0] in ("torch", "pathlib") else None
        is_record = module in _RECORDS and isinstance(found, type)
        if is_record or isinstance(found, torch.dtype) or (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _first_failure(error: CheckpointException) -> Exception:
    """The first process's error, as an Exception: PyTorch's is a BaseException and does not name it as the cause."""
    for rank, (cause, _) in sorted(error.failures.items()):
        if isinstance(cause, RunFolderError):
            return cause
        failed = RuntimeError(f"process {rank}: {type(cause).__name__}: {cause}")
        failed.__cause__ = cause
        return failed
    return RuntimeError(str(error))


def _silence() -> None:
    """Hide PyTorch's advice about runs of one process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
