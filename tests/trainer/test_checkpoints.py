"""A save that is cut off, a disk that is full, a file that changed: the last complete checkpoint stays usable."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from trainer_helpers import SMALL, cut_back, records, small_trainer, train_losses, weights

from forks import forks, in_forks
from tigon.errors import RecipeError, RunFolderError
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch

CHANGES = {"os.mkdir", "os.rmdir", "os.remove", "os.rename", "shutil.rmtree"}


def saved(folder: Path, keep: int = 1):
    """A trainer after two steps, with checkpoint-2 in `folder`/c."""
    train = TrainConfig(steps=2, batch_size=8, save_steps=2, keep_checkpoints=keep, log_steps=1)
    trainer = small_trainer(folder, Recipe(model=SMALL, train=train))
    trainer.train()
    return trainer


def save_as(trainer, step: int) -> None:
    trainer.state.global_step = step
    trainer._save_checkpoint(trainer.model, None)


def killed_after(n_changes: int, folder: str) -> None:
    """SIGKILL this process at its n-th change of a file or folder with `folder` in its path."""
    left = [n_changes]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            writes = isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
            if not (writes or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))):
                return
        elif event not in CHANGES:
            return
        if folder in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@forks
def test_kill_during_a_save_leaves_a_complete_checkpoint_and_no_half_one(tmp_path):
    trainer, folder, seen = saved(tmp_path), tmp_path / "checkpoints", set()
    shutil.copytree(folder, tmp_path / "before")

    def look(and_save: bool) -> None:
        found = checkpoint.newest(folder)
        assert not found.passed_over
        seen.add(found.path.name)
        if and_save:  # the next save finds nothing in its way
            save_as(trainer, 4)
            assert checkpoint.newest(folder).path.name == "checkpoint-4"
            assert [path.name for path in folder.iterdir()] == ["checkpoint-4"]
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)

    for n_changes in range(1000):
        (status,) = in_forks(lambda _, n=n_changes: (killed_after(n, str(folder)), save_as(trainer, 3)), fresh=False)
        if not os.WIFSIGNALED(status):
            break
        look(and_save=n_changes % 4 == 0)
    assert n_changes > 10, "hardly any change of a file was seen"
    for delay_ms in range(2, 40, 8):  # within PyTorch's own writes too, which no hook sees
        in_forks(
            lambda _, ms=delay_ms: (signal.setitimer(signal.ITIMER_REAL, ms / 1000), save_as(trainer, 3)), fresh=False
        )
        look(and_save=False)
    assert seen == {"checkpoint-2", "checkpoint-3"}


def test_damaged_newest_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    trainer, folder = saved(tmp_path, keep=2), tmp_path / "checkpoints"
    save_as(trainer, 3)
    shutil.copytree(folder, tmp_path / "before")
    names = sorted(path.name for path in (folder / "checkpoint-3").iterdir())
    assert {"manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} <= set(names)
    assert "training_args.bin" not in names  # it is a pickle

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def link(path: Path) -> None:
        other = path.rename(path.parent.parent / "elsewhere")
        path.symlink_to(other)

    damages = {
        "cut off": lambda path: os.truncate(path, path.stat().st_size // 2), "flipped": flip, "removed": Path.unlink,
        "linked": link,
    }  # fmt: skip
    for name in names:
        for damage, apply in damages.items():
            apply(folder / "checkpoint-3" / name)
            found = checkpoint.newest(folder)
            assert found.path.name == "checkpoint-2", (name, damage)
            (problem,) = found.passed_over
            assert problem.startswith("checkpoint-3 ") and (name in problem or name == "manifest.json"), problem
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "before", folder)
    (folder / "checkpoint-3" / ".DS_Store").write_bytes(b"x")
    assert not checkpoint.newest(folder).passed_over, "a file manager's own file costs a checkpoint"
    (folder / "checkpoint-3" / "pytorch_model.bin").write_bytes(b"x")
    assert "holds pytorch_model.bin" in checkpoint.newest(folder).passed_over[0]
    shutil.rmtree(folder / "checkpoint-2")
    with pytest.raises(RunFolderError, match=r"no complete checkpoint to resume from: checkpoint-3 holds"):
        checkpoint.newest(folder)


def test_rotation_keeps_complete_checkpoints_and_removes_the_old_one_last(tmp_path, monkeypatch):
    def save(step: int, keep: int) -> None:
        (checkpoint.scratch(tmp_path, step) / f"checkpoint-{step}").mkdir(parents=True)
        (checkpoint.scratch(tmp_path, step) / f"checkpoint-{step}" / "w").write_text(str(step))
        checkpoint.publish(tmp_path, step, {}, keep=keep)

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("checkpoint-*"))

    for step in (5, 10):
        save(step, keep=2)
    assert left() == ["checkpoint-10", "checkpoint-5"]
    (tmp_path / "checkpoint-20").mkdir()  # damaged: 10 was resumed
    save(13, keep=2)
    assert left() == ["checkpoint-10", "checkpoint-13"]
    save(14, keep=1)
    assert left() == ["checkpoint-14"]
    seen: list[bool] = []
    rmtree = shutil.rmtree

    def watched(path: Path, **options: bool) -> None:
        seen.append(checkpoint.problem_of(tmp_path / "checkpoint-14", 14) is None)
        rmtree(path, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", watched)
    save(14, keep=1)
    assert seen and all(seen), "the checkpoint is gone while its successor is not yet there"


def test_newest_checkpoint_is_the_one_of_the_highest_step_whatever_the_clock(tmp_path):
    trainer, folder = saved(tmp_path, keep=2), tmp_path / "checkpoints"
    save_as(trainer, 3)
    os.utime(folder / "checkpoint-3", (0, 0))
    assert checkpoint.newest(folder).path.name == "checkpoint-3"
    save_as(trainer, 4)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_manifest_covers_the_metadata_file_that_is_named_with_a_dot(tmp_path):
    """FSDP2's distributed checkpoints cannot be read without .metadata."""
    shards = checkpoint.scratch(tmp_path, 3) / "checkpoint-3" / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", ".nfs0001"):
        (shards / name).write_bytes(b"what was written")
    checkpoint.publish(tmp_path, 3, {}, keep=1)
    file = tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0" / ".metadata"
    file.with_name(".nfs0001").unlink()
    assert checkpoint.problem_of(tmp_path / "checkpoint-3", 3) is None
    file.write_bytes(b"what was changed")
    assert "the content of pytorch_model_fsdp_0/.metadata" in str(checkpoint.problem_of(tmp_path / "checkpoint-3", 3))
    file.unlink()
    assert "lacks pytorch_model_fsdp_0/.metadata" in str(checkpoint.problem_of(tmp_path / "checkpoint-3", 3))


