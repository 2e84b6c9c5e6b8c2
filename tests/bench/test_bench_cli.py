"""The command as typed: record, table, charts, refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys

import pytest
import torch

pytest.importorskip("typer")

from bench_records import run as invented

from benchmarks.__main__ import main as benchmarks
from benchmarks.kernels.table import provenance
from benchmarks.pages import bench as bench_page
from benchmarks.pages.bench import load
from tigon.bench import record, timing
from tigon.cli import app
from tigon.ops import OPS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the CPU")


@functools.cache
def ceilings_once(device: torch.device, repetitions: int) -> dict[str, float]:
    """They are measured in a second, and for all tests they are those of one machine."""
    return MEASURED_CEILINGS(device, repetitions)


@pytest.fixture
def bench(monkeypatch, capsys):
    monkeypatch.setattr(timing, "ceilings", ceilings_once)

    def type_in(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tigon", "bench", *map(str, arguments)])
        code = 0
        try:
            app.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return type_in


MEASURED_CEILINGS = timing.ceilings
QUICK = ("kernels", "--impl", "tigon", "--impl", "eager", "--repetitions", "2")


def test_record_has_the_chosen_rows_and_their_origin(bench, tmp_path):
    path = tmp_path / "new" / "x.json"
    code, out, _ = bench(*QUICK, "--op", "swiglu", "--op", "rms_norm", "--json", path)
    assert code == 0
    run = load(path)
    assert [row.op for row in run.rows] == ["rms_norm", "swiglu"] and run.suite == "small"
    assert run.environment["versions"]["torch"] == torch.__version__ and run.environment["date"]
    assert run.ceilings["copy_gb_per_s"] > 0 and run.seconds > 0 and not run.not_run
    assert "rms_norm 64x128" in out and str(path) in out
    assert not list(path.parent.glob("*.part"))


def test_report_draws_the_charts_and_updates_the_page_from_a_record(bench, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, plots = tmp_path / "card" / "x.json", tmp_path / "plots"
    bench(*QUICK, "--op", "rms_norm", "--shape", "8x16", "--shape", "8x32", "--shape", "8x64", "--json", path)
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- record card/x -->\nold\n<!-- end -->\nafter\n")
    benchmarks(["report", str(path), "--plot", str(plots)])
    bench_page.main([str(path), "--into", str(document)])
    assert "| rms_norm 8x32 |" in capsys.readouterr().out
    assert {p.name for p in plots.iterdir()} == {"table.md", "speed-rms_norm.svg", "memory-rms_norm.svg"}
    page = document.read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert "![speed-rms_norm](img/benchmarks/card/x/speed-rms_norm.svg)" in page
    assert (tmp_path / "img/benchmarks/card/x/speed-rms_norm.svg").exists()


def test_refused_op_fails_the_command_after_the_other_rows(bench, tmp_path, monkeypatch):
    """Everything else is measured and written; then the command fails."""
    op = OPS["swiglu"]
    monkeypatch.setitem(OPS, "swiglu", dataclasses.replace(op, call=lambda gate, up: op.call(gate, up) * math.pi))
    path = tmp_path / "x.json"
    code, _, err = bench(*QUICK, "--op", "swiglu", "--op", "geglu", "--json", path)
    assert code == 2
    assert err.startswith("tigon: tigon's error exceeds the limit, so it was not timed on these rows: tigon on swiglu")
    assert len(err.splitlines()) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [m["status"] for row in rows for m in row["measurements"]] == ["refused", "ok", "ok", "ok"]


def test_rows_left_out_by_the_time_limit_are_printed_and_recorded(bench, tmp_path):
    path = tmp_path / "x.json"
    code, out, _ = bench(*QUICK, "--op", "rms_norm", "--op", "geglu", "--time-limit", 0, "--json", path)
    assert code == 0 and "not measured: rms_norm 64x128 (time limit)" in out
    assert load(path).not_run == ["rms_norm 64x128 (time limit)", "geglu 64x256 (time limit)"] and not load(path).rows


def test_resumed_run_measures_only_missing_rows_with_the_same_versions(bench, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    monkeypatch.setenv("TIGON_COMMIT", "first")
    assert bench(*QUICK, "--op", "rms_norm", "--json", path)[0] == 0
    (kept,) = load(path).rows
    assert all(m.prepare_s is not None for m in kept.measurements if m.status == "ok")
    monkeypatch.setenv("TIGON_COMMIT", "second")
    code, _, _ = bench(*QUICK, "--op", "rms_norm", "--op", "geglu", "--json", path, "--resume")
    run = load(path)
    assert code == 0 and run.rows[0] == kept
    assert [(row.op, row.tigon_commit) for row in run.rows] == [("rms_norm", "first"), ("geglu", "second")]
    assert f"commit first, {kept.date} and second, " in provenance(run)
    assert bench(*QUICK, "--op", "geglu", "--json", path, "--resume")[0] == 0 and load(path).rows == run.rows
    one = ("kernels", "--impl", "torch", "--repetitions", "2")
    assert bench(*one, "--op", "rms_norm", "--json", path, "--resume")[0] == 0
    again = load(path)
    assert [row.op for row in again.rows] == ["geglu", "rms_norm"], "a row is lost, or there twice"
    assert {m.impl for m in again.rows[1].measurements} == {"tigon", "eager", "torch"}
    code, _, err = bench(*QUICK, "--op", "rms_norm", "--dtype", "fp16", "--json", path, "--resume")
    assert code == 2 and "has dtype fp32, this run fp16" in err
    run = again
    monkeypatch.setattr(record, "_PACKAGES", ("triton",))
    code, _, err = bench(*QUICK, "--op", "rms_norm", "--json", path, "--resume")
    assert code == 2 and "has transformers" in err and load(path) == run
    code, _, err = bench(*QUICK, "--resume")
    assert code == 2 and "--resume requires --json FILE" in err


def test_row_whose_inputs_do_not_fit_is_skipped_and_the_run_goes_on(bench, tmp_path, monkeypatch):
    op = OPS["rms_norm"]

    def too_large(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setitem(OPS, "rms_norm", dataclasses.replace(op, make=too_large))
    path = tmp_path / "x.json"
    code, out, _ = bench(*QUICK, "--op", "rms_norm", "--op", "geglu", "--json", path)
    assert code == 0 and "rms_norm 64x128 (it does not fit the device)" in out
    assert [row.op for row in load(path).rows] == ["geglu"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kernels", "--suite", "huge"), "usual, small"),
        (("kernels", "--op", "relu"), "rms_norm"),
        (("kernels", "--impl", "flash"), "tigon, eager"),
        (("kernels", "--without", "flash"), "tigon, eager"),
        (("kernels", "--dtype", "fp8"), "bf16"),
        (("kernels", "--repetitions", "0"), "at least 1"),
        (("kernels", "--shape", "8x8"), "exactly one --op"),
    ],
)
def test_wrong_input_is_refused_in_one_line(bench, arguments, words):
    code, _, err = bench(*arguments)
    assert code == 2 and len(err.splitlines()) == 1 and words in err


@pytest.mark.parametrize(("path", "words"), [("nowhere.json", "cannot be read"), (__file__, "not a record")])
def test_report_of_another_file_is_refused(path, words, capsys):
    with pytest.raises(SystemExit):
        benchmarks(["report", path])
    assert words in capsys.readouterr().err


def test_unwritable_place_is_refused_before_measuring(bench, tmp_path):
    (tmp_path / "file").write_text("kept")
    code, out, err = bench(*QUICK, "--op", "rms_norm", "--json", tmp_path / "file" / "x.json")
    assert code == 2 and "choose another place" in err and "rms_norm 64x128" not in out
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("text", ["notes, not a record", "[]", '{"schema": 1, "rows": "random"}', '{"schema": 0}'])
@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_file_that_is_no_record_is_never_overwritten(flags, text, bench, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    code, out, err = bench(*QUICK, "--op", "rms_norm", "--json", path, *flags)
    assert code == 2 and len(err.splitlines()) == 1 and "would write over another file" in err and str(path) in err
    assert path.read_text() == text and "rms_norm" not in out


NOTHING = {
    "skipped": (("--op", "rms_norm", "--impl", "liger"), "liger on rms_norm 64x128: not installed: "),
    "not an implementation of the op": (("--op", "geglu", "--impl", "torch"), "geglu 64x256: geglu has no torch"),
    "too large": (("--op", "swiglu", "--impl", "tigon"), "swiglu 64x256 (it does not fit the device)"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_run_without_a_measurement_fails_and_keeps_the_old_record(name, bench, tmp_path, monkeypatch):
    arguments, reason = NOTHING[name]

    def too_large(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(OPS, "swiglu", dataclasses.replace(OPS["swiglu"], make=too_large))
    path = tmp_path / "x.json"
    record.save(dataclasses.asdict(invented()), path)
    before = path.read_text()
    code, _, err = bench("kernels", *arguments, "--repetitions", "2", "--json", path)
    assert code == 2 and len(err.splitlines()) == 1
    assert err.startswith("tigon: nothing was measured, and nothing is written: ") and reason in err
    assert path.read_text() == before and [file.name for file in tmp_path.iterdir()] == ["x.json"]
