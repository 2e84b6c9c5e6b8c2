"""`python -m benchmarks merge-sweeps`: what was measured anew replaces the record's points, and nothing else does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.__main__ import main

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "study" / "batch.json"


@pytest.fixture
def record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture
def anew(record: Any) -> Any:
    """The results of a sweep that measured the record's first point again."""
    new = copy.deepcopy(record)
    new["environment"] |= {"tigon_commits": ["new"], "dates": ["2027-01-01"]}
    first, *rest = new["points"]
    first |= {"tokens_per_s": 1.0, "tigon_commits": ["new"], "dates": ["2027-01-01"]}
    for row in rest:
        row["status"] = "not measured"
    return new


def merge(record: Any, new: Any, folder: Path) -> Any:
    for name, value in (("record", record), ("new", new)):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    main(["merge-sweeps", str(folder / "new.json"), "--json", str(folder / "record.json")])
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


def test_measured_points_replace_the_records_and_name_their_origin(record, anew, tmp_path):
    found = merge(record, anew, tmp_path)
    first, *rest = found["points"]
    assert first["tokens_per_s"] == 1.0 and first["dates"] == ["2027-01-01"]
    assert [row["id"] for row in rest] == [row["id"] for row in record["points"][1:]]
    assert [row["status"] for row in rest] == [row["status"] for row in record["points"][1:]]
    assert set(found["environment"]["tigon_commits"]) == {*record["environment"]["tigon_commits"], "new"}
    assert found["environment"]["dates"][-1] == "2027-01-01"


@pytest.mark.parametrize("name", ["card", "steps", "keys"])
def test_results_of_other_settings_or_another_card_are_refused_and_the_record_is_kept(
    name, record, anew, tmp_path, capsys
):
    if name == "card":
        anew["environment"]["device"] = "Other GPU"
    elif name == "steps":
        anew["steps"] += 1
    else:
        anew["points"][0]["keys"] |= {"train.learning_rate": 1.0}
    with pytest.raises(SystemExit) as refused:
        merge(record, anew, tmp_path)
    assert refused.value.code == 2
    says = {"card": "device is NVIDIA", "steps": "steps is", "keys": "has other recipe keys in the record"}
    assert says[name] in capsys.readouterr().err
    assert json.loads((tmp_path / "record.json").read_text(encoding="utf-8")) == record
