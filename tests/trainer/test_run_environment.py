"""The environment of a run: closed streams, limits of the system, variables of launchers, a folder that is removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_helpers import records, train_losses, weights

from tigon.errors import RecipeError, RunFolderError
from tigon.trainer.distributed import launcher_variables
from tigon.trainer.folder import open_folder, run_folder
from tigon.trainer.guards import console, preflight, system_limits

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Full:
    """A stream on a full disk, or whose reader is gone."""

    def __init__(self, number: int) -> None:
        self.error = OSError(number, os.strerror(number))

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        return False


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.second_proof("the tests below break a pipe in a run, and open closed streams, without a process's imports")
def test_run_completes_in_a_process_whose_reader_is_gone(recipe, here):
    """`tigon train | head -1`, and no stdin and stderr at all."""
    path = recipe(train={"steps": 2, "save_steps": 2})
    command = f"{sys.executable} -m tigon train {path} 0<&- 2>&- | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.startswith("run ") and len(done.stdout.splitlines()) == 1
    assert (here / "runs" / "r" / "summary.json").exists()


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC], ids=["broken pipe", "full disk"])
def test_stream_that_fails_becomes_the_null_device(number, monkeypatch, capfd):
    dropped = []
    monkeypatch.setattr(sys, "stdout", Full(number))
    monkeypatch.setattr(console.os, "dup2", lambda there, here: dropped.append(here))
    with console.survive_broken_streams():
        print("step 1", flush=True)
    assert 1 in dropped
    said = capfd.readouterr().err.splitlines()
    assert said[0] == f"tigon: stdout: {os.strerror(number)}; the command continues without output"


def test_closed_streams_are_opened_before_a_file_takes_their_number(tmp_path):
    code = (
        "import sys; from tigon.trainer.guards import console; console.open_closed_streams()\n"
        f"print(open({str(tmp_path / 'checkpoint')!r}, 'w').fileno() > 2, file=open({str(tmp_path / 'said')!r}, 'w'))\n"
        "print('x', file=sys.stdout); print('x', file=sys.stderr)"
    )
    command = f'{sys.executable} -c "$0" 0<&- 1>&- 2>&-'
    assert subprocess.run(["bash", "-c", command, code], timeout=60, check=False).returncode == 0
    assert (tmp_path / "said").read_text() == "True\n"


# --- variables of launchers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"RANK": "0"}, "RANK is set in the environment, but WORLD_SIZE is not; `unset RANK`"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is set in the environment, but RANK is not; `unset WORLD_SIZE`"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK is set in the environment, but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is set in the environment, but MASTER_ADDR is not"),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK is '-1' in the environment"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "RANK is 2 in the environment, but must be less than WORLD_SIZE, which is 2",
        ),
    ],
)
def test_stray_variable_of_a_launcher_is_named(variables, said, recipe, tigon, here, monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said in tigon("train", recipe()).error_line()
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"PET_NNODES": "2", "RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
    ],
    ids=["srun", "PyTorchJob"],
)
def test_command_that_a_cluster_starts_several_times_without_torchrun_is_refused(variables, recipe, tigon, monkeypatch):
    """Each would train a model of its own, or wait for processes that nobody starts."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = tigon("train", recipe()).error_line()
    assert "is 2 in the environment, but torchrun has not started this process; use `torchrun ... -m tigon" in line
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    launcher_variables.check_environment()


