"""The committed measurements against what is predicted now, and the document made of both.

The limits stand in `benchmarks.pages.planner_accuracy.QUANTITIES`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.pages import planner_accuracy
from benchmarks.pages.planner_accuracy import QUANTITIES, Comparison, Measurements, Quantity
from tigon.errors import UsageError
from tigon.planner.render.json_names import settings_mapping
from tigon.techniques.keys.settings import Settings

ROOT = Path(__file__).parent.parent.parent
MEASURED = ROOT / planner_accuracy.MEASUREMENTS
DOCUMENT = ROOT / "docs" / "planner-accuracy.md"
LEAST_CASES = 40
MAX_LEFT = 1 << 16
"""Bytes that a case may find: bitsandbytes keeps its tables of levels for the process, 1 KiB each."""
SAME, SAME_WITH_OTHERS = 1e-3, 0.05
"""How far a prediction may be from the committed one before the document is stale, relative: with the versions it was
made with, and with others. Eager attention of transformers 5.23 reserves 3.4 % less than that of 5.17."""

committed = pytest.mark.skipif(
    not MEASURED.exists(),
    reason=f"no {planner_accuracy.MEASUREMENTS} to compare with",
)


@pytest.fixture(scope="module")
def measurements() -> Measurements:
    return planner_accuracy.load(MEASURED)


def facts_of(case: dict[str, Any]) -> set[tuple[str, str]]:
    """The properties that distinguish a case: its model and each of its choices."""
    parts = {"model": case["model"], "masked": case["masked"], "evaluated": case["evaluated"], **case["choices"]}
    return {(name, str(value)) for name, value in parts.items()}


def covering(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As few cases as have every model and every choice that any has; a case takes most of a second to predict."""
    left, seen, chosen = list(cases), set(), []
    while left:
        best = max(left, key=lambda case: len(facts_of(case) - seen))
        if facts_of(best) <= seen:
            break
        chosen.append(best)
        seen |= facts_of(best)
        left.remove(best)
    return chosen


@pytest.fixture(scope="module")
def before(measurements: Measurements) -> list[Comparison]:
    """Every case as it was predicted for the document."""
    return planner_accuracy.load_predictions(measurements.measured, planner_accuracy.predictions_path(MEASURED))


@pytest.fixture(scope="module")
def anew(measurements: Measurements) -> dict[str, Comparison]:
    """Cases that cover all of them, by id, predicted now."""
    some = dataclasses.replace(measurements, measured=tuple(covering(measurements.measured)))
    return {one.id: one for one in planner_accuracy.compare(some)}


@committed
@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_every_prediction_is_within_its_limit_of_the_measurement(
    quantity: Quantity, before: list[Comparison], anew: dict[str, Comparison]
) -> None:
    """Every case counts; cases that are not predicted anew use the predictions of the document."""
    said = planner_accuracy.beyond([anew.get(one.id, one) for one in before], quantity)
    assert not said, "\n" + "\n".join(said)


@committed
def test_measurements_cover_every_choice_of_a_plan(measurements: Measurements) -> None:
    assert len(measurements.measured) >= LEAST_CASES, [case["id"] for case in measurements.others]
    wanted = {
        "precision": {"amp-bf16", "bf16", "amp-fp16", "fp32"},
        "checkpointing": {"none", "full", "every-2", "selective", "offload"},
        "kernels": {"none", "no-flce", "tigon", "liger"},
        "attention": {"sdpa", "eager"},
    }
    for name, words in wanted.items():
        missing = words - {case["choices"][name] for case in measurements.measured}
        assert not missing, f"{name}: {missing} not measured"
    assert any(case["choices"]["lora_rank"] for case in measurements.measured)
    assert any(case["choices"]["accumulate"] > 1 for case in measurements.measured)
    assert any(case["masked"] for case in measurements.measured)
    assert any(case["evaluated"] for case in measurements.measured)


@committed
def test_every_case_began_without_memory_of_another(measurements: Measurements) -> None:
    left = {case["id"]: case["at_start_bytes"] for case in measurements.measured if case["at_start_bytes"] > MAX_LEFT}
    assert not left


@committed
def test_committed_predictions_are_current(before: list[Comparison], anew: dict[str, Comparison]) -> None:
    assert 10 < len(anew) < len(before)
    path = planner_accuracy.predictions_path(MEASURED)
    allowed = SAME if planner_accuracy.predicted_with(path) == planner_accuracy.versions() else SAME_WITH_OTHERS
    stale = [
        f"{old.id}: {quantity.name} was {old.predicted[quantity.name]:g}, is {new.predicted[quantity.name]:g}"
        for old, new in ((old, anew[old.id]) for old in before if old.id in anew)
        for quantity in QUANTITIES
        if abs(old.predicted[quantity.name] / new.predicted[quantity.name] - 1) > allowed
    ]
    assert not stale, "\n".join([planner_accuracy.REMAKE, *stale])


@committed
def test_table_in_the_document_is_generated_from_the_measurements(
    measurements: Measurements, before: list[Comparison]
) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    inside = text.partition(planner_accuracy.BEGIN + "\n")[2].partition("\n" + planner_accuracy.END)[0]
    assert inside == planner_accuracy.section(measurements, before), planner_accuracy.REMAKE
    drawn = (DOCUMENT.parent / planner_accuracy.CHART).read_text(encoding="utf-8")
    assert drawn.startswith("<svg")


