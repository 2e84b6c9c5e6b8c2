"""`tigon sweep --from`: what an earlier results.json has is not measured again, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tigon.errors import RunFolderError, UsageError
from tigon.planner.gpus import find_gpu
from tigon.sweep import definition, failures, points
from tigon.sweep.results import import_results
from tigon.sweep.run import sweep

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results" / "nvidia-h200" / "study").glob("*.json"))


BATCH = next(file for file in RECORDS if file.stem == "batch")


def results_of(out: Path) -> dict:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def rows(out: Path) -> dict[str, dict]:
    return {row["id"]: row for row in results_of(out)["points"]}


@pytest.fixture
def earlier(write_sweep, fake_workers, here) -> Path:
    """The results.json of an earlier go, alone: sizes 4 and 8 of two variants, of which one ran out of memory at 16.
    Its figures are not those that would be measured again, and it was measured on another day."""
    out = sweep(write_sweep(**SWEEP), only="=(4|8|16)$")
    text = (out / "results.json").read_text(encoding="utf-8")
    text = text.replace('"2026-01-01"', '"2025-12-31"').replace('"abc"', '"old"')
    (here / "earlier.json").write_text(text.replace('"tokens_per_s": ', '"tokens_per_s": 1'), encoding="utf-8")
    shutil.rmtree(out)
    (here / "started.txt").unlink()
    return here / "earlier.json"


def offer_of(file: Path, scratch: Path, **changes: object) -> tuple[dict, dict]:
    """The points that a committed record offers its recipe, unchanged or with `changes`."""
    read = dataclasses.replace(definition.load(ROOT / "recipes" / "study" / f"{file.stem}.yaml"), **changes)
    limit_bytes = None if read.memory_limit is None else find_gpu(read.memory_limit).memory_bytes
    every = points.expand(read, (), memory_limit_bytes=limit_bytes, gpu_present=lambda: True, scratch=scratch)
    return import_results.read(file).importable(every, read, limit_bytes, ())


SWEEP = {
    "grid": {"train.batch_size": [4, 8, 16, 32]}, "variants": {"lean": {}, "fat": {"train.seed": 2}},
    "stop_after_oom": "train.batch_size",
}  # fmt: skip


def test_imported_point_is_kept_as_it_was_and_not_measured_again(write_sweep, fake_workers, earlier, capsys):
    before = {row["id"]: row for row in json.loads(earlier.read_text(encoding="utf-8"))["points"]}
    out = sweep(write_sweep(**SWEEP), earlier=earlier)
    assert fake_workers() == ["32 1"], "the larger one of what ran out of memory is skipped by the row taken over"
    found = rows(out)
    for name in ("lean batch_size=4", "fat batch_size=8", "fat batch_size=16"):
        assert found[name] == before[name]
    assert found["fat batch_size=32"]["status"] == failures.SKIPPED
    environment = results_of(out)["environment"]
    assert (environment["tigon_commits"], environment["dates"]) == (["abc", "old"], ["2025-12-31", "2026-01-01"])
    new, old = found["lean batch_size=32"], found["lean batch_size=4"]
    assert (new["tigon_commits"], new["dates"]) == (["abc"], ["2026-01-01"])
    assert (old["tigon_commits"], old["dates"]) == (["old"], ["2025-12-31"]), "its origin is lost"
    assert f"imported 6 of 6 finished points of {earlier}" in capsys.readouterr().out


def test_imported_points_remain_without_from_and_when_drawn(write_sweep, fake_workers, earlier):
    path = write_sweep(**SWEEP)
    out = sweep(path, earlier=earlier, only="none of these|lean batch_size=32")
    earlier.unlink()
    first = rows(out)
    for draw in (False, True):
        sweep(path, draw=draw)
        assert rows(out) == first and fake_workers() == ["32 1"]
    assert (
        "OOM" in (out / "report.md").read_text(encoding="utf-8") or "out of memory" in (out / "report.md").read_text()
    )


def test_points_with_other_settings_are_not_imported(write_sweep, fake_workers, earlier, capsys):
    sweep(write_sweep(**SWEEP | {"grid": {"train.batch_size": [4, 64]}}), ["train.learning_rate=1"], earlier=earlier)
    said = capsys.readouterr().out
    assert fake_workers() == ["4 1", "4 2", "64 1", "64 2"]
    assert "imported 0 of 6" in said
    assert "left out 2 of them, from lean batch_size=4: train.learning_rate the default there, 1.0 here" in said
    assert "left out 4 of them, from lean batch_size=8: no such point here" in said


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": 6}, "steps 5 there, 6 here"),
        ({"warmup": 1}, "warmup 2 there, 1 here"),
        ({"rows": "alpaca"}, 'rows "random" there, "alpaca" here'),
        ({"memory_limit": None}, "memory_limit 24.00 GiB there, none here"),
    ],
)
def test_points_measured_with_other_options_are_not_imported(changes, why, tmp_path):
    found, left = offer_of(BATCH, tmp_path, **changes)
    states = [row["status"] for row in json.loads(BATCH.read_text(encoding="utf-8"))["points"]]
    finished = states.count(failures.OK) + states.count(failures.OUT_OF_MEMORY)
    assert finished and not found
    assert len(left[why]) == finished


def test_point_with_fewer_repeats_counts_until_it_is_measured_again(write_sweep, fake_workers, earlier, capsys):
    """It counts until its point is measured here, as often as the sweep wants; out of memory needs no second time."""
    before = {row["id"]: row for row in json.loads(earlier.read_text(encoding="utf-8"))["points"]}
    path = write_sweep(**SWEEP, repeats=2)
    out = sweep(path, earlier=earlier, only="lean batch_size=4$")
    assert fake_workers() == ["4 1", "4 1"]
    found = rows(out)
    assert found["lean batch_size=4"]["repeats"] == 2 and found["lean batch_size=8"] == before["lean batch_size=8"]
    fewer = "5 of them are measured again, from lean batch_size=4: fewer than 2 repeats there"
    assert f"imported 6 of 6 finished points of {earlier}; {fewer}" in capsys.readouterr().out
    once = "fat batch_size=4; lean batch_size=8; fat batch_size=8; lean batch_size=16"
    report = (out / "report.md").read_text(encoding="utf-8").replace("\\", "")
    assert f"in each of 2 processes (in fewer so far: {once})" in report
    (here := earlier.with_name("whole.json")).write_bytes((out / "results.json").read_bytes())
    shutil.rmtree(out)
    out = sweep(path, earlier=here, draw=True)
    sweep(path, earlier=earlier, draw=True)
    assert rows(out)["lean batch_size=4"]["repeats"] == 2, "fewer repeats push out more"


def test_new_measurement_of_a_chosen_point_replaces_the_imported_one(write_sweep, fake_workers, earlier, capsys):
    path = write_sweep(**SWEEP)
    before = json.loads(earlier.read_text(encoding="utf-8"))["points"][0]
    out = sweep(path, earlier=earlier, only="lean batch_size=4$")
    assert fake_workers() == ["4 1"]
    found = rows(out)
    assert found["lean batch_size=4"]["tokens_per_s"] != before["tokens_per_s"]
    assert found["lean batch_size=4"]["dates"] == ["2026-01-01"] and found["lean batch_size=8"]["dates"] == [
        "2025-12-31"
    ]
    capsys.readouterr()
    sweep(path, earlier=earlier, only="lean batch_size=4$")
    said = capsys.readouterr().out
    assert fake_workers() == ["4 1"], "measured a third time"
    assert "left out 1 of them, from lean batch_size=4: measured here already" in said
    assert rows(out) == found


def test_results_of_another_machine_are_refused_and_leave_no_folder(write_sweep, fake_workers, earlier, tigon, here):
    path = write_sweep(**SWEEP)
    text = earlier.read_text(encoding="utf-8")
    earlier.write_text(text.replace("CPU (test)", "Other GPU"), encoding="utf-8")
    code, _, err = tigon("sweep", path, "--from", earlier)
    assert code == 2 and err.count("\n") == 1
    assert f"{earlier}: its points were measured with device Other GPU, and here it is CPU (test); leave out" in err
    assert not fake_workers() and not (here / "runs/sweeps/s").exists()
    out = sweep(path, only="lean batch_size=32")
    kept = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for flags in ((), ("--draw",)):
        assert tigon("sweep", path, "--from", earlier, *flags).code == 2
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == kept
    earlier.write_text(text.replace('"torch": "0"', '"torch": "1"'), encoding="utf-8")
    assert "measured with versions torch 1, and here it is torch 0" in tigon("sweep", path, "--from", earlier).err


def test_imported_points_survive_other_settings_and_a_damaged_file_is_refused(write_sweep, fake_workers, earlier):
    path = write_sweep(**SWEEP)
    out = sweep(path, earlier=earlier)
    with pytest.raises(RunFolderError, match="7 of its measurements have other settings and would be lost"):
        sweep(path, ["train.learning_rate=1"])
    with pytest.raises(RunFolderError, match="6 of its measurements have other settings"):
        sweep(write_sweep(**SWEEP | {"warmup": 2}))
    (out / import_results.FILE).write_text('{"schema": 1, "rows": {"lean batch_size=4": {}}}', encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"taken.json: damaged \(rows.lean batch_size=4.key is missing\)"):
        sweep(path)


def test_time_limit_uses_the_duration_of_imported_points(write_sweep, fake_workers, earlier, capsys):
    found = json.loads(earlier.read_text(encoding="utf-8"))
    for row in found["points"]:
        row |= {"wall_s": 5000.0} if "wall_s" in row else {}
    earlier.write_text(json.dumps(found), encoding="utf-8")
    sweep(write_sweep(**SWEEP), earlier=earlier, time_limit="1h")
    assert not fake_workers() and "time limit: 2 not started, from lean batch_size=32" in capsys.readouterr().out


NO_RESULTS = {
    "no JSON": ("{", "not JSON"),
    "a list": ("[]", "it is not a mapping"),
    "another file of ours": ('{"schema": 1, "rows": {}}', "name is missing"),
    "a row without its keys": (lambda found: found["points"][0].pop("keys"), "points.0.keys is missing"),
    "a row without its time": (lambda found: found["points"][0].pop("step_s"), "points.0.step_s is missing"),
    "a peak in words": (lambda found: found["points"][0].update(peak_allocated_bytes="2 GiB"), "is '2 GiB'"),
    "no machine": (lambda found: found.update(environment=None), "environment is null"),
    "another schema": (lambda found: found.update(schema=2), "schema is 2, but this tigon reads 1"),
}


@pytest.mark.parametrize("name", NO_RESULTS)
def test_file_that_is_no_results_json_is_refused_with_its_reason(name, tmp_path):
    change, why = NO_RESULTS[name]
    text = change
    if not isinstance(change, str):
        found = json.loads(BATCH.read_text(encoding="utf-8"))
        change(found)
        text = json.dumps(found)
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        import_results.read(tmp_path / "x.json")
    assert str(refused.value).startswith(f"--from {tmp_path / 'x.json'}: ") and why in str(refused.value)


def test_missing_file_is_refused_in_one_line_and_leaves_no_folder(write_sweep, tigon, here):
    code, _, err = tigon("sweep", write_sweep(), "--from", "nowhere.json")
    said = "tigon: --from nowhere.json: cannot be read: No such file or directory; give a results.json.\n"
    assert (code, err) == (2, said) and not (here / "runs").exists()


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_committed_record_can_be_continued_with_from(file, tmp_path):
    found, left = offer_of(file, tmp_path)
    assert found, left
