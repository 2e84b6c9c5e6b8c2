"""Several machines as two launchers on this one: they start the run's processes, and all share its folder.

Most tests give the launchers a stand-in for tigon, which needs no imports. Two train.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from tigon.errors import RunFolderError, TigonError
from tigon.objectives.recipe_checks import load
from tigon.recipe.keys import OutputConfig, Recipe, TrainConfig
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import agreement, launch, torchrun
from tigon.trainer.run import train

ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests read and signal processes as on Linux")

# --- launchers --------------------------------------------------------------------------------------------------------


def page_command(name: str) -> list[str]:
    """The words of the command that the page gives for a launcher."""
    text = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
    return shlex.split(re.findall(rf"^({name} .* -m tigon train .*)$", text, re.MULTILINE)[0])


def slurm_command() -> list[str]:
    """The command that the script for SLURM starts in each task."""
    script = (ROOT / "examples" / "several-machines" / "slurm.sbatch").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    words = shlex.split(line)
    return words[words.index("torchrun") :]


def pod_command() -> list[str]:
    """The command of both kinds of pods of the PyTorchJob."""
    job = yaml.safe_load((ROOT / "examples" / "several-machines" / "pytorchjob.yaml").read_text(encoding="utf-8"))
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    pods = [replica["template"]["spec"]["containers"][0]["command"] for replica in replicas]
    assert len(pods) == 2 and pods[0] == pods[1]
    return list(pods[0])


def pod_variables(node: int, port: int) -> dict[str, str]:
    """What the operator of PyTorchJobs sets."""
    names = {"NNODES": "2", "NODE_RANK": str(node), "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
    of_pod = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**{f"PET_{name}": value for name, value in names.items()}, "PET_MASTER_PORT": str(port), **of_pod}


LAUNCHERS: dict[str, tuple[Callable[[], list[str]], Callable[[int, int], dict[str, str]]]] = {
    "torchrun": (partial(page_command, "torchrun"), lambda node, port: {}),
    "srun": (
        slurm_command,
        lambda node, port: {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "HOST": "127.0.0.1"},
    ),
    "PyTorchJob": (pod_command, pod_variables),
    "accelerate": (partial(page_command, "accelerate"), lambda node, port: {}),
}  # fmt: skip

# Process RANK writes its variables.
STAND_IN = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
text = json.dumps({"words": sys.argv[1:], **{name: os.environ[name] for name in names}})
pathlib.Path(os.environ["HERE"], "process-" + os.environ["RANK"]).write_text(text)
"""