def test_address_alone_and_a_whole_set_of_variables_are_accepted(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:29500")  # as Kubernetes has it
    launcher_variables.check_environment()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    launcher_variables.check_environment()


def test_variables_of_accelerate_change_no_number_and_are_named(cut, tigon, here, monkeypatch):
    path, _, whole = cut
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    outcome = tigon("train", path, "--set", "output.name=again")
    assert outcome.code == 0, outcome.err
    warnings = [line for line in outcome.out.splitlines() if "in the environment" in line]
    assert warnings[:2] == [
        "warning  ACCELERATE_MIXED_PRECISION=bf16 in the environment is ignored: the recipe decides",
        "warning  ACCELERATE_USE_DEEPSPEED=true in the environment is ignored: the recipe decides",
    ]
    assert train_losses(here / "runs" / "again") == train_losses(whole)


# --- limits of the system --------------------------------------------------------------------------------------------


def test_few_open_files_are_refused_for_workers_and_raised_where_that_may_be(monkeypatch):
    resource = pytest.importorskip("resource")
    raised = []
    monkeypatch.setattr(system_limits.resource, "setrlimit", lambda what, values: raised.append(values))
    monkeypatch.setattr(system_limits.resource, "getrlimit", lambda what: (32, 32))
    system_limits.raise_open_files(workers=0)
    with pytest.raises(RecipeError, match=r"may open 32 files .*ulimit -n.* train\.workers: 4 needs 48"):
        system_limits.raise_open_files(workers=4)
    assert not raised
    monkeypatch.setattr(system_limits.resource, "getrlimit", lambda what: (32, resource.RLIM_INFINITY))
    system_limits.raise_open_files(workers=4)
    assert raised == [(system_limits.OPEN_FILES, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.EFBIG, "File too large"), "a file grew too large"),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "a file grew too large"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files (`ulimit -n` is"),
    ],
)
def test_limit_that_a_run_meets_is_named_with_the_way_on(error, said, recipe, tigon, here, monkeypatch):
    from tigon.trainer.guarded import GuardedTrainer

    original = GuardedTrainer._save_checkpoint

    def limited(self, model, trial):
        if self.state.global_step == last:
            raise error
        original(self, model, trial)

    monkeypatch.setattr(GuardedTrainer, "_save_checkpoint", limited)
    last = 1
    line = tigon("train", recipe(train={"steps": 2, "save_steps": 1})).error_line()
    assert said in line and "remove this folder, which holds no checkpoint" in line and "--resume" not in line
    last = 2
    line = tigon("train", recipe(train={"steps": 2, "save_steps": 1}), "--set", "output.name=second").error_line()
    assert said in line and "--set output.name=second --resume`" in line


def test_limited_address_space_is_named_and_a_bug_is_not(monkeypatch):
    pytest.importorskip("resource")
    monkeypatch.setattr(system_limits, "_limit", lambda name: "2048000000" if name == "RLIMIT_AS" else "unlimited")
    for error in (MemoryError(), ImportError("libtorch.so: failed to map segment from shared object")):
        assert "`ulimit -v` is 2048000000 bytes" in (system_limits.words(error) or "")
    assert system_limits.words(ValueError("can only concatenate list")) is None
    monkeypatch.setattr(system_limits, "_limit", lambda name: "unlimited")
    assert system_limits.words(MemoryError()) is None


# --- the run's folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_folder_that_is_removed_under_the_run_ends_it_in_one_line(step, recipe, tigon, here, monkeypatch):
    from tigon.trainer.guarded import GuardedTrainer

    original = GuardedTrainer.keep_schedule

    def remove(self):
        if self.state.global_step == step:
            shutil.rmtree(here / "runs" / "r")
        original(self)

    monkeypatch.setattr(GuardedTrainer, "keep_schedule", remove)
    line = tigon("train", recipe(train={"steps": 3, "save_steps": 2})).error_line()
    assert "runs/r: this run folder was removed or renamed while the run wrote into it" in line
    assert not (here / "runs" / "r" / "checkpoints").exists()


def test_second_resume_finds_that_the_first_has_completed_the_run(cut, tigon, here, monkeypatch):
    """It has looked before the first ended, and waited for the lock."""
    path, run, _ = cut
    original = run_folder.locked

    def late(where, *rest):
        monkeypatch.setattr(run_folder, "locked", original)
        assert tigon("train", path, "--resume").code == 0
        return original(where, *rest)

    monkeypatch.setattr(run_folder, "locked", late)
    line = tigon("train", path, "--resume").error_line()
    assert "this run is complete" in line
    assert len(records(run, "resume")) == len(records(run, "result")) == 1


def test_second_resume_goes_on_from_the_checkpoint_that_the_first_has_written(cut, tigon, monkeypatch):
    path, run, whole = cut
    original = run_folder.locked

    def late(where, *rest):
        shutil.copytree(whole / "checkpoints" / "checkpoint-4", run / "checkpoints" / "checkpoint-4")
        return original(where, *rest)

    monkeypatch.setattr(run_folder, "locked", late)
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0 and "runs/r, from checkpoint-4" in outcome.out


