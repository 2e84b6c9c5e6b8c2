"""The comparison with Unsloth, Liger and PEFT: which rows agree, what a record keeps, and where a run resumes."""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.duel import __main__ as duel
from benchmarks.duel import agreement, processes, turns
from benchmarks.duel.entries import ENTRIES, ORDER, TASKS, Row, row_of

LOSSES = [12.5 - 0.1 * step for step in range(11)]
ROW = Row("qlora", "hf", 4, 2048)


def line(entry: str = "hf", losses: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "task": "qlora", "entry": entry, "size": "4x2048", "losses": losses or LOSSES, "tokens_per_s": 1000,
        "peak_gib": 8.0, "trained_parameters": 100, "trained_dtypes": ["float32"], "row_s": 1.0, **fields,
    }  # fmt: skip


def options(path: Path, *rows: str, budget: float = 540, again: bool = False) -> argparse.Namespace:
    return duel.options().parse_args([*rows, "--json", str(path), "--budget", str(budget)] + ["--again"] * again)


def test_rows_that_round_otherwise_agree() -> None:
    assert agreement.disagreements(line(losses=[loss + 4e-3 for loss in LOSSES]), line()) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (line(losses=[*LOSSES[:5], LOSSES[5] + 0.05, *LOSSES[6:]]), "the loss of step 6 is 12.05"),
        (line(losses=[12.5 - 0.085 * step for step in range(11)]), "the loss falls by 0.8500 instead of 1.0000"),
        (line(losses=[float("nan")] * 11), "the loss of step 1 is nan"),
        (line(losses=LOSSES[:-1]), "10 losses instead of 11"),
        (line(trained_parameters=99), "trained weights: 99 instead of 100"),
        (line(trained_dtypes=["bfloat16"]), "dtypes of trained weights: ['bfloat16'] instead of ['float32']"),
    ],
)
def test_row_that_trains_something_else_is_refused_with_the_reason(other: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in agreement.disagreements(other, line()))
    agreed, refused = agreement.judged([line(), {**other, "entry": "liger"}])
    assert [one["entry"] for one in agreed] == ["hf"] and [one["entry"] for one in refused] == ["liger"]


def test_row_with_norms_in_fp32_beside_bf16_weights_counts() -> None:
    reference = line(trained_dtypes=["bfloat16"])
    norms = line("unsloth", trained_dtypes=["bfloat16", "float32"])
    assert agreement.wider(norms, reference) and agreement.disagreements(norms, reference) == []
    assert agreement.disagreements(line("unsloth", trained_dtypes=["float32"]), reference)


def test_run_that_learns_slowly_is_refused_although_each_loss_is_close() -> None:
    small = [12.5 - 0.0009 * step for step in range(11)]
    slow = [12.5 - 0.0005 * step for step in range(11)]
    assert agreement.disagreements(line(losses=slow), line(losses=small)) == [
        "the loss falls by 0.0050 instead of 0.0090"
    ]


def test_rows_are_judged_again_when_the_row_of_hugging_face_comes() -> None:
    wrong = line("unsloth", losses=[loss + 1 for loss in LOSSES])
    record = duel.kept(duel.load(Path("none.json")), ROW, wrong)
    record = duel.kept(record, Row("qlora", "liger", 4, 2048), line("liger"))
    assert [one["entry"] for one in record["refused"]] == ["liger"]
    record = duel.kept(record, ROW, line())
    assert [one["entry"] for one in record["measurements"]] == ["liger", "hf"]
    assert [one["entry"] for one in record["refused"]] == ["unsloth"]


def test_a_row_of_another_task_or_size_is_not_compared() -> None:
    agreed, refused = agreement.judged([line(), {**line(losses=[1.0] * 11), "size": "1x16384"}])
    assert len(agreed) == 2 and not refused