@dataclass
class Machines:
    """Launchers on this machine, each a fork of this process."""

    folder: Path
    port: int
    pids: list[int] = field(default_factory=list)

    def start(self, name: str, words: Sequence[str], variables: dict[str, str], path: Sequence[str]) -> int:
        """Run the command of a launcher in a fork. Its stderr goes into the file said-NAME. path: PYTHONPATH."""
        pid = os.fork()
        if not pid:
            end_with(partial(self._launch, name, list(words), variables, path))
        self.pids.append(pid)
        return pid

    def _launch(self, name: str, words: list[str], variables: dict[str, str], path: Sequence[str]) -> None:
        os.setsid()
        os.dup2(os.open(self.folder / f"said-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(os.open(self.folder / f"printed-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        sys.stderr, sys.stdout = open(2, "w", closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, signal.SIG_DFL)  # not a handler that another test left
        os.environ |= {**variables, "HERE": str(self.folder), "PYTHONPATH": os.pathsep.join(path)}
        sys.argv = [self._here(os.path.expandvars(word)) for word in words]
        if words[0] == "torchrun":
            from torch.distributed.run import main
        else:
            from accelerate.commands.accelerate_cli import main
        main()

    def _here(self, word: str) -> str:
        """A word of the page's command for this machine and one process per node."""
        meeting = {"127.0.0.1:29500": f"127.0.0.1:{self.port}", "HOST:29500": f"127.0.0.1:{self.port}"}
        return {**meeting, "HOST": "127.0.0.1", "29500": str(self.port)}.get(word, word)

    def stand_ins(self, name: str) -> None:
        """Start the launcher of two nodes, whose processes are the stand-in."""
        package = self.folder / "stand-in" / "tigon"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()  # without it the installed package goes first
        (package / "__main__.py").write_text(STAND_IN)
        command, variables = LAUNCHERS[name]
        for node in (0, 1):
            smaller = {"8": "1", "16": "2", "R": str(node)}
            words = [smaller.get(word, word) for word in command()]
            if words[0] == "torchrun":
                words[1:1] = ["--local-addr", "127.0.0.1"]
            self.start(f"node-{node}", words, variables(node, self.port), [str(package.parent)])

    def said(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-6000:]}" for path in sorted(self.folder.glob("said-*")))

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
        raise AssertionError(f"a launcher lives on\n{self.said()}")


@pytest.fixture
def machines(here: Path) -> Iterator[Machines]:
    if torch.cuda.is_initialized():
        pytest.skip("a copy of a process that has used a GPU cannot use it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machines = Machines(here, port)
    yield machines
    for pid in machines.pids:
        below = descendants(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for other in below:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    with suppress(OSError):
        own = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [*own, *(each for child in own for each in descendants(child))]
    return []


@forks
@pytest.mark.parametrize("name", LAUNCHERS)
def test_documented_launcher_starts_the_processes_of_a_run_on_two_nodes(name, machines):
    """The commands are those of the page and the examples, with one process per node."""
    if name == "accelerate":
        pytest.importorskip("accelerate")
    machines.stand_ins(name)
    assert [machines.ended(pid) for pid in list(machines.pids)] == [0, 0], machines.said()
    about = [json.loads((machines.folder / f"process-{rank}").read_text()) for rank in (0, 1)]
    assert [each["RANK"] for each in about] == ["0", "1"]
    for each in about:
        assert (each["WORLD_SIZE"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) == ("2", "0", "1")
        assert each["words"][0] == "train" and each["MASTER_PORT"] == about[0]["MASTER_PORT"]


def test_example_files_start_a_command_that_exists():
    import typer

    from tigon.cli import app

    options = {option for parameter in train_parameters(typer.main.get_command(app._app())) for option in parameter}
    for command in (slurm_command(), pod_command()):
        words = command[command.index("tigon") + 1 :]
        assert words[0] == "train" and (ROOT / words[1]).is_file()
        assert {word for word in words if word.startswith("--")} <= options
        load(ROOT / words[1], gpu_present=lambda: True)


def train_parameters(command):
    return [parameter.opts for parameter in command.commands["train"].params]


# --- one folder and the same inputs -----------------------------------------------------------------------------------


def on_two_nodes(here: Path, act: Callable[[], object], *, apart: bool = False) -> tuple[list[int], str]:
    """Run `act` in one process per node. apart: Each in a folder of its own. Returns exit codes and stderr."""

    def start(rank: int) -> object:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        folder = here / f"node-{rank if apart else 0}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        torch.distributed.init_process_group("gloo")
        try:
            return act()
        except TigonError as error:
            print(f"tigon: {error}", file=sys.stderr)
            return 2

    said = here / "said"
    statuses = in_forks(start, 2, said=said)
    return [os.waitstatus_to_exitcode(status) for status in statuses], said.read_text()


RUN = Path("runs/r")


@forks
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "disks of their own"])
def test_run_folder_that_a_node_does_not_see_is_refused_before_the_run_starts(here, monkeypatch, apart):
    monkeypatch.setattr(agreement, "SEEN_S", 0.5)

    def act() -> None:
        if launch.rank() == 0:
            RUN.mkdir(parents=True)
        agreement.check_shared(RUN)

    codes, said = on_two_nodes(here, act, apart=apart)
    assert codes == ([2, 2] if apart else [0, 0]), said
    expected = f"tigon: output.folder: runs/r on {HOST} is not visible to process 1 on {HOST}; a run on several"
    assert (expected in said) == apart and not list(here.rglob(f"{agreement.TOKEN}*"))


@forks
def test_new_run_folder_that_a_node_does_not_see_is_removed_again(recipe, here, monkeypatch):
    path = recipe().resolve()
    (here / "node-1").mkdir()

    def act(rank: int) -> None:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        agreement.SEEN_S = 0.5
        folder = here / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        train(path, [f"data.source={here / 'text.txt'}", "train.batch_size=2"])

    statuses = in_forks(act, 2, said=here / "said")
    assert all(statuses) and "a run on several machines needs a folder" in (here / "said").read_text()
    assert not list(here.rglob("r"))


@forks
@pytest.mark.parametrize("differ", ["recipes", "data"])
def test_nodes_with_different_recipes_or_data_are_refused(here, differ):
    def act() -> None:
        rank = launch.rank()
        recipe = Recipe(train=TrainConfig(steps=1 + rank if differ == "recipes" else 1))
        fingerprint = f"of node {rank}" if differ == "data" else "of both"
        agreement.check_same_recipe(recipe)
        agreement.check_same_data({"fingerprint": fingerprint, "tokens": 1000 + rank})

    codes, said = on_two_nodes(here, act)
    assert codes == [2, 2]
    expected = {
        "data": f"the data of process 1 on {HOST} differ from those of process 0 on {HOST} (1,001 and 1,000 tokens)",
        "recipes": f"the recipe or its --set options of process 1 on {HOST} differ from those of process 0 on {HOST}",
    }
    assert expected[differ] in said


@forks
def test_nodes_with_different_options_are_refused_before_the_run_folder_is_made(recipe, here):
    path = recipe().resolve()

    def act(rank: int) -> None:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        train(path, ["train.batch_size=2", f"train.steps={1 + rank}"])

    statuses = in_forks(act, 2, said=here / "said")
    expected = f"the recipe or its --set options of process 1 on {HOST} differ from those of process 0 on {HOST}"
    assert all(statuses) and expected in (here / "said").read_text() and not (here / "runs").exists()


# --- failures and restarts --------------------------------------------------------------------------------------------


def test_error_of_a_process_is_written_for_torchrun(here, monkeypatch):
    """torchrun's report names the process that failed first, with this message."""

    def fail() -> None:
        raise ValueError("of its own")

    assert torchrun.recorded(fail) is fail
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here / "error.json"))
    with pytest.raises(ValueError, match="of its own"):
        torchrun.recorded(fail)()
    assert json.loads((here / "error.json").read_text())["message"]["message"] == "ValueError: of its own"


