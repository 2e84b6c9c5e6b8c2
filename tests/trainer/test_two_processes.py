"""Faults of two processes on the CPU: signals passed on, a rank that is killed, a gradient that is bad on one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_finite_steps import StepMeter, spoil
from test_technique_runs import fsdp_rank
from trainer_helpers import SMALL, records, small_trainer

from forks import forks, in_forks
from tigon.errors import ProcessError
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch, signals, torchrun
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.guards import fault_messages
from tigon.trainer.run import train

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the states of processes are read from Linux")


def train_as_rank(rank: int, folder: Path) -> None:
    """Trains five steps in one of two processes.

    In rank 1 the third step has an infinite gradient, and the fourth an infinite loss with finite gradients.
    """
    torch.distributed.init_process_group("gloo")
    train = TrainConfig(steps=5, batch_size=4, learning_rate=0.01, log_steps=1)
    trainer = small_trainer(folder / str(rank), Recipe(model=SMALL, train=train))
    if rank == 1:
        spoil(trainer, "gradient", {3})
        spoil(trainer, "inf", {4})
    watch = StepMeter(trainer)
    trainer.train()
    moved = [not torch.equal(watch.weights[step], watch.weights[step - 1]) for step in range(1, 6)]
    said = {"skipped": trainer.gate.skipped, "moved": moved, "last": watch.weights[5].double().sum().item()}
    (folder / f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    torch.distributed.barrier()


@forks
def test_gradient_not_finite_in_one_process_is_skipped_in_both(tmp_path):
    said = tmp_path / "stderr"
    assert in_forks(lambda rank: train_as_rank(rank, tmp_path), 2, said=said) == [0, 0], said.read_text()[-2000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second
    assert first["skipped"] == 2 and first["moved"] == [True, True, False, False, True]


def start(here: Path, *words: object, gpus: int = 2) -> subprocess.Popen[str]:
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tigon", "train", *map(str, words), "--gpus", str(gpus)]
    return subprocess.Popen(
        command, env=environment, cwd=here, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def reached(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run has logged `step`."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        if (run / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(run, "train")):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate())


def killed_in_step(step: int, rank: int, path: Path) -> None:
    """What one of two processes does: train, until rank 1 is killed."""
    original = GuardedTrainer.compute_loss

    def compute_loss(self, *arguments, **kwargs):
        if rank == 1 and self.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **kwargs)

    GuardedTrainer.compute_loss = compute_loss
    train(path, ["sharding.gpus=2"])


@linux
@forks
def test_two_processes_keep_their_checkpoint_after_a_kill_or_a_signal(recipe, here):
    """SIGKILL to rank 1; then, resumed by the command, SIGTERM to the launcher."""
    path = recipe(train={"steps": 100_000, "batch_size": 1, "save_steps": 3, "log_steps": 1})
    run = here / "runs" / "r"
    other, killed = in_forks(lambda rank: killed_in_step(6, rank, path), 2, said=here / "said")
    assert os.WTERMSIG(killed) == signal.SIGKILL and other != 0, (here / "said").read_text()[-3000:]
    survivor = (here / "said").read_text()
    assert (
        "ProcessError: process 0 of 2 has lost another process (1), which ended" in survivor and "--resume" in survivor
    )
    found = checkpoint.newest(run / "checkpoints")
    assert found.path.name == "checkpoint-3" and not found.passed_over

    process = start(here, path, "--resume")
    reached(run, 7, process)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=200)  # the launcher ends what hangs after 180 s
    assert process.returncode == 143, said
    assert "from checkpoint-3" in out
    stopped_at = checkpoint.step_of(checkpoint.newest(run / "checkpoints").path)
    assert f"stopped by SIGTERM after step {stopped_at}; checkpoint-{stopped_at} is complete" in said
    assert said.count("saving at the end of this step") == 1 and "Traceback" not in said
    assert [r["step"] for r in records(run, "train")] == list(range(1, stopped_at + 1))


def test_rendezvous_port_is_reserved_until_the_store_listens():
    with launch.reserved_address() as meeting:
        address = ("127.0.0.1", int(meeting["MASTER_PORT"]))
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(address)
        store = torch.distributed.TCPStore(*address, is_master=True, wait_for_workers=False)
    torch.distributed.TCPStore(*address, is_master=False).set("met", "yes")
    assert store.get("met") == b"yes"


# Stands in for tigon in the processes of a launcher: rank 1 ends as it is told, rank 0 waits to be ended.
RANK = """
import json, os, pathlib, signal, sys, time
if os.environ["TIGON_LAUNCHER"] != str(os.getppid()):
    sys.exit(9)
