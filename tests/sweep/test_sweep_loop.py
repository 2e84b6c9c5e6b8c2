"""The loop around the points, with workers that end as told: what is recorded, skipped, resumed, and left running."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tigon.errors import RunFolderError
from tigon.sweep import failures, folder, processes
from tigon.sweep.run import sweep


def rows(path: Path) -> dict[str, dict]:
    found = json.loads((path / "results.json").read_text(encoding="utf-8"))
    return {row["id"]: row for row in found["points"]}


def test_times_leave_out_the_warm_up_and_skipped_updates(write_sweep, fake_workers):
    row = rows(sweep(write_sweep(grid={"train.batch_size": [4]})))["all batch_size=4"]
    assert (row["status"], row["step_s"], row["n_timed"]) == ("ok", 0.75, 2)
    assert row["tokens_per_s"] == 32 / 0.75
    assert row["peak_allocated_bytes"] == 4 * 2**20
    assert row["last_loss"] == 1.0


def test_out_of_memory_is_recorded_and_the_sweep_goes_on(write_sweep, fake_workers):
    path = write_sweep(
        grid={"train.batch_size": [4, 32, 16]}, variants={"lean": {}, "fat": {"train.seed": 2}},
        stop_after_oom="train.batch_size",
    )  # fmt: skip
    out = sweep(path)
    statuses = {name: row["status"] for name, row in rows(out).items()}
    assert statuses == {
        "lean batch_size=4": "ok", "fat batch_size=4": "ok", "lean batch_size=16": "ok", "lean batch_size=32": "ok",
        "fat batch_size=16": failures.OUT_OF_MEMORY, "fat batch_size=32": failures.OUT_OF_MEMORY,
    }  # fmt: skip
    assert "Tried to allocate 2.00 GiB" in rows(out)["fat batch_size=16"]["detail"]


def test_larger_size_is_skipped_after_out_of_memory_when_asked(write_sweep, fake_workers):
    path = write_sweep(
        grid={"train.batch_size": [4, 16, 32]}, variants={"fat": {"train.seed": 2}}, stop_after_oom="train.batch_size"
    )
    out = sweep(path)
    assert fake_workers() == ["4 2", "16 2"]
    row = rows(out)["fat batch_size=32"]
    assert (row["status"], row["detail"]) == (failures.SKIPPED, "after fat batch_size=16 ran out of memory")


@pytest.mark.parametrize(
    ("seed", "status", "detail"),
    [
        (3, failures.FAILED, "killed by SIGKILL"),
        (4, failures.TIMED_OUT, "longer than 2 s"),
        (5, failures.FAILED, "exit code 1: ValueError: the moon is full"),
    ],
)
def test_failure_is_recorded_with_its_reason_and_the_sweep_goes_on(seed, status, detail, write_sweep, fake_workers):
    path = write_sweep(variants={"bad": {"train.seed": seed}, "good": {}}, timeout=2, grid={})
    found = rows(sweep(path))
    assert found["bad"]["status"] == status and found["bad"]["detail"].startswith(detail)
    assert found["good"]["status"] == failures.OK


def test_kill_of_one_process_of_several_is_reported_as_the_reason(write_sweep, fake_workers, monkeypatch):
    """Linux is made to count a kill a look. What both said is in the point's log."""
    kills = itertools.count()
    monkeypatch.setattr(failures, "kernel_kills", lambda: next(kills))
    path = write_sweep(variants={"killed": {"train.seed": 7}}, set={"sharding.gpus": 2}, grid={})
    out = sweep(path)
    row = rows(out)["killed"]
    assert (row["status"], row["detail"]) == (
        failures.OUT_OF_MEMORY, "killed by Linux: the host's memory was full"
    )  # fmt: skip
    log = next((out / folder.LOGS).glob("killed*.log")).read_text(encoding="utf-8")
    assert "process 0 is here" in log and "--- process 1\nprocess 1 is here" in log
    assert not list((out / folder.LOGS).glob(".worker*"))


