"""Several nodes without a shared disk: two forks of this process, each the only process of a node with its own folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from test_technique_runs import fsdp_rank, zero_rank
from trainer_helpers import records

from forks import forks, in_forks
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import node_disks
from tigon.trainer.run import train

STEPS, SAVED = 4, 2
HOST = socket.gethostname()


def as_node(here: Path, rank: int) -> None:
    """Make this fork of two the only process of a node whose folders are its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    folder = here / f"node-{rank}"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.chdir(folder)


def on_two_nodes(
    here: Path, path: Path, *sets: str, rank_of: Callable[..., object] = train, resume: bool = False
) -> tuple[list[int], str, str]:
    """Exit codes, and what both nodes have printed to stderr and stdout."""
    said, printed = here / "said", here / "printed"
    for file in (said, printed):
        file.unlink(missing_ok=True)

    def act(rank: int) -> None:
        as_node(here, rank)
        rank_of(path, list(sets), resume=resume)

    statuses = in_forks(act, 2, said=said, printed=printed)
    return [os.waitstatus_to_exitcode(status) for status in statuses], said.read_text(), printed.read_text()


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "train")]


@pytest.fixture
def tiny(recipe, here) -> Callable[..., Path]:
    """Writes the recipe of a run with a checkpoint in its middle."""

    def write(**sections: dict[str, object]) -> Path:
        train_keys = {"steps": STEPS, "save_steps": SAVED, "batch_size": 2, **sections.pop("train", {})}
        path = recipe(
            data={"source": str(here / "text.txt"), "eval_fraction": 0}, train=train_keys,
            output={"sample_tokens": 0, "save_model": True}, **sections,
        )  # fmt: skip
        return path.resolve()

    return write


def forget_the_end(here: Path) -> tuple[Path, Path]:
    """Put both nodes' disks back to the checkpoint in the middle of the run. Returns the run folders."""
    runs = (here / "node-0/runs/r", here / "node-1/runs/r")
    for run in runs:
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS}")
        (run / "summary.json").unlink(missing_ok=True)
    return runs


@forks
def test_each_node_keeps_whole_checkpoints_of_ddp_and_the_run_continues_exactly(tiny, here):
    path = tiny()
    codes, said, printed = on_two_nodes(here, path)
    assert codes == [0, 0], said
    assert "each of the 2 nodes has runs/r on its own disk and keeps whole checkpoints there" in printed
    first, second = forget_the_end(here)
    names = [{file.name for file in (run / "checkpoints/checkpoint-2").iterdir()} for run in (first, second)]
    assert {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "counted-0.json", "counted-1.json"} <= names[0]
    assert names[0] - names[1] == {"manifest-0-of-2.json"} and names[1] - names[0] == {"manifest-1-of-2.json"}
    assert (first / "model").is_dir() and not (second / "model").exists(), "the model is exported once"
    assert not (second / "metrics.jsonl").exists() and not list(here.rglob(f"{node_disks.TOKEN}*"))
    whole = losses(first)

    codes, said, _ = on_two_nodes(here, path, resume=True)
    assert codes == [0, 0], said
    assert losses(first) == whole and len(whole) == STEPS


@forks
def test_node_that_lost_its_disk_gets_a_whole_checkpoint_from_the_main_process(tiny, here):
    path = tiny()
    codes, said, _ = on_two_nodes(here, path)
    assert codes == [0, 0], said
    first, second = forget_the_end(here)
    whole = losses(first)
    shutil.rmtree(second)
    codes, said, printed = on_two_nodes(here, path, resume=True)
    assert codes == [0, 0], said
    assert f"checkpoint-2 was copied to {HOST}:{second}" in printed
    assert losses(first) == whole


@forks
def test_nodes_keep_their_own_shards_with_fsdp2_and_name_the_files_that_are_missing(tiny, here, tigon):
    """The run continues exactly on both nodes. One process continues it only with the files of both."""
    path = tiny()
    codes, said, printed = on_two_nodes(here, path, rank_of=fsdp_rank)
    assert codes == [0, 0], said
    assert "keeps the files of its own processes there" in printed
    first, second = forget_the_end(here)
    whole = losses(first)
    checkpoints = [run / "checkpoints/checkpoint-2" for run in (first, second)]
    parts = [sorted(each.name for each in path.glob("distributed*")) for path in checkpoints]
    assert parts == [["distributed-0-of-2"], ["distributed-1-of-2"]]

    copy = f"`rsync -a --ignore-existing {HOST}:{checkpoints[1]}/ {checkpoints[0]}/`"
    os.chdir(here / "node-0")
    refused = tigon("train", path, "--resume", "--set", "train.batch_size=2").error_line()
    assert f"checkpoint-2 lacks the files of process 1; copy them on {HOST} with {copy}" in refused
    refused = tigon("export", checkpoints[0], here / "exported").error_line()
    assert f"lacks the files of process 1; copy them with {copy}" in refused
    lost = here / "lost"
    second.rename(lost)
    codes, said, _ = on_two_nodes(here, path, rank_of=fsdp_rank, resume=True)
    assert all(codes) and not second.exists()
    assert "process 1, which were written there and which no other node has; restore that folder" in said
    lost.rename(second)

    codes, said, _ = on_two_nodes(here, path, rank_of=fsdp_rank, resume=True)
    assert codes == [0, 0], said
    assert losses(first) == whole and len(whole) == STEPS

    forget_the_end(here)
    add_missing_files(checkpoints[1], checkpoints[0])
    assert checkpoint.problem_of(checkpoints[0], 2) is None and checkpoint.parts_in(checkpoints[0]) == {0: 2, 1: 2}
    os.chdir(here / "node-0")
    done = tigon("train", path, "--resume", "--set", "train.batch_size=2")
    assert done.code == 0, done
    assert losses(first) == pytest.approx(whole, rel=2e-5)


def add_missing_files(source: Path, target: Path) -> None:
    """Copy as `rsync -a --ignore-existing` does."""
    for file in source.rglob("*"):
        there = target / file.relative_to(source)
        if file.is_file() and not there.exists():
            there.parent.mkdir(exist_ok=True)
            shutil.copy(file, there)
