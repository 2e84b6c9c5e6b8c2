"""Several nodes without a shared disk: forks of this process, each the only process of a node with its own folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from test_several_machines import Machines, children, last_step, machines, until  # noqa: F401  # a fixture
from test_technique_runs import fsdp_rank, zero_rank
from trainer_helpers import records

from forks import forks, in_forks
from tigon.errors import TigonError
from tigon.trainer import open_folder
from tigon.trainer.checkpoint import checkpoint, elastic
from tigon.trainer.distributed import node_disks
from tigon.trainer.run import train

STEPS, SAVED = 4, 2
HOST = socket.gethostname()


def as_node(here: Path, rank: int, per_node: int = 1) -> None:
    """Make this fork one of `per_node` processes of a node whose folders are its own."""
    node, local = divmod(rank, per_node)
    os.environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(per_node), GROUP_RANK=str(node))
    folder = here / f"node-{node}"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.chdir(folder)


def on_two_nodes(
    here: Path, path: Path, *sets: str, rank_of: Callable[..., object] = train, resume: bool = False, per_node: int = 1
) -> tuple[list[int], str, str]:
    """Returns the exit codes of all processes, and what both nodes have printed to stderr and stdout."""
    said, printed = here / "said", here / "printed"
    for file in (said, printed):
        file.unlink(missing_ok=True)

    def act(rank: int) -> None:
        as_node(here, rank, per_node)
        rank_of(path, list(sets), resume=resume)

    statuses = in_forks(act, 2 * per_node, said=said, printed=printed)
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
def test_each_node_keeps_whole_checkpoints_of_ddp_and_one_that_lost_its_disk_gets_them_again(tiny, here):
    """The resumed run gives the same losses."""
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
    assert all((here / f"node-{rank}/cache").is_dir() for rank in (0, 1)), "each node prepares the data once"
    whole = losses(first)

    shutil.rmtree(second)
    codes, said, printed = on_two_nodes(here, path, resume=True)
    assert codes == [0, 0], said
    assert f"checkpoint-2 was copied to {HOST}:{second}" in printed
    assert losses(first) == whole and len(whole) == STEPS


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


@pytest.mark.second_proof("FSDP2 divides checkpoints among nodes above; these are DeepSpeed's own files")
@forks
@pytest.mark.parametrize("stage", [2, 3])
def test_nodes_keep_the_files_of_their_own_processes_with_zero(tiny, here, tigon, stage):
    pytest.importorskip("deepspeed")
    path = tiny()
    codes, said, _ = on_two_nodes(here, path, f"sharding.zero={stage}", rank_of=zero_rank)
    assert codes == [0, 0], said
    first, second = forget_the_end(here)
    whole = losses(first)
    for rank, run in enumerate((first, second)):
        states = {file.name for file in (run / "checkpoints/checkpoint-2").glob("global_step*/*optim_states.pt")}
        assert all(f"_rank_{rank}_mp" in name for name in states) and len(states) == 1, states
    os.chdir(here / "node-0")
    refused = tigon("train", path, "--resume", "--set", "train.batch_size=2").error_line()
    assert "checkpoint-2 lacks the files of process 1; copy them" in refused
    codes, said, _ = on_two_nodes(here, path, f"sharding.zero={stage}", rank_of=zero_rank, resume=True)
    assert codes == [0, 0], said
    assert losses(first) == whole and len(whole) == STEPS


def fsdp_rank_with_whole_states(recipe: Path, sets: Sequence[str], resume: bool = False) -> None:
    """As with torchao's optimizers, whose states the main process gathers and writes."""
    elastic.writes_distributed = lambda recipe: False
    fsdp_rank(recipe, sets, resume=resume)


SAME_WAY = "the ways to write and to read are those above, with other processes to agree"


@pytest.mark.second_proof(SAME_WAY)
@forks
@pytest.mark.parametrize(
    ("sets", "rank_of", "parts"),
    [
        (("train.save_async=true",), train, [["distributed"]] * 2),
        (("train.save_async=true",), fsdp_rank, [["distributed-0-of-2"], ["distributed-1-of-2"]]),
        ((), fsdp_rank_with_whole_states, [[], []]),
        (("lora.rank=4",), fsdp_rank, [["distributed-0-of-2"], ["distributed-1-of-2"]]),
        (("lora.rank=4", "lora.init=pissa"), train, [[], []]),
        (("heads.stage=1", "heads.count=2", "heads.base_steps=2"), train, [[], []]),
    ],
    ids=["ddp in background", "fsdp2 in background", "fsdp2, whole states", "fsdp2, adapters", "pissa", "heads"],
)  # fmt: skip
def test_two_processes_of_each_node_continue_exactly(tiny, here, sets, rank_of, parts):
    if "lora.rank=4" in sets:
        pytest.importorskip("peft")
    path = tiny(train={"batch_size": 1})
    codes, said, _ = on_two_nodes(here, path, *sets, rank_of=rank_of, per_node=2)
    assert codes == [0] * 4, said
    first, second = forget_the_end(here)
    whole = losses(first)
    found = [(run / "checkpoints/checkpoint-2").glob("distributed*") for run in (first, second)]
    assert [[each.name for each in folders] for folders in found] == parts
    codes, said, _ = on_two_nodes(here, path, *sets, rank_of=rank_of, resume=True, per_node=2)
    assert codes == [0] * 4, said
    assert losses(first) == whole and len(whole) == STEPS