if os.environ["RANK"] == "1":
    fate = sys.argv[2]
    if fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    error = {"message": {"message": "ValueError: of its own", "extraInfo": {"timestamp": "0", "py_callstack": ""}}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
    sys.exit(int(fate))
time.sleep(60)
"""


@forks
@pytest.mark.parametrize(
    ("fate", "said_or_code"),
    [
        ("killed", "ProcessError: process 1 of 2 was killed (SIGKILL), and the others were ended"),
        ("1", "tigon: process 1 of 2 ended with exit code 1: ValueError: of its own; the others were ended"),
        ("2", 2),
        ("143", 143),
    ],
)
def test_launcher_ends_with_the_fate_of_its_process(fate, said_or_code, tmp_path):
    (tmp_path / "tigon").mkdir()
    (tmp_path / "tigon" / "__init__.py").touch()  # without it the installed package goes first
    (tmp_path / "tigon" / "__main__.py").write_text(RANK)

    def act(_: int) -> int:
        os.environ["PYTHONPATH"] = str(tmp_path)
        os.chdir(tmp_path)
        return torchrun.start(["-m", "tigon", "train", fate], 2)

    said = tmp_path / "stderr"
    (status,) = in_forks(act, said=said)
    if isinstance(said_or_code, str):
        assert os.waitstatus_to_exitcode(status) == 1 and said_or_code in said.read_text()
    else:
        assert os.waitstatus_to_exitcode(status) == said_or_code and not said.read_text()


def test_loss_of_another_process_is_told_apart_from_a_fault_of_its_own(monkeypatch):
    """The error of a lost process is neither a bug with a traceback nor an unreadable checkpoint."""
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:11670: Connection reset by peer. This")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fault_messages.lost_peer_message(gloo) == "Connection reset by peer"
    assert fault_messages.lost_peer_message(RuntimeError("shape '[2]' is invalid")) is None
    assert fault_messages.lost_peer_message(ValueError(str(gloo))) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fault_messages.lost_peer_message(gloo) is None


def test_killed_process_is_named_as_the_cause_and_not_the_one_that_misses_it(monkeypatch):
    """All have ended when the launcher looks. Then comes a process with an error of its own."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="none")
        for rank, code in enumerate((2, 1, -signal.SIGTERM, -signal.SIGKILL))
    }
    failures[0].error_file_data = {"message": {"message": f"ProcessError: process 0 of 4 {torchrun.LOST_ANOTHER}"}}
    failures[1].timestamp = failures[3].timestamp = failures[0].timestamp + 1
    monkeypatch.setattr(api, "launch_agent", mock.Mock(side_effect=ChildFailedError("tigon", failures)))
    with pytest.raises(ProcessError, match=r"process 3 of 4 was killed \(SIGKILL\)"):
        torchrun.start(["recipe.yaml"], 4)
    del failures[3]
    assert torchrun.start(["recipe.yaml"], 4) == 1
    del failures[1]
    assert torchrun.start(["recipe.yaml"], 4) == 2


def wait_in_vain(rank: int, here: Path) -> int | None:
    """Rank 0 waits in a collective that rank 1 never joins; rank 1 sends it two signals, and says whether it ended."""
    torch.distributed.init_process_group("gloo")
    if rank == 0:
        with signals.StopRequest() as stop:
            stop.listen()
            (here / "pid").write_text(str(os.getpid()))
            stop.signal_in_any_process()
    wait_for(here / "pid")
    time.sleep(0.5)
    pid = int((here / "pid").read_text())
    for wait_s in (1, 10):
        os.kill(pid, signal.SIGTERM)
        time.sleep(wait_s / 2)
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:  # in_forks has taken its exit code
                return None if wait_s == 10 else 1
            time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return 1


@linux
@forks
def test_second_signal_ends_a_process_that_waits_in_vain_for_another(tmp_path):
    """Its main thread is in a call that does not return, so that no handler of Python's runs."""
    said = tmp_path / "stderr"
    statuses = in_forks(lambda rank: wait_in_vain(rank, tmp_path), 2, said=said)
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [143, 0], said.read_text()[-3000:]
    assert (
        said.read_text().count("tigon: SIGTERM: saving at the end of this step; a second signal ends the run at once")
        == 1
    )


