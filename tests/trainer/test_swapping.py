"""States that DeepSpeed keeps in files: what a resumed run has of them, and whose the files are.

DeepSpeed itself runs; its two compiled operators, for which a compiler and libaio would be needed, are stood in for.
"""

from __future__ import annotations

import multiprocessing
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_technique_runs import cut_back, losses, need, succeeds

from forks import forks
from tigon.errors import RunFolderError
from tigon.techniques.sharding import deepspeed_config
from tigon.trainer.checkpoint import nvme_swap
from tigon.trainer.folder import folder_lock
from tigon.trainer.run import train

BLOCK_BYTES = 8192  # some of the model's matrices have more, its norms less


class FileOperator:
    """DeepSpeed's aio_handle, reading and writing at once."""

    def __init__(self, **options: Any) -> None:
        self.n_done, self.n_threads = 0, options["intra_op_parallelism"]
        self.own: list[torch.Tensor] = []

    def new_cpu_locked_tensor(self, n_elements: int, like: torch.Tensor) -> torch.Tensor:
        self.own.append(torch.full((n_elements,), float("nan"), dtype=like.dtype))
        return self.own[-1]

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        pass

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == one.untyped_storage().data_ptr() for one in self.own)

    def _bytes(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        assert tensor.nbytes % (1024 * self.n_threads) == 0, "DeepSpeed refuses shares that are no whole KiB"
        return tensor.view(torch.uint8).numpy()

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self._bytes(tensor).tofile(path)
        self.n_done += 1
        return 0

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self._bytes(tensor)[:] = np.fromfile(path, dtype=np.uint8, count=tensor.nbytes)
        self.n_done += 1
        return 0

    def wait(self) -> int:
        n_done, self.n_done = self.n_done, 0
        return n_done


class Adam:
    """DeepSpeed's decoupled Adam (arXiv 1711.05101). Like DeepSpeed's it multiplies the betas' powers on from step to
    step, here rounded coarsely, and computes them where the step does not follow the last."""

    def __init__(self) -> None:
        self.step, self.powers = 0, (1.0, 1.0)

    def create_adam(self, *_: Any) -> None: ...

    def destroy_adam(self, *_: Any) -> None: ...

    def adam_update(self, _, step, lr, beta1, beta2, eps, decay, __, weight, gradient, first, second):
        if step == self.step + 1:
            self.powers = round(self.powers[0] * beta1, 3), round(self.powers[1] * beta2, 3)
        elif step != self.step:
            self.powers = beta1**step, beta2**step
        self.step = step
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.mul_(1 - lr * decay)
        scale = (1 - self.powers[1]) ** 0.5
        weight.addcdiv_(first, second.sqrt().div_(scale).add_(eps), value=-lr / (1 - self.powers[0]))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    need("deepspeed")
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_optimizer_swapper, partitioned_param_swapper

    files = types.SimpleNamespace(load=lambda *_, **__: types.SimpleNamespace(aio_handle=FileOperator))
    adam = types.SimpleNamespace(load=lambda *_, **__: Adam())
    monkeypatch.setattr(cpu_adam, "CPUAdamBuilder", lambda: adam)
    for module in (partitioned_optimizer_swapper, partitioned_param_swapper):
        monkeypatch.setattr(module, "AsyncIOBuilder", lambda: files)
    for module in (optimizer_utils, partitioned_param_swapper):
        monkeypatch.setattr(module, "MIN_AIO_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(deepspeed_config, "AIO_BLOCK_BYTES", BLOCK_BYTES)


ADAPTERS = pytest.mark.second_proof("the files of a base and of adapters are read as those of weights")
EASIER = pytest.mark.second_proof("without fp16 the same files are read, and have to come back in fp32")


@forks
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("sections", "fp16_supported"),
    [
        pytest.param({}, True, id="weights", marks=EASIER),
        pytest.param({}, False, id="weights on a CPU without fp16"),
        pytest.param({"lora": {"rank": 8}}, False, id="adapters on a CPU without fp16", marks=ADAPTERS),
    ],
)
def test_resumed_run_restores_states_kept_in_files(sections, fp16_supported, recipe, tigon, here, monkeypatch):
    """It has the moments, Adam's count of steps, and the norms' weights, which are too small for a file, and it rounds
    the powers of the betas alike. Files that another run left in the folder are in no checkpoint. Weights come back
    from files in fp32, also on a CPU without fp16, where DeepSpeed would read them as bf16."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: fp16_supported)
    left = here / "swap" / nvme_swap.FOLDER / "optimizer" / "rank0" / "left.swp"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(9))
    path = recipe(model={"kernels": "tigon"}, train={"save_steps": 2}, output={"name": "plain"}, **sections)
    assert tigon("train", path).code == 0
    sets = ["sharding.zero=3", "sharding.offload=nvme", "sharding.nvme_folder=swap"]
    runs = here / "runs"
    succeeds(lambda rank: train(path, [*sets, "output.name=files"]), here)
    drawn_apart = 1e-2  # the adapters, after a base that came from files
    assert losses(runs / "files") == pytest.approx(losses(runs / "plain"), rel=drawn_apart if sections else 1e-5)
    saved = {file.name for file in (runs / "files" / "checkpoints").rglob("*.swp")}
    assert any(name.startswith("exp_avg_sq-") for name in saved) and "left.swp" not in saved
    assert not list((here / "swap").rglob("*.swp")), "files are left that are as large as the states"
    cut_back(runs / "files", "cut", 4)
    succeeds(lambda rank: train(path, [*sets, "output.name=cut"], resume=True), here)
    assert losses(runs / "cut") == losses(runs / "files")


def keep_until_told(path: Path, told: Connection) -> None:
    with own(path):
        told.send("in")
        told.recv()


@forks
def test_nvme_folder_is_locked_against_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "LOCK_PATIENCE", 0)
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    other = fork.Process(target=keep_until_told, args=(tmp_path, there))
    other.start()
    assert here.poll(60) and here.recv() == "in"
    with pytest.raises(RunFolderError, match="another process is keeping its states in this folder"), own(tmp_path):
        pass
    here.send("end")
    other.join()
    with own(tmp_path):
        pass


def test_nvme_folder_that_cannot_be_written_into_is_refused(tmp_path):
    (tmp_path / "file").touch()
    said = r"sharding\.nvme_folder: .*file/swap: Not a directory"
    with pytest.raises(RunFolderError, match=said), own(tmp_path / "file" / "swap"):
        pass


def own(path: Path) -> Any:
    return nvme_swap.own_files(str(path))