@pytest.mark.second_proof(
    "the launchers are started above, test_two_processes.py resumes and stops processes that train, and "
    "test_checkpoints.py repeats losses after a kill"
)
@forks
def test_two_torchruns_restart_a_run_and_stop_it_with_a_checkpoint_on_a_signal(recipe, here, machines):
    """A process of node 1 is killed, and all start again from the checkpoint. Then both torchruns get SIGTERM.

    The losses are those of two processes of one machine that nothing happened to.
    """
    path = recipe(train={"steps": 100_000, "batch_size": 2, "save_steps": 3, "log_steps": 1, "schedule": "constant"})
    run = here / "runs" / "r"
    words = page_command("torchrun")
    words = [{"8": "1", "RECIPE.yaml": str(path)}.get(word, word) for word in words]
    words[1:1] = ["--local-addr", "127.0.0.1", "--max-restarts", "1"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    pids = [machines.start(f"node-{node}", words, variables, sys.path) for node in (0, 1)]
    until(machines, lambda: last_step(run) >= 4)
    os.kill(descendants(pids[1])[0], signal.SIGKILL)
    until(machines, lambda: bool(records(run, "resume")) and last_step(run) >= 8)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for pid in pids:
        machines.ended(pid, within_s=120)
    stopped_at = checkpoint.step_of(checkpoint.newest(run / "checkpoints").path)
    assert f"stopped by SIGTERM after step {stopped_at}; checkpoint-{stopped_at} is complete" in machines.said()
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
        assert time.monotonic() < deadline_s, machines.said()
        time.sleep(0.05)


def test_attempt_continues_the_run_folder_of_its_own_launch_only(here, monkeypatch):
    """A folder of this launch without a checkpoint is removed, so that the next attempt starts from the beginning."""
    output, path = OutputConfig(folder="runs", name="r"), Path("runs/r")
    path.mkdir(parents=True)
    assert torchrun.interrupted(output) is None
    monkeypatch.setenv(torchrun.RUN_ID, "another")
    torchrun.mark(path)
    monkeypatch.setenv(torchrun.RUN_ID, "this")
    (path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert torchrun.interrupted(output) is None and path.exists()
    torchrun.mark(path)
    assert torchrun.interrupted(output) == path
    (path / "checkpoints" / "checkpoint-3").rmdir()
    monkeypatch.setenv("RANK", "1")
    assert torchrun.interrupted(output) is None and path.exists()
    monkeypatch.setenv("RANK", "0")
    assert torchrun.interrupted(output) is None and not path.exists()


@pytest.mark.parametrize("name", ["summary.json", "model/model.safetensors", "heads/heads.safetensors"])
def test_restart_keeps_what_an_attempt_without_checkpoints_has_trained(here, monkeypatch, name):
    monkeypatch.setenv(torchrun.RUN_ID, "this")
    written = Path("runs/r") / name
    written.parent.mkdir(parents=True)
    written.touch()
    torchrun.mark(Path("runs/r"))
    with pytest.raises(RunFolderError, match=r"^runs/r: an earlier attempt .* no checkpoint"):
        torchrun.interrupted(OutputConfig(folder="runs", name="r"))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        torchrun.interrupted(OutputConfig(folder="runs", name="r"))
    assert written.exists()


def test_launch_of_torchrun_is_named_by_its_launcher(monkeypatch):
    """torchrun gives the launches of two commands the same id."""
    assert torchrun.launch_name() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    name = torchrun.launch_name()
    assert name == torchrun.launch_name() and name.startswith(f"none-{socket.gethostname()}-{os.getppid()}-")
    assert int(name.rpartition("-")[2]) > 0


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


@pytest.mark.second_proof("the name of a launch is compared above, and two torchruns restart a run above")
def test_processes_of_one_machine_are_restarted_and_continue_from_the_last_checkpoint(recipe, here):
    """One of two is killed after its first checkpoint. The losses are those without the kill."""
    path = recipe(train={"steps": 12, "batch_size": 2, "save_steps": 3, "log_steps": 1, "workers": 0})
    run = here / "runs" / "r"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    # Process 1 ends itself once, after step 4 was recorded.
    (here / "sitecustomize.py").write_text(ENDS_ITSELF.format(metrics=str(run / "metrics.jsonl")))
    command = [sys.executable, "-m", "tigon", "train", str(path), "--gpus", "2", "--max-restarts", "1"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("restart  1 of 1 (--max-restarts), because a process failed") == 1
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
