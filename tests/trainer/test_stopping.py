"""SIGTERM and SIGINT in every phase of a run: saved at a step boundary, said, the shell's exit code, exact resume."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing import reduction

import pytest
from torch.utils.data import get_worker_info
from trainer_helpers import records, train_losses, weights

from forks import forks, in_forks
from tigon.trainer import guarded, run
from tigon.trainer.checkpoint import checkpoint, final_model
from tigon.trainer.distributed import signals
from tigon.trainer.evaluation import generate
from tigon.trainer.evaluation.token_mean import TokenMean
from tigon.trainer.folder import run_folder
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.guards import fault_messages
from tigon.trainer.measuring import comparison
from tigon.trainer.report import progress, report

TRAIN = {"steps": 6, "eval_steps": 3, "keep_checkpoints": 9}


def kill_at(monkeypatch, owner, name: str, call: int, number: int) -> None:
    """Send this process the signal in the middle of the n-th call."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.fixture(scope="module")
def uninterrupted():
    """Filled by the first test that needs it."""
    return {}


# where, the n-th call there, the signal, and the step it ends after. save_steps: 4 is the first to save.
PHASES = {
    "in a step": (guarded.GuardedTrainer, "compute_loss", 2, signal.SIGTERM, 2, 143),
    "in an evaluation": (TokenMean, "forward_sums", 1, signal.SIGINT, 3, 130),
    "in a save": (checkpoint, "publish", 1, signal.SIGTERM, 4, 143),
    "in the last step": (guarded.GuardedTrainer, "compute_loss", 6, signal.SIGINT, 6, 130),
}