def test_finished_points_are_not_measured_again(write_sweep, fake_workers, capsys):
    path = write_sweep(repeats=2)
    out = sweep(path)
    assert fake_workers() == ["4 1", "8 1", "4 1", "8 1"], "a first time for all, then a second"
    assert rows(out)["all batch_size=4"]["repeats"] == 2
    sweep(path)
    assert len(fake_workers()) == 4
    assert "0 measurements to do" in capsys.readouterr().out
    broken = next((out / folder.POINTS).glob("*batch_size=8*.1.json"))
    broken.write_text("{", encoding="utf-8")  # as a full disk may leave it
    sweep(path)
    assert fake_workers()[4:] == ["8 1"]


def test_sweep_with_other_settings_is_refused_and_measurements_are_kept(write_sweep, fake_workers):
    path = write_sweep(grid={"train.batch_size": [4, 8]})
    out = sweep(path)
    before = {file.name: file.read_bytes() for file in (out / "points").iterdir()}
    for draw in (False, True):
        with pytest.raises(RunFolderError, match="2 of its measurements have other settings"):
            sweep(path, assignments=["train.seed=2"], draw=draw)
    assert {file.name: file.read_bytes() for file in (out / "points").iterdir()} == before
    assert all(row["status"] == failures.OK for row in rows(out).values())


def test_failed_point_is_measured_again_only_with_retry(write_sweep, fake_workers):
    path = write_sweep(variants={"bad": {"train.seed": 5}, "good": {}}, grid={})
    sweep(path)
    sweep(path)
    assert fake_workers() == ["8 5", "8 1"]
    sweep(path, retry=True)
    assert fake_workers()[2:] == ["8 5"]


def test_point_that_would_end_after_the_time_limit_is_not_started(write_sweep, fake_workers, capsys):
    path = write_sweep(grid={"train.batch_size": [1, 2, 3, 4]})
    sweep(path, time_limit="0.001s")  # the probe alone takes longer
    assert fake_workers() == []
    assert "time limit: 4 not started, from all batch_size=1" in capsys.readouterr().out
    sweep(path, only="size=[12]$")
    assert fake_workers() == ["1 1", "2 1"]


def test_points_of_another_machine_are_refused_but_can_be_drawn(write_sweep, fake_workers, tigon):
    path = write_sweep()
    out = sweep(path, only="size=4")
    record = next((out / folder.POINTS).glob("*.json"))
    record.write_text(record.read_text().replace("CPU (test)", "Other GPU"), encoding="utf-8")
    code, _, err = tigon("sweep", path)
    assert code == 2 and "measured with device Other GPU, and here it is CPU (test)" in err
    code, _, err = tigon("sweep", path, "--draw")
    assert code == 0, err


def test_folder_of_something_else_is_refused_and_left_as_it_is(write_sweep, tigon, here):
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    code, _, err = tigon("sweep", write_sweep(), "--out", here / "mine")
    assert code == 2 and "not a folder of `tigon sweep`" in err
    assert [file.name for file in (here / "mine").iterdir()] == ["notes.txt"]


def test_formula_in_a_name_is_quoted_in_the_csv(write_sweep, fake_workers):
    out = sweep(write_sweep(variants={"=1+1": {}}, grid={}))
    table = list(csv.DictReader((out / "results.csv").open(encoding="utf-8")))
    assert table[0]["variant"] == "'=1+1" and table[0]["peak_allocated_bytes"] == str(8 * 2**20)


