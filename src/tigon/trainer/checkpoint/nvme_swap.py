"""What DeepSpeed keeps in files (`sharding.offload: nvme`): alone in their folder, and back from a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tigon.errors import RunFolderError
from tigon.trainer import run_folder
from tigon.trainer.distributed import launch

FOLDER = "zero_stage_3"  # DeepSpeed's, below the recipe's


@contextmanager
def own_files(path: str | None) -> Iterator[None]:
    """This process's files in the folder `path` are its own as long as the block runs.

    What another run left there would be copied into every checkpoint, and is removed; so are its own in the end, which
    are as large as weights and states. Raises RunFolderError where the folder cannot be used or another run is at it.
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
    with run_folder.locked(parent, lock, "keeping its states in this folder"):
        _remove(parent, name)
        try:
            yield
        finally:
            _remove(parent, name)


def left_bytes(path: str) -> int:
    """Of the files that a killed run left in the folder `path`, and that the processes here will remove."""
    first, here = launch.rank() - int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    total_bytes = 0
    for rank in range(first, first + here):
        for file in Path(path).glob(f"{FOLDER}/*/rank{rank}/*"):
            with suppress(FileNotFoundError):  # another process has begun to remove its own
                total_bytes += file.stat().st_size
    return total_bytes


def _remove(parent: Path, name: str) -> None:
    for files in parent.glob(f"{FOLDER}/*/{name}"):
        shutil.rmtree(files, ignore_errors=True)


def restore(engine: Any, checkpoint: Path) -> None:
    """Give the optimizer of a DeepSpeedEngine, which has loaded `checkpoint`, what that does not where states are in
    files (0.19.8): it copies the files and no more. Adam would begin anew with moments of zero, and what is too small
    for a file, the norms' weights, would stay as it was drawn."""
    from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT

    if not engine.zero_nvme_offload_optimizer():
        return
    tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    saved = torch.load(engine._get_zero_ckpt_name(str(checkpoint), tag), map_location="cpu", weights_only=True)
    found, partitioned = saved[OPTIMIZER_STATE_DICT], engine.optimizer
    partitioned.loss_scaler = found[LOSS_SCALER]
    partitioned.checkpoint_event_prologue()
    partitioned._set_fp32_optimizer_param_groups()
    partitioned.optimizer.load_state_dict(found[OPTIMIZER_STATE_DICT])
    partitioned._clear_fp32_optimizer_param_groups()
    flat, numel = partitioned.fp32_partitioned_groups_flat, partitioned.fp16_partitioned_groups_flat_numel
    for i, (weights, saved_weights) in enumerate(zip(flat, found[FP32_FLAT_GROUPS], strict=True)):
        if partitioned._swappable_optimizer_subgroup(i):
            _expect_moments(partitioned.optimizer.state[weights], int(numel[i]))
        else:
            weights.data.copy_(saved_weights.data)
    partitioned.reset_swap_buffers()  # reads the moments' files, and has every weight follow its fp32 one
    partitioned.checkpoint_event_epilogue()


def _expect_moments(state: dict[str, Any], n_elements: int) -> None:
    """Have the moments, which a checkpoint holds in files, be read from these: tensors of their size, of no memory."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not value.numel():
            state[name] = torch.empty(1, dtype=value.dtype).expand(n_elements)