@pytest.mark.parametrize("phase", PHASES)
def test_stopped_and_resumed_run_equals_the_uninterrupted_one(phase, recipe, tigon, here, monkeypatch, uninterrupted):
    owner, name, call, number, step, code = PHASES[phase]
    path = recipe(train={**TRAIN, "save_steps": 4})
    if not uninterrupted:
        assert tigon("train", path, "--set", "output.name=whole").code == 0
        whole = here / "runs" / "whole"
        uninterrupted.update(losses=train_losses(whole), weights=weights(whole))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, number)
        outcome = tigon("train", path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    cut = here / "runs" / "r"
    assert outcome.code == code, (outcome.code, outcome.err)
    word = signal.Signals(number).name
    assert f"stopped by {word} after step {step}; checkpoint-{step} is complete" in outcome.err
    assert checkpoint.newest(cut / "checkpoints").path.name == f"checkpoint-{step}"
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0 and f"from checkpoint-{step}" in outcome.out, outcome.err
    assert train_losses(cut) == uninterrupted["losses"]
    assert weights(cut) == uninterrupted["weights"]


def test_run_without_checkpoints_is_saved_on_a_signal(recipe, tigon, here, monkeypatch):
    path = recipe(train={**TRAIN, "eval_steps": None, "workers": 2})
    with monkeypatch.context() as patch:
        kill_at(patch, guarded.GuardedTrainer, "compute_loss", 3, signal.SIGTERM)
        outcome = tigon("train", path)
    assert outcome.code == 143 and "checkpoint-3 is complete" in outcome.err
    assert "saving at the end of this step" not in outcome.out
    assert checkpoint.newest(here / "runs" / "r" / "checkpoints").path.name == "checkpoint-3"


def test_signal_before_training_ends_the_run_with_its_exit_code(recipe, tigon, here, monkeypatch):
    """While the model is built there is nothing to wait for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with monkeypatch.context() as patch:
            kill_at(patch, run, "_build", 1, number)
            outcome = tigon("train", recipe(output={"name": str(code)}, train={"save_steps": 2}))
        assert outcome.code == code and "interrupted; runs/" in outcome.out and "--resume" not in outcome.out


# After the last step, before the final weights are saved: the owner, the n-th call there, whether it is saved anyway.
BEFORE_THE_MODEL = {
    "at the end of training": (progress.ProgressDisplay, "on_train_end", 1, False),
    "before the last evaluation": (guarded.GuardedTrainer, "evaluate", 1, False),
    "in its last batch": (TokenMean, "forward_sums", 2, True),
    "in the sample": (generate, "generated", 2, False),
}


@pytest.mark.parametrize("phase", BEFORE_THE_MODEL)
def test_signal_after_the_last_step_keeps_the_weights_in_a_checkpoint(phase, recipe, tigon, here, monkeypatch, kept):
    """Nothing was to be saved but the model: the checkpoint is made for --resume, which does the rest."""
    owner, name, call, saved = BEFORE_THE_MODEL[phase]
    path = recipe(output={"save_model": True, "name": "whole"}, **({"train": {"save_steps": 4}} if saved else {}))
    kept(f"uninterrupted, {saved}", here, lambda: tigon("train", path))
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, signal.SIGTERM)
        outcome = tigon("train", path, "--set", "output.name=r")
    assert outcome.code == 143, (outcome.code, outcome.err)
    assert "stopped by SIGTERM after step 4; checkpoint-4 is complete" in outcome.err
    whole, cut = (here / "runs" / each for each in ("whole", "r"))
    assert not (cut / "model").exists() and not (cut / "summary.json").exists()
    outcome = tigon("train", path, "--set", "output.name=r", "--resume")
    assert outcome.code == 0 and "from checkpoint-4" in outcome.out, outcome.err
    first, second = (records(folder, "result")[0] for folder in (whole, cut))
    assert first["eval_loss"] == second["eval_loss"]
    first, second = ((folder / "model" / "model.safetensors").read_bytes() for folder in (whole, cut))
    assert first == second


AFTER_THE_MODEL = {
    "in the final save": (final_model.FinalModel, "save", 1, 3), "in the comparison": (comparison, "_release", 2, 2),
    "in a later turn of the comparison": (comparison, "_release", 6, 0),
    "in a repeat's step": (guarded.GuardedTrainer, "compute_loss", 4 + 1, 3), "in the report": (report, "write", 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("phase", AFTER_THE_MODEL)
def test_signal_after_the_model_is_saved_leaves_a_complete_run(phase, recipe, tigon, here, monkeypatch):
    owner, name, call, n_left_out = AFTER_THE_MODEL[phase]
    path = recipe(output={"save_model": True}, comparison={"steps": 2, "kernels": ["none", "no-flce", "tigon"]})
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, signal.SIGINT)
        outcome = tigon("train", path)
    assert outcome.code == 130, (outcome.code, outcome.err)
    but = " except its comparison" if n_left_out else ""
    assert outcome.err.endswith(f"stopped by SIGINT after step 4; the run is complete{but}\n")
    cut = here / "runs" / "r"
    assert (cut / "model" / "model.safetensors").is_file() and (cut / "report.html").is_file()
    errors = [row["error"] for row in json.loads((cut / "summary.json").read_text())["comparison"]]
    assert errors == [None] * (3 - n_left_out) + ["stopped by a signal"] * n_left_out
    if n_left_out:
        assert "stopped by a signal" in outcome.out and "stopped by a signal" in (cut / "report.md").read_text()
    assert not (cut / "checkpoints").exists() or not list((cut / "checkpoints").iterdir())


def test_signal_during_the_exchange_between_processes_is_kept(monkeypatch):
    """Two processes are in that question most of the time that one waits for the other. If it came to all of them there
    and was lost, they would train on until the launcher's patience ends, 180 s later, and it kills them."""
    from torch import distributed

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    came = [signal.SIGTERM]

    def all_reduce(heard, op):
        if came:
            os.kill(os.getpid(), came.pop())

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    with signals.StopRequest(confirms=False) as stop:
        stop.listen()
        assert [stop.signal_in_any_process() for _ in range(3)] == [0, signal.SIGTERM, signal.SIGTERM]


@forks
@pytest.mark.parametrize("first", signals.SIGNALS)
def test_second_signal_ends_the_process_at_once(first):
    """At once, also where no Python runs: a handler in Python would wait for the call to return."""

    def wait(_: int) -> None:
        with signals.StopRequest(confirms=False) as stop:
            stop.listen()
            os.kill(os.getpid(), first)
            assert stop.number == first
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    started_s = time.monotonic()
    (status,) = in_forks(wait)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT
    assert time.monotonic() - started_s < 30


def test_data_workers_survive_a_signal_to_the_process_group(recipe, tigon, here, monkeypatch):
    """A shell's Ctrl-C and a batch system's SIGTERM go to the whole group."""
    from tigon.trainer.guarded import GuardedTrainer

    original = GuardedTrainer.compute_loss

    def compute_loss(self, *arguments, **kwargs):
        if self.state.global_step == 1:
            children = multiprocessing.active_children()
            assert len(children) == 2
            for child in children:
                for number in signals.SIGNALS:
                    os.kill(child.pid, number)
        return original(self, *arguments, **kwargs)

    monkeypatch.setattr(GuardedTrainer, "compute_loss", compute_loss)
    outcome = tigon("train", recipe(train={"workers": 2, "steps": 4}))
    assert outcome.code == 0, outcome.err


def test_dead_or_hanging_data_worker_ends_the_run_with_a_message(recipe, tigon, here, monkeypatch):
    from tigon.data.packing import Collator

    original, made = Collator.__call__, [0]
    path = recipe(train={"workers": 1, "steps": 9, "save_steps": 1})
    fates = {"killed by signal": lambda: os.kill(os.getpid(), signal.SIGKILL), "timed out": lambda: time.sleep(60)}
    monkeypatch.setattr(guarded, "WORKER_TIMEOUT_S", 8)  # of a busy machine: a batch takes milliseconds
    for wanted, fate in fates.items():

        def collate(self, rows, fate=fate):
            if get_worker_info() is not None:
                made[0] += 1
                if made[0] == 6:
                    fate()
            return original(self, rows)

        monkeypatch.setattr(Collator, "__call__", collate)
        name = wanted.replace(" ", "-")
        line = tigon("train", path, "--set", f"output.name={name}").error_line()
        assert "a process that prepares batches (train.workers) died or hangs" in line, line
        # The signal of a death may come after the end of its connection, over which a batch was just handed.
        assert wanted in line or (wanted == "killed by signal" and "Error: " in line), line
        assert checkpoint.step_of(checkpoint.newest(here / "runs" / name / "checkpoints").path) >= 2
        assert not multiprocessing.active_children()


def _hand_over_and_die(connection):
    """A batch's memory is offered, as workers do, and nobody is left to hand it over."""
    with tempfile.TemporaryFile() as memory:
        connection.send_bytes(reduction.ForkingPickler.dumps(reduction.DupFd(memory.fileno())))
        os.kill(os.getpid(), signal.SIGKILL)


def test_data_worker_that_dies_handing_over_a_batch_is_named(here):
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_hand_over_and_die, args=(theirs,))
    child.start()
    offered = reduction.ForkingPickler.loads(ours.recv_bytes())
    child.join()
    with pytest.raises((OSError, EOFError)) as caught:
        offered.detach()
    (here / run_folder.RECIPE).touch()
    said = fault_messages.to_user_error(caught.value, RunFolder(here), "tigon train recipe.yaml")
    assert "(train.workers) died or hangs" in str(said) and "`tigon train recipe.yaml --resume`" in str(said)


@pytest.mark.parametrize(
    "bug", [OSError("no such row"), RuntimeError("Caught RuntimeError in DataLoader worker process 0.")]
)
def test_bug_is_not_reported_as_a_dead_data_worker(here, bug):
    with pytest.raises(type(bug)) as caught:
        raise bug
    (here / run_folder.RECIPE).touch()
    assert fault_messages.to_user_error(caught.value, RunFolder(here), "tigon train recipe.yaml") is None
