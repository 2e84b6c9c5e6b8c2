"""Several machines as two launchers on this one: they meet, name what is lost, stop together and start again.

Most tests give the launchers a stand-in for tigon, which needs no imports. One trains.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed import TCPStore
from trainer_helpers import records

from forks import end_with, forks, in_forks
from second_proofs import proved_by
from tigon.errors import ProcessError, TigonError
from tigon.objectives.recipe_checks import load
from tigon.recipe.keys import OutputConfig
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import failures, launch, launch_folder, node_watch
from tigon.trainer.distributed.failures import Failure
from tigon.trainer.distributed.nodes import Nodes, first_host, from_options, nodes_of_run
from tigon.trainer.run import train

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests read and signal processes as on Linux")

# --- options and variables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": 0, "rdzv": "a:1"}, "--nnodes is 0, but must be at least 1"),
        ({"nnodes": 2}, "--nnodes 2 requires --rdzv HOST:PORT"),
        ({"rdzv": "a:1"}, "--rdzv a:1 requires --nnodes N"),
        ({"node_rank": 1}, "--node-rank 1 requires --nnodes N"),
        ({"nnodes": 2, "rdzv": "node-1"}, "--rdzv is 'node-1', but must be HOST:PORT, such as node-1:29500"),
        ({"nnodes": 2, "rdzv": "http://a:1"}, "must be HOST:PORT"),
        ({"nnodes": 2, "rdzv": "a:0"}, "--rdzv is 'a:0', but its port must be from 1 to 65535"),
        ({"nnodes": 2, "rdzv": "a:1", "node_rank": 2}, "--node-rank is 2, but must be from 0 to 1 (--nnodes 2)"),
        ({"max_restarts": -1}, "--max-restarts is -1, but must be at least 0"),
    ],
)
def test_wrong_options_are_refused_with_one_line(options, said):
    complete = {"nnodes": None, "rdzv": None, "node_rank": None, "max_restarts": None, **options}
    with pytest.raises(ProcessError) as caught:
        from_options(**complete)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_options_name_the_nodes():
    assert from_options(None, None, None, None) is None
    nodes = from_options(2, "[fd00::1]:29500", 1, 3)
    assert nodes == Nodes(2, "fd00::1", 29500, 1, 3, typed=True)
    assert from_options(2, "h:1", None, 3).options() == "--nnodes 2 --rdzv h:1 --max-restarts 3"
    assert from_options(None, None, None, 2).options() == "--max-restarts 2"


SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
}  # fmt: skip
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {**POD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ENVIRONMENTS = {
    "nothing": ({}, 8, None),
    "a shell in an allocation of SLURM": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, 8, None),
    "srun, one task per node": ({**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, 8, Nodes(2, "gpu07", 20217, 1)),
    "torchrun below srun": ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **TORCHRUN}, 8, None),
    "torchrun": (TORCHRUN, 8, None),
    "a PyTorchJob": (
        {**POD, "PET_NNODES": "2", "PET_NODE_RANK": "1"}, 8, Nodes(2, "job-master-0", 23456, 1),
    ),
    "a PyTorchJob with one pod": ({**POD, "RANK": "0", "WORLD_SIZE": "8", "PET_NNODES": "1"}, 8, None),
    "an elastic PyTorchJob": (
        {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_MAX_RESTARTS": "3"}, 8,
        Nodes(2, "job-worker-0", 23456, None, 3),
    ),
    "a PyTorchJob of an older operator": (POD, 8, Nodes(2, "job-master-0", 23456, 1)),
    "a PyTorchJob of an older operator, one process per pod": (POD, 1, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_nodes_follow_from_the_variables_of_a_launcher(name):
    given, processes, expected = ENVIRONMENTS[name]
    environment = dict(given)
    assert nodes_of_run(None, processes, environment) == expected
    # A launcher numbers the processes that it starts.
    is_process = "RANK" in given and "PET_NNODES" not in given and expected is None
    assert ("RANK" in environment) == is_process


def test_task_of_srun_per_gpu_becomes_a_process_of_the_run():
    environment = {
        **SRUN, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
    }  # fmt: skip
    assert nodes_of_run(None, 2, environment) is None
    added = {name: environment[name] for name in environment.keys() - SRUN.keys() if not name.startswith("SLURM")}
    assert added == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20217",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("node_list", "host"), [("a", "a"), ("a,b", "a"), ("gpu[007-012,3]-ib,x", "gpu007-ib"), ("n[3,5]", "n3")]
)
def test_first_host_of_a_slurm_node_list(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES is 1:4 in the environment, but the number of nodes is fixed"),
        ({**POD, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}, "but sharding.gpus is 4; use --gpus 8"),
        ({"PET_NNODES": "2"}, "MASTER_ADDR and PET_RDZV_ENDPOINT are not"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "6"}, "srun started 6 tasks on 2 nodes"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS is 'two' in the environment"),
    ],
)
def test_variables_that_name_no_nodes_are_refused(environment, said):
    with pytest.raises(ProcessError) as caught:
        nodes_of_run(None, 4, dict(environment))
    assert said in str(caught.value)


def test_launcher_below_a_launcher_is_refused():
    with pytest.raises(ProcessError, match="another launcher has started this one"):
        nodes_of_run(Nodes(2, "a", 1), 1, dict(TORCHRUN))


def test_recipe_for_one_process_is_refused_before_the_nodes_meet(recipe, tigon):
    path = recipe(train={"optimizer": "galore-layerwise", "max_grad_norm": 0})
    line = tigon("train", path, "--nnodes", 2, "--rdzv", "127.0.0.1:1").error_line()
    assert "galore" in line and "sharding.gpus" in line, line


# --- which failure was first ------------------------------------------------------------------------------------------


def test_first_cause_is_a_killed_process_or_one_with_an_error_of_its_own():
    lost = Failure(0, 0, "a", 2, f"ProcessError: process 0 of 4 {failures.LOST_ANOTHER}")
    own = Failure(1, 0, "a", 1, "RuntimeError: shape '[2]' is invalid")
    killed, stopped, silent = Failure(2, 1, "b", -9), Failure(3, 1, "b", -signal.SIGTERM), Failure(4, 1, "b", 1)
    everything = [lost, stopped, silent, own, killed]
    in_order = []
    while everything:
        first = failures.first_cause(everything)
        in_order.append(first)
        everything.remove(first)
    assert in_order == [killed, own, silent, lost, stopped] or in_order == [killed, own, silent, stopped, lost]
    said = str(failures.process_error(own, 2, "Start again"))
    assert said == (
        "process 1 on node 0 (a) ended with exit code 1: RuntimeError: shape '[2]' is invalid, and the others were "
        "ended. Start again"
    )


# --- two launchers with a stand-in for tigon --------------------------------------------------------------------------

# Process RANK writes its pid, and ends as its file says.
STAND_IN = """
import json, os, pathlib, sys, time
here, rank, attempt = pathlib.Path(sys.argv[2]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
about = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GROUP_RANK", "TIGON_LAUNCH")
text = json.dumps({"pid": os.getpid(), **{name: os.environ[name] for name in about}})
scratch = here / f".started-{rank}-{attempt}"
scratch.write_text(text)
scratch.rename(here / f"started-{rank}-{attempt}")
fate = here / f"fate-{rank}-{attempt}"
for _ in range(3000):
    if fate.exists():
        break
    time.sleep(0.02)
code = int(fate.read_text())
if code:
    print("its last words", file=sys.stderr)
    error = {"message": {"message": "ValueError: of its own", "extraInfo": {"timestamp": "0", "py_callstack": ""}}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
sys.exit(code)
"""


@dataclass
class Machines:
    """Launchers on this machine, each a fork of this process."""

    folder: Path
    port: int
    pids: list[int] = field(default_factory=list)

    def start(self, name: str, action: Callable[[], int], *, at: Path | None = None) -> int:
        """Run `action` in a fork. Its stderr goes into the file said-NAME."""
        pid = os.fork()
        if not pid:
            end_with(partial(self._launch, name, action, at or self.folder))
        self.pids.append(pid)
        return pid

    def _launch(self, name: str, action: Callable[[], int], at: Path) -> int:
        os.setsid()
        os.dup2(os.open(self.folder / f"said-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(os.open(self.folder / f"printed-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        sys.stderr, sys.stdout = open(2, "w", closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        os.chdir(at)
        try:
            return action()
        except TigonError as error:
            print(f"tigon: {error}", file=sys.stderr)
            return 2

    def stand_ins(
        self, name: str, *, rank: int | None = None, restarts: int = 0, recipe: str = "r", processes: int = 1
    ) -> int:
        """Start a launcher whose processes are the stand-in."""
        (self.folder / "tigon").mkdir(exist_ok=True)
        (self.folder / "tigon" / "__init__.py").touch()  # without it the installed package goes first
        (self.folder / "tigon" / "__main__.py").write_text(STAND_IN)

        def act() -> int:
            from tigon.trainer.distributed import elastic_launcher

            os.environ["PYTHONPATH"] = str(self.folder)
            plan = elastic_launcher.NodeLaunch(
                Nodes(2, "127.0.0.1", self.port, rank, restarts), ["-m", "tigon", "train", str(self.folder)], processes,
                OutputConfig(folder=f"runs-{name}", name="r"), recipe,
            )  # fmt: skip
            return elastic_launcher.launch_node(plan)

        return self.start(name, act)

    def started(self, process: int, attempt: int = 0) -> dict[str, str]:
        """Wait for a stand-in to start, and return what it has written."""
        path = self.folder / f"started-{process}-{attempt}"
        deadline_s = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline_s, self.everything_said()
            time.sleep(0.02)
        return json.loads(path.read_text())

    def fate(self, process: int, code: int, attempt: int = 0) -> None:
        scratch = self.folder / f".fate-{process}-{attempt}"
        scratch.write_text(str(code))
        scratch.rename(self.folder / f"fate-{process}-{attempt}")

    def said(self, name: str) -> str:
        return (self.folder / f"said-{name}").read_text()

    def everything_said(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("said-*")))

    def ended(self, pid: int, within_s: float = 60) -> int:
        """The exit code of a launcher; 128 plus the signal that ended it."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            waited, status = os.waitpid(pid, os.WNOHANG)
            if waited:
                self.pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            time.sleep(0.02)
        raise AssertionError(f"a launcher lives on\n{self.everything_said()}")


@pytest.fixture
def machines(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    if torch.cuda.is_initialized():
        pytest.skip("a copy of a process that has used a GPU cannot use it")
    for name in ("SILENT_S", "LOST_S"):
        monkeypatch.setattr(node_watch, name, 2.0)
    monkeypatch.setattr(node_watch, "BEAT_S", 0.2)
    monkeypatch.setattr(node_watch, "GRACE_S", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machines = Machines(here, port)
    yield machines
    for pid in machines.pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for path in here.glob("started-*"):
        with suppress(ProcessLookupError):
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


@forks
@pytest.mark.parametrize("late", proved_by([0], [0, 1], "the nodes meet in the same way in either order"))
def test_node_that_comes_late_is_waited_for_and_numbers_are_kept(late, machines, monkeypatch):
    """Node 1 may start first. It says at which address it waits."""
    monkeypatch.setattr(launch, "MEETING_S", 0.5)
    pids = {1 - late: machines.stand_ins(f"node-{1 - late}", rank=1 - late)}
    time.sleep(1.2)
    pids[late] = machines.stand_ins(f"node-{late}", rank=late)
    for process in (0, 1):
        about = machines.started(process)
        assert (about["GROUP_RANK"], about["WORLD_SIZE"], about["MASTER_ADDR"]) == (str(process), "2", "127.0.0.1")
        machines.fate(process, 0)
    assert machines.started(0)["TIGON_LAUNCH"] == machines.started(1)["TIGON_LAUNCH"]
    assert [machines.ended(pids[node]) for node in (0, 1)] == [0, 0], machines.everything_said()
    waited = f"tigon: waiting at 127.0.0.1:{machines.port} until all 2 nodes have started"
    assert waited in machines.said(f"node-{1 - late}")
    assert not list(machines.folder.glob("runs-*/*")), "logs of processes that wrote nothing are removed"


@forks
@pytest.mark.parametrize("lost", proved_by([0], [0, 1], "node 0 keeps the store, so its loss is the harder one"))
def test_lost_node_is_named_and_the_other_ends(lost, machines):
    """The machine is gone: its launcher and its process end without a word. Node 0 keeps the store of the others."""
    pids = [machines.stand_ins(f"node-{node}", rank=node) for node in (0, 1)]
    processes = [machines.started(process)["pid"] for process in (0, 1)]
    (machines.folder / f"runs-node-{1 - lost}" / "r" / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    for pid in (pids[lost], processes[lost]):
        os.kill(pid, signal.SIGKILL)
    assert machines.ended(pids[1 - lost]) == 2, machines.everything_said()
    said = machines.said(f"node-{1 - lost}")
    assert said.strip().splitlines() == [
        f"tigon: node {lost} of 2 ({socket.gethostname()}, process {lost}) was lost, and the others were ended. "
        f"runs-node-{1 - lost}/r/checkpoints/checkpoint-3 is kept: start the command on every node again with --resume"
    ]


@forks
def test_process_that_fails_is_named_on_every_node_and_its_log_is_collected(machines):
    """The nodes share no disk, so the log of node 1 is copied to node 0."""
    pids = [machines.stand_ins(f"node-{node}", rank=node) for node in (0, 1)]
    for process in (0, 1):
        machines.started(process)
    machines.fate(1, 1)
    assert [machines.ended(pid) for pid in pids] == [2, 2], machines.everything_said()
    for node in (0, 1):
        lines = [line for line in machines.said(f"node-{node}").splitlines() if line.startswith("tigon: ")]
        (line,) = lines
        host = socket.gethostname()
        assert f"process 1 on node 1 ({host}) ended with exit code 1: ValueError: of its own" in line
        (log,) = machines.folder.glob("runs-node-1/r-logs/*/*/attempt_0/0/stderr.log")
        assert f"its log is {host}:{log}" in line and log.read_text() == "its last words\n"


@forks
def test_failure_starts_all_processes_again_with_a_new_store(machines):
    """One of two processes of node 1 is killed; the processes of the second attempt end well."""
    pids = [machines.stand_ins(f"node-{node}", rank=node, restarts=1, processes=1 + node) for node in (0, 1)]
    first = [machines.started(process) for process in range(3)]
    os.kill(first[2]["pid"], signal.SIGKILL)
    second = [machines.started(process, attempt=1) for process in range(3)]
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"] == second[1]["MASTER_PORT"]
    assert {about["TIGON_LAUNCH"] for about in (*first, *second)} == {first[0]["TIGON_LAUNCH"]}
    for process in range(3):
        machines.fate(process, 0, attempt=1)
    assert [machines.ended(pid) for pid in pids] == [0, 0], machines.everything_said()
    assert f"process 2 on node 1 ({socket.gethostname()}) was killed (SIGKILL); restart 1 of 1" in machines.said(
        "node-1"
    )


@forks
@pytest.mark.parametrize(
    ("code", "expected"), [(2, "ended with exit code 2: ValueError: of its own"), (143, None)], ids=["refusal", "stop"]
)
def test_process_that_refuses_or_stops_is_not_started_again(code, expected, machines):
    """A signal to one process stops all of them, with the exit code of the signal."""
    pids = [machines.stand_ins(f"node-{node}", rank=node, restarts=3) for node in (0, 1)]
    for process in (0, 1):
        machines.started(process)
        if code == 143 or process == 0:
            machines.fate(process, code)
    assert [machines.ended(pid) for pid in pids] == [code, code], machines.everything_said()
    assert not list(machines.folder.glob("started-*-1"))
    if expected:  # process 0 has printed its line on node 0
        assert expected not in machines.said("node-0") and expected in machines.said("node-1")


@forks
def test_different_recipes_on_two_nodes_are_refused(machines):
    pids = [machines.stand_ins(f"node-{node}", recipe=f"recipe {node}") for node in (0, 1)]
    assert [machines.ended(pid) for pid in pids] == [2, 2]
    for node in (0, 1):
        assert "start the same command on every node" in machines.said(f"node-{node}")
    assert not list(machines.folder.glob("started-*"))


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.second_proof(
    "stand-ins restart and stop above, test_two_processes.py resumes and stops processes that train, and "
    "test_checkpoints.py repeats losses after a kill"
)
@forks
def test_training_continues_after_a_restart_and_stops_with_a_checkpoint_on_a_signal(recipe, here, machines):
    """A process of node 1 is killed, and started again from the checkpoint. Then node 1's launcher gets SIGTERM.

    The losses are those of two processes of one machine that nothing happened to.
    """
    path = recipe(train={"steps": 100_000, "batch_size": 2, "save_steps": 3, "log_steps": 1, "schedule": "constant"})
    run = here / "runs" / "r"

    def act() -> int:
        from tigon.cli import app

        os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path])
        meeting = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{machines.port}", "--max-restarts", "1"]
        sys.argv = ["tigon", "train", str(path), *meeting]
        app.main()
        return 0

    pids = [machines.start(f"node-{node}", act) for node in (0, 1)]
    until(machines, lambda: last_step(run) >= 4)
    os.kill(children(pids[1])[0], signal.SIGKILL)
    until(machines, lambda: bool(records(run, "resume")) and last_step(run) >= 8)
    os.kill(pids[1], signal.SIGTERM)
    assert [machines.ended(pid, within_s=120) for pid in pids] == [143, 143], machines.everything_said()
    stopped_at = checkpoint.step_of(checkpoint.newest(run / "checkpoints").path)
    said = machines.everything_said()
    assert f"stopped by SIGTERM after step {stopped_at}; checkpoint-{stopped_at} is complete" in said
    assert f"--nnodes 2 --rdzv 127.0.0.1:{machines.port} --max-restarts 1 --resume`" in said
    assert "restart 1 of 1" in said and "Traceback" not in said and "stack trace" not in said, said
    (resumed,) = records(run, "resume")
    assert resumed["step"] % 3 == 0 and not resumed["warnings"]

    overrides = [f"train.steps={stopped_at}", "output.name=whole", "sharding.gpus=2"]
    assert in_forks(lambda rank: train(path, overrides), 2, said=here / "said") == [0, 0], (here / "said").read_text()
    losses = [[record["loss"] for record in records(folder, "train")] for folder in (run, here / "runs" / "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == stopped_at


def last_step(run: Path) -> int:
    if not (run / "metrics.jsonl").exists():
        return 0
    return max((record["step"] for record in records(run, "train")), default=0)


def until(machines: Machines, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline_s, machines.everything_said()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_attempt_continues_the_run_folder_of_its_own_launch_only(here, monkeypatch):
    """A folder of this launch without a checkpoint is removed, so that the next attempt starts from the beginning."""
    output, path = OutputConfig(folder="runs", name="r"), Path("runs/r")
    path.mkdir(parents=True)
    assert launch_folder.interrupted(output) is None
    monkeypatch.setenv(launch_folder.LAUNCH, "another")
    launch_folder.mark(path)
    monkeypatch.setenv(launch_folder.LAUNCH, "this")
    (path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert launch_folder.interrupted(output) is None and path.exists()
    launch_folder.mark(path)
    assert launch_folder.interrupted(output) == path
    (path / "checkpoints" / "checkpoint-3").rmdir()
    monkeypatch.setenv("RANK", "1")
    assert launch_folder.interrupted(output) is None and path.exists()
    monkeypatch.setenv("RANK", "0")
    assert launch_folder.interrupted(output) is None and not path.exists()


def test_launch_of_torchrun_is_named_by_its_launcher(monkeypatch):
    """torchrun gives the launches of two commands the same id."""
    monkeypatch.delenv(launch_folder.LAUNCH, raising=False)
    assert launch_folder.launch_name() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    name = launch_folder.launch_name()
    assert name == launch_folder.launch_name() and name.startswith(f"none-{socket.gethostname()}-{os.getppid()}-")
    assert int(name.rpartition("-")[2]) > 0
    monkeypatch.setenv(launch_folder.LAUNCH, "tigon's own")
    assert launch_folder.launch_name() == "tigon's own"


@forks
def test_processes_after_a_restart_by_torchrun_do_not_read_earlier_addresses():
    """torchrun keeps its store. The process that is there first must not take the address of one that is gone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def act(rank: int, restarts: int) -> None:
        os.environ.update(
            MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(restarts)
        )
        time.sleep(0 if rank else restarts)
        launch.init_distributed(torch.device("cpu"))
        assert launch.gather(rank) == [0, 1]

    for restarts in (0, 1):
        assert in_forks(partial(act, restarts=restarts), 2) == [0, 0]


@pytest.mark.second_proof("the launcher's name is compared above, and tigon's own restarts take the same way")
def test_restart_by_torchrun_continues_from_the_last_checkpoint(recipe, here):
    """Two processes on one machine; one is killed after its first checkpoint. The losses are those without the kill."""
    path = recipe(train={"steps": 12, "batch_size": 2, "save_steps": 3, "log_steps": 1, "workers": 0})
    run, words = here / "runs" / "r", ["-m", "tigon", "train", str(path)]
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    # Process 1 ends itself once, after step 4 was recorded.
    (here / "sitecustomize.py").write_text(ENDS_ITSELF.format(metrics=str(run / "metrics.jsonl")))
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *words], env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    (resumed,) = records(run, "resume")
    assert resumed["step"] % 3 == 0 and resumed["step"] > 0
    assert in_forks(lambda rank: train(path, ["output.name=whole", "sharding.gpus=2"]), 2) == [0, 0]
    losses = [[record["loss"] for record in records(folder, "train")] for folder in (run, here / "runs" / "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 12


ENDS_ITSELF = """
import os, pathlib, signal, threading, time

def watch():
    metrics = pathlib.Path({metrics!r})
    while not (metrics.exists() and metrics.read_text().count('"event": "train"') >= 4):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.Thread(target=watch, daemon=True).start()
"""


@forks
def test_data_is_prepared_by_one_process_of_each_node_first(here):
    """Two nodes with two processes: 0, then 2, then 1 and 3."""

    def act(rank: int) -> None:
        os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
        torch.distributed.init_process_group("gloo")
        with launch.main_process_first():
            before = sorted(int(path.name.split("-")[1]) for path in here.glob("done-*"))
            (here / f"before-{rank}").write_text(json.dumps(before))
            time.sleep(0.1)
            (here / f"done-{rank}").touch()

    assert in_forks(act, 4, said=here / "stderr") == [0] * 4, (here / "stderr").read_text()[-3000:]
    before = {rank: set(json.loads((here / f"before-{rank}").read_text())) for rank in range(4)}
    assert before[0] == set() and before[2] == {0}
    assert {0, 2} <= before[1] and {0, 2} <= before[3]


# --- what comes with it -----------------------------------------------------------------------------------------------


def test_example_files_start_a_command_that_exists():
    """The script for SLURM, and both kinds of pods of the PyTorchJob, which have the same container."""
    import typer

    from tigon.cli import app

    folder = ROOT / "examples" / "several-machines"
    (script,) = [line for line in (folder / "slurm.sbatch").read_text().splitlines() if line.startswith("srun")]
    replicas = yaml.safe_load((folder / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    pods = [replica["template"]["spec"]["containers"][0]["command"] for replica in replicas.values()]
    assert len(pods) == 2 and pods[0] == pods[1]
    options = {option for parameter in train_parameters(typer.main.get_command(app._app())) for option in parameter}
    for words in (script.partition("tigon ")[2].split(), pods[0][1:]):
        assert words[0] == "train" and (ROOT / words[1]).is_file()
        assert {word for word in words if word.startswith("--")} <= options
        load(ROOT / words[1], gpu_present=lambda: True)


def train_parameters(command):
    return [parameter.opts for parameter in command.commands["train"].params]
