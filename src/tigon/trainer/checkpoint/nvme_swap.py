"""The files of DeepSpeed's NVMe offload (`sharding.offload: nvme`): reserves them for one run, and restores them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tigon.errors import RunFolderError
from tigon.trainer.distributed import launch
from tigon.trainer.folder import folder_lock

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

FOLDER = "zero_stage_3"  # the folder that DeepSpeed creates in sharding.nvme_folder


@contextmanager
def own_files(path: str | None) -> Iterator[None]:
    """Reserve this process's swap files in the folder `path` for the block, and remove them at its start and end.

    DeepSpeed would copy files of an earlier run into every checkpoint. At the end the files are as large as weights and
    optimizer states.

    Raises:
        RunFolderError: The folder cannot be written, or another run uses it.
    """
    if path is None:
        yield
        return
    name, parent = f"rank{launch.rank()}", Path(path)
    lock = f".{name}.lock"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        (parent / lock).touch()
    except OSError as error:
        raise RunFolderError(f"sharding.nvme_folder: {path}: {error.strerror}; give a folder to write into") from None
    with folder_lock.locked(parent, lock, "keeping its states in this folder"):
        _remove(parent, name)
        try:
            yield
        finally:
            _remove(parent, name)


def left_bytes(path: str) -> int:
    """Bytes of the files in the folder `path` that a killed run left and that this machine's processes will remove."""
    first, local = launch.rank() - int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    total_bytes = 0
    for rank in range(first, first + local):
        for file in Path(path).glob(f"{FOLDER}/*/rank{rank}/*"):
            with suppress(FileNotFoundError):  # another process has already removed its own
                total_bytes += file.stat().st_size
    return total_bytes


def _remove(parent: Path, name: str) -> None:
    for files in parent.glob(f"{FOLDER}/*/{name}"):
        shutil.rmtree(files, ignore_errors=True)


def restore(engine: DeepSpeedEngine, checkpoint: Path) -> None:
    """Complete the optimizer of a DeepSpeedEngine that has loaded `checkpoint` with its states in files.

    DeepSpeed 0.19.8 only copies the files. Without this, Adam would start again with moments of zero, and weights too
    small for a file, such as the norms', would keep their random values.

    Args:
        engine: The DeepSpeedEngine.
        checkpoint: The folder of the checkpoint.
    """
    from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT

    if not engine.zero_nvme_offload_optimizer():
        return
    tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    saved = torch.load(engine._get_zero_ckpt_name(str(checkpoint), tag), map_location="cpu", weights_only=True)
    state, partitioned = saved[OPTIMIZER_STATE_DICT], engine.optimizer
    partitioned.loss_scaler = state[LOSS_SCALER]
    partitioned.checkpoint_event_prologue()
    partitioned._set_fp32_optimizer_param_groups()
    partitioned.optimizer.load_state_dict(state[OPTIMIZER_STATE_DICT])
    partitioned._clear_fp32_optimizer_param_groups()
    flat, numel = partitioned.fp32_partitioned_groups_flat, partitioned.fp16_partitioned_groups_flat_numel
    for i, (weights, saved_weights) in enumerate(zip(flat, state[FP32_FLAT_GROUPS], strict=True)):
        if partitioned._swappable_optimizer_subgroup(i):
            _expect_moments(partitioned.optimizer.state[weights], int(numel[i]))
        else:
            weights.data.copy_(saved_weights.data)
    partitioned.reset_swap_buffers()  # reads the moments' files, and copies the fp32 weights to the 16-bit weights
    partitioned.checkpoint_event_epilogue()


def _expect_moments(state: dict[str, Any], n_elements: int) -> None:
    """Set placeholders of the moments' size, which take no memory, so that DeepSpeed reads the moments from files."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not value.numel():
            state[name] = torch.empty(1, dtype=value.dtype).expand(n_elements)