@pytest.mark.second_proof("a node without the checkpoint gets it above")
@forks
def test_run_of_one_node_continues_on_two_and_on_one_again(tiny, here):
    """The second node gets the whole checkpoint from the first, with the samples of a step divided."""
    path = tiny(train={"batch_size": 4})
    (here / "node-0").mkdir()
    os.chdir(here / "node-0")
    train(path)
    run = Path("runs/r").resolve()
    whole = losses(run)
    shutil.rmtree(run / f"checkpoints/checkpoint-{STEPS}")
    (run / "summary.json").unlink()
    codes, said, printed = on_two_nodes(here, path, "train.steps=4", resume=True)
    assert codes == [0, 0], said[-3000:]
    assert "runs/r was not on" in printed and "checkpoint-2 was copied to" in printed
    assert losses(run) == pytest.approx(whole, rel=2e-5)
    forget_the_end(here)
    train(path, resume=True)
    assert losses(run) == pytest.approx(whole, rel=2e-5)


@pytest.mark.second_proof("other processes and engines read whole checkpoints in test_checkpoints_elastic.py")
@forks
def test_whole_checkpoint_of_any_node_serves_another_engine_an_export_and_a_node_0_without_a_disk(tiny, here, tigon):
    path = tiny()
    codes, said, _ = on_two_nodes(here, path)
    assert codes == [0, 0], said
    first, second = forget_the_end(here)
    whole = losses(first)
    os.chdir(here / "node-1")
    exported = tigon("export", second / "checkpoints/checkpoint-2", here / "exported")
    assert exported.code == 0 and (here / "exported/tokenizer.json").is_file(), exported
    shutil.rmtree(first)
    shutil.copytree(second, first)
    codes, said, printed = on_two_nodes(here, path, rank_of=fsdp_rank, resume=True)
    assert codes == [0, 0], said
    assert "metrics.jsonl lacks its beginning" in printed
    assert losses(first) == pytest.approx(whole[SAVED:], rel=2e-5)
    assert (first / "report.html").is_file() and (first / "model").is_dir()


@pytest.mark.second_proof(
    "forks above resume with disks of their own, and stand-ins in test_several_machines.py restart and stop"
)
@forks
def test_launchers_in_folders_of_their_own_restart_stop_and_resume(tiny, here, machines: Machines):  # noqa: F811
    """A process of node 1 is killed and started again, then node 1's launcher gets SIGTERM, then both start again.

    The losses are those of two processes of one machine that nothing happened to.
    """
    path = tiny(train={"steps": 100_000, "save_steps": 3, "schedule": "constant", "keep_checkpoints": 1})
    runs = [here / f"node-{node}/runs/r" for node in (0, 1)]

    def start(node: int, *words: str) -> int:
        def act() -> int:
            from tigon.cli import app

            os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), HOME=os.getcwd(), XDG_CACHE_HOME=f"{os.getcwd()}/c")
            meeting = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{machines.port}", "--node-rank", str(node)]
            sys.argv = ["tigon", "train", str(path), *meeting, *words]
            app.main()
            return 0

        (here / f"node-{node}").mkdir(exist_ok=True)
        return machines.start(f"node-{node}", act, at=here / f"node-{node}")

    pids = [start(node, "--max-restarts", "1") for node in (0, 1)]
    until(machines, lambda: last_step(runs[0]) >= 4)
    os.kill(children(pids[1])[0], signal.SIGKILL)
    until(machines, lambda: bool(records(runs[0], "resume")) and last_step(runs[0]) >= 8)
    os.kill(pids[1], signal.SIGTERM)
    assert [machines.ended(pid, within_s=120) for pid in pids] == [143, 143], machines.everything_said()
    assert "restart 1 of 1" in machines.everything_said() and "Traceback" not in machines.everything_said()
    kept = [[each.name for each in (run / "checkpoints").glob("checkpoint-*")] for run in runs]
    assert kept[0] == kept[1] and len(kept[0]) == 1
    stopped_at = checkpoint.step_of(checkpoint.newest(runs[1] / "checkpoints").path)
    assert not (runs[1] / "metrics.jsonl").exists() and (here / "node-1/runs/r-logs").is_dir()

    pids = [start(node, "--resume") for node in (0, 1)]
    until(machines, lambda: last_step(runs[0]) >= stopped_at + 4)
    os.kill(pids[1], signal.SIGTERM)
    assert [machines.ended(pid, within_s=120) for pid in pids] == [143, 143], machines.everything_said()
    steps = last_step(runs[0])
    overrides = [f"train.steps={steps}", "output.name=whole", "sharding.gpus=2"]
    assert in_forks(lambda rank: train(path, overrides), 2, said=here / "said") == [0, 0], (here / "said").read_text()
    assert losses(runs[0]) == losses(here / "runs/whole") and steps > stopped_at


