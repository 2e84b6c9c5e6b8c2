"""Kernels are tried before the first point, once for all of a kind; what is wrong is left out, recorded and said."""

from __future__ import annotations

import json

import pytest

from tigon.sweep import failures
from tigon.sweep.run import sweep
from tigon.sweep.self_test import Kind, try_ops
from tigon.sweep.worker import worker
from tigon.trainer.guards import self_test
from wrong_ops import WRONG

WHY = "output 0 of case small is off by 3 times what rounding allows"


def test_probe_finds_every_wrong_op_before_the_points(wrong, tmp_path):
    """As the process that looks at the machine is told to, of a tigon variant beside an unpatched one."""
    kinds = [("none", "fallback", "fp32", "cpu"), ("tigon", "fallback", "fp32", "cpu")]
    found = worker._probe({"probe": str(tmp_path / "probe.json"), "kinds": kinds})
    unpatched, patched = found["self_tests"]
    assert unpatched == {"dtype": "fp32", "wrong_ops": {}, "refused": ""}
    assert patched["dtype"] == "fp32" and set(patched["wrong_ops"]) == WRONG
    assert all("times what rounding allows" in why for why in patched["wrong_ops"].values())
    assert sorted(wrong) == sorted((op, "fp32") for op in self_test.FLAGS), "an op is not tried, or tried twice"
    assert found["environment"]["device"]


def test_strict_point_is_refused_for_a_wrong_op(wrong):
    found = try_ops(Kind("no-flce", "strict", "fp32", "cpu"))
    assert (
        found["refused"].startswith("kernels that give wrong results on this device: swiglu: ")
        and not found["wrong_ops"]
    )


def test_point_that_this_machine_refuses_is_not_self_tested(wrong, monkeypatch):
    monkeypatch.setattr("tigon.trainer.guards.preflight.gpu_present", lambda: False)
    assert try_ops(Kind("tigon", "fallback", "bf16", "cuda")) == {"dtype": "", "wrong_ops": {}, "refused": ""}
    assert not wrong


@pytest.fixture
def both(write_sweep):
    """Unpatched beside patched, with two batch sizes of each."""
    return write_sweep(variants={"plain": {"model.kernels": "none"}, "fused": {"model.kernels": "tigon"}})


def found_wrong(monkeypatch, **answer):
    monkeypatch.setenv("TIGON_TEST_WRONG", json.dumps(answer))


def test_wrong_op_is_left_out_of_its_points_and_recorded(both, fake_workers, monkeypatch, capsys, here):
    found_wrong(monkeypatch, wrong_ops={"rope": WHY, "swiglu": "CompilationError: no"})
    out = sweep(both)
    told = [line.split()[3:] for line in (here / "started.txt").read_text(encoding="utf-8").splitlines()]
    assert told == [[], ["rope,swiglu"]] * 2, "what the points are told to leave out"
    assert (
        f"warning  wrong results on this device: rope in bf16 ({WHY}); the model's own code is used"
        in capsys.readouterr().out
    )
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert found["environment"]["wrong_ops"] == {"bf16": {"rope": WHY, "swiglu": "CompilationError: no"}}
    assert [set(row["wrong_ops"]) for row in found["points"]] == [set(), {"rope", "swiglu"}] * 2
    for name in ("report.md", "report.html"):
        page = (out / name).read_text(encoding="utf-8").replace("\\", "")
        assert f"rope in bf16 ({WHY}); swiglu in bf16 (CompilationError: no)" in page
        assert "The points of fused used the model" in page
    found_wrong(monkeypatch)
    sweep(both)  # nothing is left to measure: nothing is tried, and the report still says it
    assert "The points of fused used the model" in (out / "report.html").read_text(encoding="utf-8")


def test_report_of_right_kernels_mentions_no_wrong_results(both, fake_workers, capsys):
    out = sweep(both)
    assert "wrong results" not in (out / "report.html").read_text(encoding="utf-8") + capsys.readouterr().out
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert found["environment"]["wrong_ops"] == {} and found["points"][0]["status"] == failures.OK


def test_probe_of_a_kernel_that_never_ends_is_stopped(both, fake_workers, monkeypatch, tigon):
    monkeypatch.setattr("tigon.sweep.one_point.PROBE_TIMEOUT_S", 0.0)
    outcome = tigon("sweep", both)
    assert "its kernels took longer than 0 s" in outcome.error_line() and "probe.log" in outcome.err
    assert not fake_workers()
