"""Several nodes without a shared disk: two forks of this process, each the only process of a node with its own folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_technique_runs import fsdp_rank, zero_rank
from trainer_helpers import records, words

from forks import forks, in_forks
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import node_disks
from tigon.trainer.run import train

STEPS, SAVED = 4, 2


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
