"""The sweeps measured on GPUs against what the planner says of their points now.

The limits are the planner's own (`benchmarks.pages.planner_accuracy.QUANTITIES`), with the exceptions that `KNOWN`
lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.pages import planner_accuracy as planner
from benchmarks.pages import sweep_accuracy
from benchmarks.pages.planner_accuracy import QUANTITIES, Comparison, Quantity
from second_proofs import proved_by
from tigon.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / sweep_accuracy.RESULTS / "nvidia-h200"
DOCUMENT = ROOT / "docs" / "planner-accuracy.md"
SAME, SAME_WITH_OTHERS = 1e-3, 0.05
"""As in tests/planner/test_plan_accuracy.py: with the versions that the predictions were made with, and with others."""
ALLOCATED, RESERVED, TIME = QUANTITIES

Chosen = Callable[[list[dict[str, Any]]], set[int]]
committed = pytest.mark.skipif(not (FOLDER / "study").is_dir(), reason="no sweep of a GPU is committed")


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return sweep_accuracy.load(FOLDER)


@pytest.fixture(scope="module")
def kept(cases: list[dict[str, Any]]) -> list[Comparison]:
    """Every point as it was predicted when the predictions were last made."""
    return planner.load_predictions(cases, sweep_accuracy.predictions_path(FOLDER), remake=sweep_accuracy.REMAKE)


@committed
@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_every_point_is_predicted_within_its_limit_of_the_measurement(
    quantity: Quantity, kept: list[Comparison]
) -> None:
    said = sweep_accuracy.unexpected(kept, quantity)
    assert not said, "\n" + "\n".join(said)


def first_of_each_sweep(cases: list[dict[str, Any]]) -> set[int]:
    return set({case["sweep"]: number for number, case in reversed(list(enumerate(cases)))}.values())


def every_eighth(cases: list[dict[str, Any]]) -> set[int]:
    return {*range(0, len(cases), 8)} - first_of_each_sweep(cases)


@committed
@pytest.mark.parametrize(
    "chosen",
    proved_by(
        [first_of_each_sweep], [first_of_each_sweep, every_eighth],
        "a change of the planner shows in the first points; all of them find a page that it leaves behind",
        lambda chosen: chosen.__name__,
    ),
)  # fmt: skip
def test_committed_predictions_of_sweeps_are_current(
    cases: list[dict[str, Any]], kept: list[Comparison], chosen: Chosen
) -> None:
    """Checks some points, because each takes a second."""
    numbers = sorted(chosen(cases))
    path = sweep_accuracy.predictions_path(FOLDER)
    allowed = SAME if planner.predicted_with(path) == planner.versions() else SAME_WITH_OTHERS
    stale = [
        f"{old.id}: {quantity.name} was {old.predicted[quantity.name]:g}, is {new.predicted[quantity.name]:g}"
        for old, new in zip(
            [kept[n] for n in numbers], sweep_accuracy.compare([cases[n] for n in numbers]), strict=True
        )
        for quantity in QUANTITIES
        if abs(old.predicted[quantity.name] / new.predicted[quantity.name] - 1) > allowed
    ]
    assert not stale, "\n".join([sweep_accuracy.REMAKE, *stale])


@committed
def test_summary_in_the_document_is_generated_from_the_sweeps(kept: list[Comparison]) -> None:
    inside = (
        DOCUMENT.read_text(encoding="utf-8")
        .partition(sweep_accuracy.BEGIN + "\n")[2]
        .partition("\n" + sweep_accuracy.END)[0]
    )
    assert inside == sweep_accuracy.section(kept), sweep_accuracy.REMAKE


# --- without measurements: a file made up ----------------------------------------------------------------------------


def _results(**point: Any) -> dict[str, Any]:
    whole = {
        "id": "a", "variant": "a", "axes": {}, "unchecked": False, "status": "ok", "phases": {},
        "keys": {"model.name": "tigon-demo", "train.batch_size": 2, "data.sequence_length": 128},
        "peak_allocated_bytes": 10**8, "peak_reserved_bytes": 10**8, "step_s": 0.1,
    }  # fmt: skip
    return {
        "name": "s", "memory_limit_bytes": None, "environment": {"device": "NVIDIA H200", "memory_bytes": 1 << 37},
        "points": [whole | point, {"id": "b", "status": "not measured", "detail": ""}],
    }  # fmt: skip


def _folder(path: Path, results: Any) -> Path:
    (path / "study").mkdir()
    (path / "study" / "s.json").write_text(json.dumps(results))
    return path


def test_only_points_that_ran_become_cases(tmp_path: Path) -> None:
    cases = sweep_accuracy.load(_folder(tmp_path, _results()))
    assert [case["id"] for case in cases] == ["s: a"]
    recipe = sweep_accuracy.recipe_of(cases[0], tmp_path)
    assert (recipe.model.name, recipe.train.batch_size, recipe.data.sequence_length) == ("tigon-demo", 2, 128)


def test_sweep_without_a_measured_point_or_on_a_cpu_gives_no_cases(tmp_path: Path) -> None:
    results = _results(status="not measured")
    results["environment"] = None
    assert sweep_accuracy.load(_folder(tmp_path, results)) == []
    (tmp_path / "study" / "s.json").write_text(json.dumps(_results() | {"environment": {"device": "cpu"}}))
    assert sweep_accuracy.load(tmp_path) == []


def test_file_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"s\.json is not the results\.json"):
        sweep_accuracy.load(_folder(tmp_path, {"rows": []}))


def test_known_case_has_its_own_limit_and_other_cases_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_accuracy, "KNOWN", {("s: a", "reserved"): (0.2, "streams")})
    case = {"id": "s: a", "sweep": "s", "allocated_bytes": 100, "reserved_bytes": 100, "step_s": 1.0}
    other = case | {"id": "s: b"}

    def comparison(case: dict[str, Any], reserved: float) -> Comparison:
        return Comparison(case=case, phases={}, predicted={"allocated": 100, "reserved": reserved, "step time": 1.0})

    off, sound = comparison(case, 81), comparison(other, 100)
    assert not sweep_accuracy.unexpected([off, sound], RESERVED)
    assert "streams" in sweep_accuracy.section([off, sound])
    assert sweep_accuracy.unexpected([comparison(case, 79), sound], RESERVED)
    assert sweep_accuracy.unexpected([off, comparison(other, 81)], RESERVED)


def test_longest_matching_prefix_of_a_name_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_accuracy, "KNOWN", {("s", "reserved"): (0.2, "a"), ("s: a", "reserved"): (0.1, "b")})
    assert sweep_accuracy.known("s: ab", "reserved") == "s: a" and sweep_accuracy.known("s: b", "reserved") == "s"
    assert sweep_accuracy.known("s: a", "allocated") is None and sweep_accuracy.known("t", "reserved") is None


def test_known_case_that_no_point_needs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_accuracy, "KNOWN", {("s", "reserved"): (0.2, "a")})
    case = {"id": "s: a", "sweep": "s", "allocated_bytes": 100, "reserved_bytes": 100, "step_s": 1.0}
    sound = Comparison(case=case, phases={}, predicted={"allocated": 100, "reserved": 99, "step time": 1.0})
    assert ["need not" in said for said in sweep_accuracy.unexpected([sound], RESERVED)] == [True]