# --- without measurements: figures made up to have known errors ------------------------------------------------------


def _comparison(name: str, model: str = "llama-3.2-1b", **errors: float) -> Comparison:
    """A case that measured 10 GiB, 10 GiB and 1 s."""
    case = {"id": name, "model": model, "allocated_bytes": 10 << 30, "reserved_bytes": 10 << 30, "step_s": 1.0}
    case |= {"tigon_commit": "abc", "date": "2000-01-01", "status": "ok"}
    predicted = {q.name: case[q.measured] * (1 + errors.get(q.name.replace(" ", "_"), 0.0)) for q in QUANTITIES}
    return Comparison(case=case, predicted=predicted, phases={})


ALLOCATED, RESERVED, TIME = QUANTITIES


def test_error_beyond_a_limit_is_reported() -> None:
    some = [_comparison("a", allocated=0.06, step_time=-0.24), _comparison("b"), _comparison("c", allocated=-0.07)]
    said = planner_accuracy.beyond(some, ALLOCATED)
    assert [line.split(":")[0] for line in said[:2]] == ["allocated of c", "allocated of a"]
    assert "-7.0%" in said[0] and "limit 5%" in said[0]
    assert "median error is 6.00%" in said[2]
    assert not planner_accuracy.beyond(some, RESERVED) and not planner_accuracy.beyond(some, TIME)


def test_case_that_did_not_run_is_listed_with_its_reason() -> None:
    others = ({"id": "too large", "status": "out of memory", "detail": "Tried to allocate 3 GiB"},)
    one = _comparison("a", allocated=0.01)
    environment = {"device": "NVIDIA H200", "driver": "1", "versions": {"torch": "2", "quack": None}}
    found = Measurements(environment=environment, memory_bytes=1 << 37, measured=(one.case,), others=others)
    text = planner_accuracy.section(found, [one])
    assert "- too large: out of memory. Tried to allocate 3 GiB" in text
    assert "| a | 10.10 | 10.00 | +1.0% | 10.00 | 10.00 | +0.0% | 1,000 | 1,000 | +0.0% |" in text
    assert "quack" not in text


def test_chart_shows_every_point() -> None:
    some = [_comparison(str(n), model, allocated=n / 100) for n in range(4) for model in ("x", "y", "z")]
    drawn = planner_accuracy.chart(some)
    assert len(re.findall(r"<use ", drawn)) >= len(some) * len(QUANTITIES)
    assert all(word in drawn for word in ("allocated, GiB", "within 25%", ">x<", ">y<", ">z<"))


def _written(folder: Path, **changes: Any) -> Path:
    case = {
        "id": "c", "model": "tigon-demo", "config": {"num_hidden_layers": 2}, "batch": 2, "seq": 128, "masked": False,
        "evaluated": False, "choices": settings_mapping(Settings.of({"train.checkpointing": "full"})),
        "status": "ok", "detail": "",
        "phases": {}, "tigon_commit": "abc", "date": "2000-01-01", "allocated_bytes": 10**8, "reserved_bytes": 10**8,
        "step_s": 0.1,
    }  # fmt: skip
    whole = {"environment": {"device": "NVIDIA H200", "driver": "1", "versions": {}}, "tiny": False,
             "memory_bytes": 1 << 37, "cases": [case]}  # fmt: skip
    path = folder / "plans.json"
    path.write_text(json.dumps({name: value for name, value in (whole | changes).items() if value is not None}))
    return path


def test_case_is_predicted_with_the_request_that_was_measured(tmp_path: Path) -> None:
    found = planner_accuracy.load(_written(tmp_path))
    request = planner_accuracy.request_of(found.measured[0])
    assert request.config.num_hidden_layers == 2 and request.config.hidden_size == 128
    assert request.settings == Settings.of({"train.checkpointing": "full"})
    assert (request.batch, request.seq, request.masked, request.evaluated) == (2, 128, False, False)


def test_command_writes_the_document_only_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, document = _written(tmp_path), tmp_path / "planner.md"
    monkeypatch.setattr(sys, "argv", ["accuracy", "--measurements", str(path), "--into", str(document)])

    document.write_text("no markers\n")
    with pytest.raises(SystemExit) as refused:
        planner_accuracy.main()
    assert refused.value.code == 2 and planner_accuracy.BEGIN in capsys.readouterr().err
    assert document.read_text() == "no markers\n" and not (tmp_path / "img").exists()
    assert not planner_accuracy.predictions_path(path).exists()

    for _ in range(2):  # a second run changes nothing but what stands between the markers
        document.write_text(f"before\n{planner_accuracy.BEGIN}\n{planner_accuracy.END}\nafter\n")
        planner_accuracy.main()
        text = document.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "| c | " in text
    found = planner_accuracy.load(path)
    before = planner_accuracy.load_predictions(found.measured, planner_accuracy.predictions_path(path))
    assert planner_accuracy.section(found, before) in text
    assert (tmp_path / planner_accuracy.CHART).read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"tiny": True}, "small models on a CPU"), ({"cases": None}, "'cases' is missing"), (None, "cannot be read")],
    ids=["tiny runs", "another file", "no file"],
)
def test_file_without_measurements_is_refused(tmp_path: Path, changes: dict[str, Any] | None, said: str) -> None:
    path = tmp_path / "none.json" if changes is None else _written(tmp_path, **changes)
    with pytest.raises(UsageError, match=said):
        planner_accuracy.load(path)