@forks
def test_signal_to_one_process_in_the_last_evaluation_stops_both(recipe, tigon, here):
    """The weights are sharded and still saved after training; --resume then completes the run."""
    path = recipe(train={"batch_size": 2}, output={"save_model": True})

    def act(rank: int) -> None:
        original = GuardedTrainer.evaluate

        def evaluate(self, *arguments):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *arguments)

        GuardedTrainer.evaluate = evaluate
        fsdp_rank(path, [], resume=False)

    said = here / "stderr"
    statuses = in_forks(act, 2, said=said)
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [143, 143], said.read_text()[-3000:]
    assert said.read_text().count("tigon: stopped by SIGTERM after step 4; checkpoint-4 is complete") == 1
    assert checkpoint.newest(here / "runs" / "r" / "checkpoints").path.name == "checkpoint-4"
    said.unlink()
    statuses = in_forks(lambda rank: fsdp_rank(path, [], resume=True), 2, said=said)
    assert statuses == [0, 0], said.read_text()[-3000:]
    assert (here / "runs" / "r" / "model" / "model.safetensors").is_file()
    assert records(here / "runs" / "r", "result")[0]["eval_loss"] is not None


def test_processes_are_started_on_this_machine_and_restarted_as_often_as_asked(recipe, tigon, here, monkeypatch):
    from torch.distributed.launcher import api

    monkeypatch.delenv(torchrun.SHUTDOWN_VARIABLE, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    taken = mock.Mock(side_effect=lambda *_, **__: (here / "runs" / "r").mkdir(parents=True))
    monkeypatch.setattr(api, "launch_agent", taken)
    words = ["-m", "tigon", "train", str(recipe()), "--set", "train.steps=3", "--set", "sharding.gpus=2"]
    assert tigon("train", *words[3:], "--max-restarts", "4").code == 0
    assert launch.LAUNCHER not in os.environ  # or a launcher that is started from here is taken for gone
    (config, python, arguments), _ = taken.call_args
    assert (python, arguments) == (sys.executable, ["-u", *words])
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 2, 4)
    assert os.environ[torchrun.SHUTDOWN_VARIABLE] == str(launch.SHUTDOWN_S)
    assert "--max-restarts" in tigon("train", words[3], "--max-restarts", "-1").error_line()