def test_digest_of_a_file_in_pieces_covers_every_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "READ_BYTES", 300)
    path, found = tmp_path / "f", set()
    data = bytes(range(256)) * 14
    for position in (None, 0, 999, 1000, 2999, len(data) - 1):
        changed = bytearray(data)
        if position is not None:
            changed[position] ^= 128
        path.write_bytes(changed)
        found.add(checkpoint.digest(path))
    assert len(found) == 6


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the file that is always full is Linux's")
def test_full_disk_leaves_the_last_checkpoint_and_no_half_one(tmp_path, monkeypatch):
    """Every file of a checkpoint in turn is written to /dev/full, by whichever library writes it."""
    trainer, folder = saved(tmp_path), tmp_path / "checkpoints"
    names = {path.name for path in (folder / "checkpoint-2").iterdir()}
    usage, original = namedtuple("usage", "total used free"), type(trainer).save_model
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 0))

    def check(name: str) -> None:
        with pytest.raises(OSError, match="No space left") as caught:
            save_as(trainer, 3)
        assert caught.value.errno == errno.ENOSPC, name
        assert [path.name for path in folder.iterdir()] == ["checkpoint-2"], name
        assert checkpoint.newest(folder).path.name == "checkpoint-2"

    for name in sorted(names - {"manifest.json", "model.safetensors"}):

        def prepared(self, output_dir=None, _internal_call=False, name=name):
            Path(output_dir).mkdir(parents=True)
            (Path(output_dir) / name).symlink_to(FULL)
            original(self, output_dir, _internal_call)

        with monkeypatch.context() as patch:
            patch.setattr(type(trainer), "save_model", prepared)
            check(name)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda self, text, encoding: FULL.write_bytes(text.encode()))
        check("manifest.json")
    with monkeypatch.context() as patch:  # safetensors moves its file into place, over any link; this is what it says
        error = safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        patch.setattr(safetensors.torch, "serialize_file", mock.Mock(side_effect=error), raising=False)
        check("model.safetensors")
    monkeypatch.undo()
    save_as(trainer, 3)
    assert checkpoint.newest(folder).path.name == "checkpoint-3"