class Process:
    """A row's process that does nothing. It ends when it had its turn, or at once if its row fails."""

    started: ClassVar[list[Process]] = []
    paused_while_timed: ClassVar[list[set[str]]] = []

    def __init__(self, row: Row, slot: int, *_: Any) -> None:
        self.row, self.slot = row, slot
        self.ready, self.paused, self.over_limit = row.entry != "liger", False, False
        self.timed = self.ended = not self.ready
        self.started.append(self)

    def go(self) -> None:
        assert not self.paused
        self.paused_while_timed.append({one.row.entry for one in self.started if one.paused})
        self.timed = self.ended = True

    def stop(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def kill(self) -> None:
        self.ended = True

    def answer(self, over_limit: bool) -> tuple[Row, dict[str, Any], dict[str, Any] | None]:
        base = {"task": self.row.task, "entry": self.row.entry, "size": self.row.size}
        if over_limit or self.row.entry == "liger":
            return self.row, {**base, "error": processes.OVER_LIMIT if over_limit else "exit 1", "row_s": 1.0}, None
        return self.row, line(self.row.entry), {"device": "card", "versions": {"torch": "2"}}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that a run has started, without any."""
    monkeypatch.setattr(Process, "started", [])
    monkeypatch.setattr(Process, "paused_while_timed", [])
    monkeypatch.setattr(processes, "Running", Process)
    monkeypatch.setattr(processes, "DRAIN_S", 0.0)
    monkeypatch.setattr(duel, "make_checkpoint", lambda *_: None)
    return Process.started


def test_a_run_resumes_after_the_rows_that_the_record_has(tmp_path: Path, started: list[Process]) -> None:
    path, rows = tmp_path / "a" / "steps.json", ("qlora:hf:4x2048", "qlora:liger:4x2048", "qlora:tigon-full:4x2048")
    duel.drive(options(path, *rows[:2]))
    duel.drive(options(path, *rows))
    assert [str(one.row) for one in started] == [*rows]
    record = duel.load(path)
    assert [one["entry"] for one in record["measurements"]] == ["hf", "tigon-full"]
    assert [one["entry"] for one in record["failed"]] == ["liger"] and record["environment"]["device"] == "card"
    duel.drive(options(path, rows[0], again=True))
    assert [str(one.row) for one in started] == [*rows, rows[0]] and len(duel.load(path)["measurements"]) == 2


def test_a_row_that_the_budget_ends_is_measured_by_the_next_run(
    tmp_path: Path, started: list[Process], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.json"
    duel.drive(options(path, str(ROW), budget=processes.LEAST_S["hf"] - 1))
    assert not path.exists() and not started and "the next is qlora:hf:4x2048" in capsys.readouterr().out
    duel.drive(options(path, str(ROW), budget=1000))
    assert [one["entry"] for one in duel.load(path)["measurements"]] == ["hf"]


def test_a_row_that_takes_too_long_is_ended_and_said_to_have_failed(
    tmp_path: Path, started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Process, *arguments: Any) -> None:
        Process.__init__(self, *arguments)
        self.ready, self.over_limit = False, True

    monkeypatch.setattr(processes, "Running", type("Slow", (Process,), {"__init__": slow}))
    duel.drive(options(tmp_path / "steps.json", str(ROW), budget=1000))
    assert [one["error"] for one in duel.load(tmp_path / "steps.json")["failed"]] == [processes.OVER_LIMIT]


def test_rows_that_prepare_beside_each_other_are_stopped_while_one_is_timed(started: list[Process]) -> None:
    rows = [Row("qlora", entry, 4, 2048) for entry in ("hf", "liger", "tigon-full", "unsloth", "tigon-offload")]
    found = [row.entry for row, _, _ in processes.answers(rows, 1000, beside=3)]
    assert sorted(found) == sorted(row.entry for row in rows) and not any(one.paused for one in started)
    # "liger" ends without a turn, so another row takes its place.
    assert Process.paused_while_timed[0] == {"tigon-full"} and {one.slot for one in started} == {0, 1, 2}
    assert all(len(paused) <= 2 for paused in Process.paused_while_timed)
    alone = list(processes.answers(rows[:1], 1000))
    assert alone[0][1] == line("hf") and Process.paused_while_timed[-1] == set()


def test_a_stopped_row_does_nothing_until_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = tmp_path / "ticks"
    script = f"import time\nwhile True:\n    open({str(ticks)!r}, 'a').write('.')\n    time.sleep(0.01)"
    whole = subprocess.Popen

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return whole([command[0], "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    running = processes.Running(ROW, 0, False, None)
    try:
        _wait_for(ticks.exists)
        running.stop()
        time.sleep(0.1)
        before, active_s = ticks.stat().st_size, running.active_s
        time.sleep(0.3)
        assert ticks.stat().st_size == before and running.active_s - active_s < 0.1
        running.resume()
        _wait_for(lambda: ticks.stat().st_size > before)
        assert not running.ended
    finally:
        running.kill()
    assert running.ended and running.answer(over_limit=True)[1]["error"] == processes.OVER_LIMIT


def _wait_for(met: Callable[[], bool], seconds: float = 20) -> None:
    end_s = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_row_waits_for_its_turn_and_says_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns.wait()  # without a driver it waits for nobody
    monkeypatch.setenv(turns.VARIABLE, str(tmp_path))
    thread = threading.Thread(target=turns.wait)
    thread.start()
    _wait_for((tmp_path / turns.READY).exists)
    assert thread.is_alive()
    (tmp_path / turns.GO).touch()
    thread.join(20)
    assert not thread.is_alive() and not (tmp_path / turns.DONE).exists()
    turns.end()
    assert (tmp_path / turns.DONE).exists()


def test_a_record_of_another_card_is_not_added_to() -> None:
    here = {"device": "card", "versions": {"torch": "2"}}
    assert duel.same_environment(None, here) is duel.same_environment(here, here)
    with pytest.raises(SystemExit, match="the record has device card, and here is other"):
        duel.same_environment(here, {**here, "device": "other"})


def test_every_row_is_written_and_read_and_listed_once() -> None:
    assert [row_of(str(row)) for row in ORDER] == [*ORDER] and len({*ORDER}) == len(ORDER)
    assert {row.entry for row in ORDER} == {*ENTRIES} and {row.task for row in ORDER} == {*TASKS}
    for wrong, words in (("qlora:hf", "is not a row"), ("qlora:other:4x2048", "'other' is not known")):
        with pytest.raises(ValueError, match=words):
            row_of(wrong)


def test_tigon_and_peft_train_the_same_in_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from benchmarks.duel import inputs, libraries

    monkeypatch.setenv("DUEL_CHECKPOINTS", str(tmp_path))
    lines = []
    for task in ("lora", "full"):
        inputs.make_checkpoint(TASKS[task].model, tiny=True)
        lines += [libraries.run(Row(task, entry, 2, 64), tiny=True)["line"] for entry in ("hf", "tigon-offload")]
    agreed, refused = agreement.judged(lines)
    assert len(agreed) == 4 and not refused
    assert agreed[0]["adapters_filled"] == 2 * 2 * len(inputs.TARGETS) and agreed[2]["adapters_filled"] == 0
    assert agreed[1]["patched"]["lora_linear"] > 0


@pytest.mark.filterwarnings("ignore")
def test_grpo_of_tigon_and_trl_train_on_the_same_completions(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from benchmarks.duel import grpo

    path = tmp_path / "record.json"
    for library in ("trl", "tigon"):
        run = grpo.Run(library, tiny=True)
        grpo.keep({**run.updates(1), "whole_steps": run.whole_steps()}, path)
    measured = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    lines = {one["library"]: one for one in measured}
    for ours, theirs in zip(lines["tigon"]["logged"], lines["trl"]["logged"], strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
    assert "shared prefix: 1" in lines["tigon"]["fused"] and lines["tigon"]["update_s"] > 0
    assert lines["tigon"]["whole_steps"]["step"]["completions_s"] > 0