def test_record_of_a_gpu_can_be_drawn_on_a_machine_without_one(write_sweep, fake_workers, monkeypatch, tmp_path):
    """A recipe with `on_gpu` is another recipe on a CPU; the folder says which of them was measured."""
    recipe = {"train": {"precision": "fp32"}, "on_gpu": {"train": {"learning_rate": 0.5}}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    path = write_sweep(recipe=None, recipes="r.yaml", grid={})
    monkeypatch.setenv("TIGON_TEST_GPU", "NVIDIA H200")
    monkeypatch.setattr("tigon.trainer.guards.preflight.gpu_present", lambda: True)
    monkeypatch.setattr("tigon.sweep.run.Run.predict", lambda run, point: None)
    assert rows(sweep(path))["r"]["keys"]["train.learning_rate"] == 0.5
    monkeypatch.setattr("tigon.trainer.guards.preflight.gpu_present", lambda: False)
    row = rows(sweep(path, draw=True))["r"]
    assert row["status"] == "ok" and row["keys"]["train.learning_rate"] == 0.5


@pytest.mark.charts
def test_point_on_a_gpu_has_a_prediction_and_a_worker_started_ahead(write_sweep, fake_workers, monkeypatch):
    """The GPU is a name here: the planner needs no more, and the workers do not train."""
    monkeypatch.setenv("TIGON_TEST_GPU", "NVIDIA H200")
    started = []
    prepare = processes.Workers.prepare
    monkeypatch.setattr(processes.Workers, "prepare", lambda self, count: started.append(count) or prepare(self, count))
    out = sweep(write_sweep(grid={"train.batch_size": [1, 2, 3, 4, 5, 6]}), memory_limit="24GiB")
    assert started == [1, 4, 2] and len(fake_workers()) == 6
    assert not [file.name for file in (out / folder.LOGS).iterdir() if file.name.startswith(".")]
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    told = [row["predicted_allocated_bytes"] for row in found["points"]]
    assert all(told) and told == sorted(told)
    assert found["memory_limit_bytes"] == 24 << 30
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Limited to 24.0 GiB: PyTorch&#39;s allocator may reserve that minus the memory planned outside it" in page
    assert "dotted: predicted" in page
    monkeypatch.delenv("TIGON_TEST_GPU")
    (out / "predictions.json").unlink()
    sweep(write_sweep(grid={"train.batch_size": [1, 2, 3, 4, 5, 6]}), memory_limit="24GiB", out=out, draw=True)
    again = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [row["predicted_allocated_bytes"] for row in again["points"]] == told, "drawn elsewhere, it differs"


def test_killed_sweep_leaves_no_process_and_keeps_finished_points(write_sweep, fake_workers, here):
    """SIGKILL while the second point runs: the first one's record is whole, and the worker ends by itself."""
    path = write_sweep(variants={"v": {"train.seed": 6}})
    code = (
        "import sys; from pathlib import Path; from tigon.sweep import processes, run; "
        f"processes.WORKER = ({str(here / 'fake_worker.py')!r},); run.sweep(Path({str(path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while fake_workers() != ["4 6", "8 6"] and process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert fake_workers() == ["4 6", "8 6"]
    worker = int((here / "started.txt").read_text().splitlines()[1].split()[2])
    assert _ends(worker), "the worker lives on"
    assert list(folder.SweepFolder(here / "runs/sweeps/s").path.glob("points/*size=4*.json"))
    out = sweep(path, only="size=4")
    assert len(fake_workers()) == 2, "measured again"
    assert rows(out)["v batch_size=4"]["status"] == "ok"


def test_sigterm_writes_the_report_and_exits_with_143(write_sweep, fake_workers, tigon, here):
    """SIGTERM to this process while the second point runs."""
    import threading

    path = write_sweep(variants={"v": {"train.seed": 6}})

    def terminate() -> None:
        while fake_workers() != ["4 6", "8 6"]:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    code, out, _ = tigon("sweep", path)
    thread.join()
    assert code == 143 and "the finished measurements are kept" in out
    found = rows(here / "runs/sweeps/s")
    assert [row["status"] for row in found.values()] == ["ok", failures.NOT_MEASURED]
    assert (here / "runs/sweeps/s/report.html").exists()


def _ends(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_second_sweep_into_a_locked_folder_is_refused(write_sweep, fake_workers, here, monkeypatch, tigon):
    from tigon.sweep import folder as folders
    from tigon.trainer.folder import folder_lock

    monkeypatch.setattr(folder_lock, "LOCK_PATIENCE", 0)
    path = write_sweep()
    folders.find(here / "out", "s").make()
    with folders.find(here / "out", "s").alone():
        for flags in ((), ("--draw",)):
            code, _, err = tigon("sweep", path, "--out", here / "out", *flags)
            assert code == 2 and "another process is measuring into this sweep folder" in err
    assert not fake_workers()


# --- what a hand or a full disk has done to the folder --------------------------------------------------------------

DAMAGE = {
    "a list": ("[]", "it is not a mapping"),
    "no figures": (lambda record: record.update(measured=None), "measured is not a mapping"),
    "a time in words": (lambda record: record["measured"].update(step_s=["1 s"] * 4), "measured.step_s.0 is '1 s'"),
    "too few steps": (lambda record: record["measured"]["step_s"].pop(), "measured.step_s has 3 steps"),
    "no machine": (lambda record: record.pop("environment"), "environment is missing"),
    "another schema": (lambda record: record.update(schema=0), "schema is 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_record_is_reported_and_its_point_measured_again(name, write_sweep, fake_workers, capsys):
    path = write_sweep()
    out = sweep(path)
    file = next((out / folder.POINTS).glob("*size=4*.json"))
    change, why = DAMAGE[name]
    record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(change, str):
        change(record)
    file.write_text(change if isinstance(change, str) else json.dumps(record), encoding="utf-8")
    (out / "predictions.json").write_text("[]", encoding="utf-8")
    (out / "results.json").write_text("[]", encoding="utf-8")
    capsys.readouterr()
    sweep(path)
    assert f"damaged  {file}: not a record of a point: {why}" in capsys.readouterr().out
    assert fake_workers() == ["4 1", "8 1", "4 1"]
    assert rows(out)["all batch_size=4"]["status"] == "ok"


def test_retry_measures_only_the_failed_repeat_again(write_sweep, fake_workers):
    """A point with one repeat that ended well and one that did not, as a host that was busy for a while leaves it."""
    path = write_sweep(grid={}, repeats=2)
    out = sweep(path)
    file = next((out / folder.POINTS).glob("*.1.json"))
    record = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(record | {"status": "failed", "detail": "x", "measured": None}), encoding="utf-8")
    sweep(path)
    assert len(fake_workers()) == 2, "measured again unasked"
    assert rows(out)["all"]["status"] == "failed" and rows(out)["all"]["detail"] == "repeat 2 of 2: x"
    file.with_name(file.name.replace(".1.", ".0.")).write_text(file.read_text().replace('"repeat": 1', '"repeat": 0'))
    sweep(path, retry=True)
    assert len(fake_workers()) == 4, "both have failed now"
    file.write_text(json.dumps(record | {"status": "failed", "detail": "x", "measured": None}), encoding="utf-8")
    sweep(path, retry=True)
    assert len(fake_workers()) == 5 and rows(out)["all"]["status"] == "ok"


def test_repeats_of_a_failed_point_are_skipped(write_sweep, fake_workers, capsys):
    sweep(write_sweep(variants={"bad": {"train.seed": 5}}, grid={}, repeats=2))
    assert fake_workers() == ["8 5"]
    assert "[2/2] bad: skipped, because another repeat failed" in capsys.readouterr().out


def test_results_are_written_before_the_charts(write_sweep, fake_workers, tmp_path, monkeypatch):
    """A sweep that is being ended may not have the seconds that matplotlib takes."""
    monkeypatch.setattr("tigon.sweep.report.write", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sweep(write_sweep(grid={"train.batch_size": [4]}), out=tmp_path / "out")
    assert rows(tmp_path / "out")["all batch_size=4"]["status"] == "ok"