def save_in_two(rank: int, folder: Path, blocked: bool) -> None:
    """Saves steps 2 and 3 in one of two processes, which share a folder.

    At step 3 rank 1 finds the disk full at once. Rank 0 is still writing or, if `blocked`, waits for rank 1 in the
    middle of its save.
    """
    torch.distributed.init_process_group("gloo")
    trainer, written = saved(folder, keep=2), folder / "checkpoints"
    original = type(trainer)._save_rng_state

    def save_rng_state(self, output_dir):
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if blocked:
            time.sleep(60)
        time.sleep(1)
        (Path(output_dir) / "part").write_bytes(b"of rank 0")
        (folder / "written").touch()
        original(self, output_dir)

    type(trainer)._save_rng_state = save_rng_state
    with pytest.raises(OSError, match="No space left") as caught:
        save_as(trainer, 3)
    assert caught.value.filename == str(written) and (folder / "written").exists() != blocked
    assert checkpoint.newest(written).path.name == "checkpoint-2"
    if blocked:
        assert (written / ".writing-3").is_dir(), "the other may be writing into it still"
        os._exit(3)
    torch.distributed.barrier()


@forks
def test_full_disk_in_one_process_fails_both_saves_and_keeps_the_last_checkpoint(tmp_path):
    said = tmp_path / "stderr"
    statuses = in_forks(lambda rank: save_in_two(rank, tmp_path, blocked=False), 2, said=said)
    assert statuses == [0, 0], said.read_text()[-3000:]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]


@forks
def test_full_disk_in_one_process_is_reported_while_the_other_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "ALONE_S", 1)
    said = tmp_path / "stderr"

    def action(rank: int) -> None:
        if rank == 0:
            signal.alarm(8)  # as the launcher ends it
        save_in_two(rank, tmp_path, blocked=True)

    statuses = [os.waitstatus_to_exitcode(status) for status in in_forks(action, 2, said=said)]
    assert statuses == [-signal.SIGALRM, 3], said.read_text()[-3000:]


@pytest.fixture
def whole(recipe, tigon, here, kept):
    """(recipe, folder of an uninterrupted run with three checkpoints)"""

    def make() -> None:
        path = recipe(train={"steps": 6, "save_steps": 2, "keep_checkpoints": 5}, output={"name": "whole"})
        outcome = tigon("train", path)
        assert outcome.code == 0, outcome.err

    kept("six steps", here, make)
    return here / "recipe.yaml", here / "runs" / "whole"


@forks
def test_killed_and_resumed_run_equals_the_uninterrupted_one(whole, tigon, here):
    """kill -9 in the middle of saving checkpoint-4, by the command, and again in the middle of saving checkpoint-6."""
    path, uninterrupted = whole
    killed = here / "runs" / "killed"
    words = ["train", path, "--set", "output.name=killed"]
    for step, more in ((4, []), (6, ["--resume"])):
        (status,) = in_forks(lambda _, f=f".writing-{step}", m=more: (killed_after(3, f), tigon(*words, *m)))
        assert os.WIFSIGNALED(status) and list(killed.rglob(f".writing-{step}")), "the kill missed the save"
    outcome = tigon(*words, "--resume")
    assert outcome.code == 0 and "from checkpoint-4" in outcome.out, outcome.err
    assert weights(killed) == weights(uninterrupted)
    assert train_losses(killed) == train_losses(uninterrupted)
    assert not list(killed.rglob(".writing*"))