def test_command_that_continues_a_run_names_the_restarts(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert torchrun.options() == []  # torchrun was not started by `tigon train`
    monkeypatch.setenv(launch.LAUNCHER, "1")
    assert torchrun.options() == ["--max-restarts", "3"]


def launched(here: Path, action: Callable[[int], None]) -> list[int]:
    """The wait statuses of two ranks, `action`s, whose launcher is killed once each has touched `here`/ready-RANK.

    It is as PyTorch's: it has several threads, and keeps the store. Its processes become this one's, which then is one
    of those that are neither the launcher nor process 1.
    """
    launcher = os.fork()
    if launcher == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not a handler that another test left
        for _ in range(8):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def act(rank: int) -> None:
            (here / f"pid-{rank}").write_text(str(os.getpid()))
            os.environ.update(MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
            action(rank)

        in_forks(act, 2, said=here / "said")
        os._exit(0)
    with adopting():
        for rank in range(2):
            wait_for(here / f"ready-{rank}")
        pids = [int((here / f"pid-{rank}").read_text()) for rank in range(2)]
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
        return [ended(pid) for pid in pids]


@contextmanager
def adopting() -> Iterator[None]:
    """Have the system give this process those whose parent ends: only a parent hears how they end."""
    PR_SET_CHILD_SUBREAPER = 36
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def ended(pid: int, within_s: float = 20) -> int:
    """The wait status of a process that ends in that time."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        waited, status = os.waitpid(pid, os.WNOHANG)
        if waited:
            return status
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("it lives on")


def joined_rank(
    monkeypatch: pytest.MonkeyPatch, stop: signals.StopRequest, *, shutdown_s: float, look_s: float = 0.05
) -> None:
    """Joins a rank to the others, as before its first step."""
    monkeypatch.setattr(launch, "LOOK_S", look_s)
    monkeypatch.setattr(launch, "SHUTDOWN_S", shutdown_s)
    launch.end_with_launcher()
    launch.init_distributed(torch.device("cpu"))
    stop.listen()


@linux
@forks
def test_processes_whose_launcher_is_killed_agree_to_stop_and_end(tmp_path, monkeypatch):
    """Two signals would end them at once, and the store by which they agree on a checkpoint is gone.

    Rank 1 learns of the signal from rank 0 and notices only at its end that the launcher is gone.
    """
    look_s = (0.05, 1)

    def act(rank: int) -> None:
        with signals.StopRequest(confirms=False) as stop:
            joined_rank(monkeypatch, stop, shutdown_s=60, look_s=look_s[rank])
            (tmp_path / f"ready-{rank}").touch()
            while not stop.signal_in_any_process():
                time.sleep(0.02)
            assert [launch.all_gather_ints(rank), launch.all_gather_ints(7)] == [[0, 1], [7, 7]]
        launch.shutdown_distributed(on_every_rank=True)
        time.sleep(look_s[1] + 0.5)
        sys.exit(signals.EXIT_OFFSET + stop.number)

    statuses = launched(tmp_path, act)
    assert [os.waitstatus_to_exitcode(each) for each in statuses] == [143, 143], (tmp_path / "said").read_text()[-3000:]


@linux
@forks
def test_process_that_waits_in_vain_for_another_ends_after_its_launcher(tmp_path, monkeypatch):
    """Rank 0 in a collective, where no handler runs; rank 1 in a step that goes on for ever, with nobody who reads what
    it says."""

    def act(rank: int) -> None:
        with signals.StopRequest(confirms=False) as stop:
            joined_rank(monkeypatch, stop, shutdown_s=1)
            if rank == 1:
                fill_stderr()
            (tmp_path / f"ready-{rank}").touch()
            if rank == 0:
                torch.distributed.barrier()
            time.sleep(60)

    statuses = launched(tmp_path, act)
    said = (tmp_path / "said").read_text()
    assert [os.waitstatus_to_exitcode(each) for each in statuses] == [143, -signal.SIGALRM], said[-3000:]
    assert said.count("tigon: process 0 of 2: ended, because its launcher is gone and it did not end within 1 s") == 1


def fill_stderr() -> None:
    """Fills the pipe of stderr, so that every later write to it blocks."""
    _, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while os.write(full, bytes(4096)):
            pass
    os.set_blocking(full, True)
    os.dup2(full, 2)


@linux
@forks
def test_process_that_starts_after_the_death_of_its_launcher_ends(tmp_path):
    """It has another parent by the time it looks for the first."""
    with adopting():
        launcher = os.fork()
        if launcher == 0:
            # A handler that another test left, such as PyTorch's, would raise and go on with the tests in this copy.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ[launch.LAUNCHER] = str(os.getpid())
            child = os.fork()
            if child == 0:
                while os.getppid() == int(os.environ[launch.LAUNCHER]):
                    time.sleep(0.01)
                launch.end_with_launcher()
                time.sleep(60)
                os._exit(1)
            (tmp_path / "pid").write_text(str(child))
            os._exit(0)
        os.waitpid(launcher, 0)
        assert os.WTERMSIG(ended(int((tmp_path / "pid").read_text()))) == signal.SIGTERM


@linux
@forks
@pytest.mark.parametrize("number", signals.SIGNALS)
def test_signal_before_training_ends_a_process_that_waits_in_vain_for_another(number, tmp_path, monkeypatch):
    """Rank 0 waits in a collective while it builds, and nothing can be raised there. Rank 1 is slow to
    close its files, and rank 0 may not end it by force."""
    monkeypatch.setattr(signals, "HANDLER_GRACE_S", 0.2)

    def act(rank: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        torch.distributed.init_process_group("gloo")
        if rank == 0:
            with signals.sigterm_interrupts():
                (tmp_path / "pid").write_text(str(os.getpid()))
                torch.distributed.barrier()
        wait_for(tmp_path / "pid")
        time.sleep(0.3)
        pid, deadline_s = int((tmp_path / "pid").read_text()), time.monotonic() + 10
        os.kill(pid, number)
        with suppress(ProcessLookupError):  # in_forks has taken its exit code
            while time.monotonic() < deadline_s:
                os.kill(pid, 0)
                time.sleep(0.02)
        with suppress(KeyboardInterrupt, SystemExit), signals.sigterm_interrupts():
            try:
                os.kill(os.getpid(), number)
            finally:
                time.sleep(3 * signals.HANDLER_GRACE_S)

    said = tmp_path / "said"
    statuses = in_forks(act, 2, said=said)
    assert [os.waitstatus_to_exitcode(each) for each in statuses] == [128 + number, 0], said.read_text()[-3000:]
    assert said.read_text().count(f"tigon: {number.name}: ended in a call that did not return") == 1


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} never came"
        time.sleep(0.02)