def test_lock_of_a_folder_that_was_made_anew_is_refused(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "r"
    path.mkdir()
    (path / run_folder.RECIPE).touch()
    original = fcntl.flock

    def replaced(*arguments):
        (path / run_folder.RECIPE).unlink()
        (path / run_folder.RECIPE).touch()
        original(*arguments)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(RunFolderError, match="another process has removed this folder"), run_folder.locked(path):
        pass


DAMAGES = {
    "no JSON": b'{"versions": {',
    "nothing": b"",
    "no mapping": b"[1]",
    "nested": b"[" * 100_000,
    "binary": b"\xff\0",
}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_data_file_is_refused_before_training(content, cut, tigon, monkeypatch):
    path, run, _ = cut
    monkeypatch.setattr("tigon.trainer.run._carry_out", lambda *rest: pytest.fail("it trains"))
    (run / "data.json").write_bytes(content)
    assert "runs/r/data.json: damaged, " in tigon("train", path, "--resume").error_line()


def test_what_the_report_needs_is_written_anew_where_it_is_damaged(cut, tigon):
    path, run, whole = cut
    good = {name: (run / name).read_text(encoding="utf-8") for name in ("data.json", "environment.json")}
    (run / "environment.json").write_bytes(b"{")
    data = json.loads(good["data.json"])
    (run / "data.json").write_text(json.dumps({**data, "rows": "many"}), encoding="utf-8")
    with (run / "metrics.jsonl").open("a") as handle:
        handle.write('{"event": "train", "step": 2, "loss": "x"}\n[1]\n{"step": 1}\n{"event": "eval", "step": 1e999}\n')
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0, outcome.err
    assert "warning  data.json: rows did not agree with the data and are corrected" in outcome.out
    assert "warning  environment.json is damaged" in outcome.out
    assert "warning  metrics.jsonl: damaged lines that are dropped: 4" in outcome.out
    assert {name: (run / name).read_text(encoding="utf-8") for name in good} == good
    assert train_losses(run) == train_losses(whole) and weights(run, 4) == weights(whole, 4)


def test_every_difference_of_a_resumed_run_is_named_at_once(cut, tigon, here):
    from test_run_folder import reseal

    path, run, _ = cut
    reseal(run / "checkpoints" / "checkpoint-2", precision="amp-bf16")
    text = here / "text.txt"
    text.write_text(text.read_text(encoding="utf-8")[:-100], encoding="utf-8")
    line = tigon("train", path, "--resume").error_line()
    for part in ("the data changed", "amp-bf16, and this run has fp32"):
        assert part in line, line


# --- names -----------------------------------------------------------------------------------------------------------


NAMES = ("-rf", ".", "..", "run.", "run ", " run", "CON", "nul.txt", "x" * 81, "a/b", "a\\b", "")


def test_environment_names_what_some_runs_need_and_an_older_record_without_it_is_whole(monkeypatch):
    installed = {"bitsandbytes": "0.50.2"}
    monkeypatch.setattr(preflight.importlib.metadata, "version", lambda name: installed.get(name, "1"))
    now = preflight.environment(torch.device("cpu"))
    assert now["versions"]["bitsandbytes"] == "0.50.2"
    assert now["versions"].keys() >= set(preflight.OF_SOME_RUNS)
    older = {**now, "versions": {k: v for k, v in now["versions"].items() if k not in preflight.OF_SOME_RUNS}}
    assert open_folder._is_environment(older, now)
    del older["versions"]["torch"]
    assert not open_folder._is_environment(older, now)


def test_name_that_no_folder_should_have_is_refused(recipe, tigon, here):
    for name in NAMES:
        assert "output.name is" in tigon("train", recipe(output={"name": name})).error_line()
    assert not (here / "runs").exists()


@pytest.mark.parametrize("name", ["-rf", "run.", "CON"])
def test_sweep_of_a_name_that_no_folder_should_have_is_refused(name, recipe, tigon, here):
    (here / "sweep.yaml").write_text(f"name: {name!r}\nrecipe: {recipe()}\n", encoding="utf-8")
    assert "names a folder: " in tigon("sweep", "sweep.yaml").error_line()


@pytest.mark.parametrize("where", ["text.txt", "dangling", os.devnull, "nul\0byte", "", "x" * 300])
def test_output_folder_that_cannot_be_one_is_refused(where, recipe, tigon, here):
    (here / "dangling").symlink_to(here / "gone")
    before = set(here.iterdir())
    path = recipe(output={"folder": where})
    line = tigon("train", path).error_line()
    assert "output.folder" in line or "give another path" in line
    assert {p.name for p in here.iterdir()} <= {p.name for p in before} | {"recipe.yaml", "text.txt", "cache"}


def test_folder_that_cannot_be_written_to_the_end_is_removed(recipe, tigon, here, monkeypatch):
    def full(self, name, value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.RunFolder, "write_json", full)
    assert "runs/r: cannot be written: No space left" in tigon("train", recipe()).error_line()
    assert not Path("runs/r").exists()