def test_resume_passes_over_a_damaged_checkpoint_and_reports_it(whole, tigon):
    path, uninterrupted = whole
    cut = cut_back(uninterrupted, "cut")
    data = bytearray((cut / "checkpoints" / "checkpoint-6" / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (cut / "checkpoints" / "checkpoint-6" / "optimizer.pt").write_bytes(data)
    outcome = tigon("train", path, "--set", "output.name=cut", "--resume")
    assert outcome.code == 0, outcome.err
    assert "from checkpoint-4" in outcome.out
    assert re.search(r"checkpoint skipped: checkpoint-6 is damaged: the content of optimizer\.pt", outcome.out)
    assert weights(cut) == weights(uninterrupted)
    assert "optimizer.pt" in json.dumps(records(cut, "resume"))


def test_resume_after_the_last_step_takes_no_further_step(whole, tigon):
    """As a kill during the last evaluation leaves it."""
    path, uninterrupted = whole
    cut = cut_back(uninterrupted, "cut")
    outcome = tigon("train", path, "--set", "output.name=cut", "--resume")
    assert outcome.code == 0, outcome.err
    assert train_losses(cut) == train_losses(uninterrupted)
    found = [records(folder, "result")[0]["eval_loss"] for folder in (cut, uninterrupted)]
    assert found[0] == found[1]


def test_records_of_a_resumed_run_reach_back_before_its_checkpoint(recipe, tigon, here, monkeypatch):
    """A checkpoint between two records, after a step that was left out: the mean loss and the count both reach back."""
    from tigon.trainer.guarded import GuardedTrainer

    original = GuardedTrainer.compute_loss

    def compute_loss(self, *arguments, **kwargs):
        loss = original(self, *arguments, **kwargs)
        return self.gate.nan_if_not_finite(loss * math.nan) if self.state.global_step == 1 else loss

    monkeypatch.setattr(GuardedTrainer, "compute_loss", compute_loss)
    path = recipe(train={"steps": 7, "save_steps": 3, "log_steps": 5, "keep_checkpoints": 5}, output={"name": "whole"})
    assert tigon("train", path).code == 0
    uninterrupted = here / "runs" / "whole"
    cut = cut_back(uninterrupted, "cut", 6, 7)
    outcome = tigon("train", path, "--set", "output.name=cut", "--resume")
    assert outcome.code == 0 and "from checkpoint-3" in outcome.out, outcome.err
    assert weights(cut) == weights(uninterrupted)
    assert train_losses(cut) == train_losses(uninterrupted)
    skipped = [json.loads((folder / "summary.json").read_text())["skipped_steps"] for folder in (cut, uninterrupted)]
    assert skipped == [1, 1]
    assert [step for step, _ in train_losses(cut)] == [1, 5]


def test_skipped_steps_before_a_checkpoint_count_towards_the_limit(tmp_path):
    def trainer_of(bad: set[int]):
        train = TrainConfig(steps=5, batch_size=8, save_steps=2, max_skipped_steps=1, log_steps=1)
        trainer = small_trainer(tmp_path, Recipe(model=SMALL, train=train))
        model = trainer.model

        def spoil(module, arguments, output):
            if module.training and trainer.state.global_step + 1 in bad:
                output.loss = output.loss * math.nan
            return output

        model.register_forward_hook(spoil)
        return trainer

    with pytest.raises(RecipeError, match="2 steps in a row, up to step 3"):
        trainer_of({2, 3}).train()
    with pytest.raises(RecipeError, match="2 steps in a row, up to step 3"):
        trainer_of({3}).train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "checkpoint-2"))