# --- what is refused --------------------------------------------------------------------------------------------------


def in_nodes(here: Path, folders: Sequence[str], act: Callable[[int], object]) -> tuple[list[int], str]:
    """Run `act` in one process per node, each in its folder. Returns exit codes and what was printed to stderr."""

    def start(rank: int) -> object:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.chdir(here / folders[rank])
        torch.distributed.init_process_group("gloo")
        try:
            return act(rank)
        except TigonError as error:
            print(f"tigon: {error}", file=sys.stderr)
            return 2

    said = here / "said"
    for folder in folders:
        (here / folder).mkdir(exist_ok=True)
    statuses = in_forks(start, len(folders), said=said)
    return [os.waitstatus_to_exitcode(status) for status in statuses], said.read_text()


RUN = Path("runs/r")


@forks
def test_disks_are_found_by_the_files_that_processes_see(here):
    def act(rank: int) -> None:
        if rank == 0:
            RUN.mkdir(parents=True)
        open_folder.open_new(RUN)
        disks = node_disks.several()
        assert disks is not None and disks.own == rank and disks.processes == ((0,), (1,))
        assert disks.folders == (f"{here}/a/runs/r", f"{here}/b/runs/r") and disks.hosts == (HOST, HOST)
        assert node_disks.is_writer() and not list(RUN.iterdir())
        content = bytes(range(256)) * 3
        if rank == 0:
            (RUN / "base").mkdir()
            (RUN / "base" / "weights").write_bytes(content)
            (RUN / "base" / "empty").touch()
        node_disks.PIECE_BYTES = 100
        node_disks.share(RUN / "base")
        assert (RUN / "base" / "weights").read_bytes() == content and (RUN / "base" / "empty").exists()

    codes, said = in_nodes(here, ["a", "b"], act)
    assert codes == [0, 0], said


@forks
def test_nodes_of_which_some_share_a_disk_are_refused(here):
    def act(rank: int) -> None:
        if rank == 0:
            RUN.mkdir(parents=True)
        open_folder.open_new(RUN)

    codes, said = in_nodes(here, ["a", "a", "b"], act)
    assert codes == [2, 2, 2], said
    assert "some nodes share runs and others do not (processes 0, 1; processes 2 see each other's files)" in said
    assert not list(here.rglob("r"))


@forks
def test_folder_of_another_run_on_a_nodes_disk_is_refused_and_kept(here):
    other = here / "b" / RUN / "recipe.yaml"
    other.parent.mkdir(parents=True)
    other.touch()

    def act(rank: int) -> None:
        if rank == 0:
            RUN.mkdir(parents=True)
        open_folder.open_new(RUN)

    codes, said = in_nodes(here, ["a", "b"], act)
    assert codes == [2, 2] and f"{HOST}:{here}/b/runs/r: this folder exists there; remove it, or choose" in said
    assert other.exists() and not (here / "a" / RUN).exists()


@forks
def test_nodes_with_different_data_are_refused(here):
    def act(rank: int) -> None:
        open_folder.check_same_data({"fingerprint": f"of node {rank}", "tokens": 1000 + rank})

    codes, said = in_nodes(here, ["a", "b"], act)
    assert codes == [2, 2]
    assert f"the data of process 1 on {HOST} differ from those of process 0 on {HOST} (1,001 and 1,000 tokens)" in said


@pytest.mark.parametrize(("kind", "local"), [("ext4", True), ("nfs4", False), ("lustre", False)])
def test_only_a_file_system_of_one_machine_is_not_waited_for(tmp_path, monkeypatch, kind, local):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path} rw shared:1 - {kind} b:/c rw\n")
    monkeypatch.setattr(node_disks, "MOUNTS", mounts)
    assert node_disks._is_local(tmp_path / "runs" / "r") is local
    monkeypatch.setattr(node_disks, "MOUNTS", tmp_path / "none")
    assert not node_disks._is_local(tmp_path)


def test_node_gets_the_number_it_had_before():
    """Its own disk has the files of the processes of that number."""
    from tigon.trainer.distributed.elastic_launcher import _numbered
    from tigon.trainer.distributed.node_watch import Member

    def member(number_before: int | None = None, *, is_host: bool = False, node_rank: int | None = None) -> Member:
        return Member("h", is_host, node_rank, 1, "t", "r", number_before)

    assert _numbered([member(2), member(1), member(is_host=True)]) == [2, 1, 0]
    assert _numbered([member(), member(is_host=True), member(1)]) == [1, 2, 0]
    assert _numbered([member(1), member(1, node_rank=1), member(0, is_host=True), member(9)]) == [2, 1, 0, 3]
