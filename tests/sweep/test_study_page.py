"""docs/study.md and docs/study-paper.md show the numbers of the committed records."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.pages import blocks, published, study
from tigon.errors import UsageError
from tigon.sweep import definition, failures, points, results

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GIB = 1 << 30
ENVIRONMENT = {
    "device": "Test GPU", "driver": "1", "threads": None, "versions": {"torch": "9"}, "memory_bytes": 100 * GIB,
    "gpus": 1, "tigon_commit": "abc", "date": "2026-01-02",
}  # fmt: skip


def invented(name: str, folder: Path) -> dict:
    """A record of a committed sweep, its figures made up: peaks grow with the tokens, and some run out of memory."""
    read = definition.load(ROOT / "recipes" / "study" / f"{name}.yaml")
    every = points.expand(read, (), memory_limit_bytes=24 * GIB, gpu_present=lambda: True, scratch=folder)
    records = {}
    for number, point in enumerate(every):
        train = point.recipe.train
        tokens = train.batch_size * point.recipe.data.sequence_length
        each = {"none": 3, "no-flce": 2.5, "tigon": 0.18, "liger": 0.17}[point.recipe.model.kernels]
        peak = int(GIB * (2 + each * tokens / 2048))
        status = failures.OUT_OF_MEMORY if peak > 24 * GIB else failures.OK
        figures = {
            "peak_allocated_bytes": peak, "peak_reserved_bytes": peak + GIB, "peak_resident_bytes": 1,
            "outside_bytes": GIB // 2, "phases": {"forward": peak},
            "step_s": [9.0, *[0.5 + number / 100] * (read.steps - 1)],
            "updated": [True] * read.steps, "positions": [tokens] * read.steps, "losses": [9.0, 8.0 + number / 1000],
            "parameters": 1, "precision": "bf16", "processes": 1,
        }  # fmt: skip
        records[point.id] = [{
            "status": status, "detail": "", "wall_s": 30.0, "repeat": 0, "measured": figures,
            "environment": ENVIRONMENT,
        }]  # fmt: skip
    told = {point.id: {"peak_allocated_bytes": 5 * GIB} for point in every}
    return results.collect(read, every, records, limit_bytes=24 * GIB, command=f"tigon sweep {name}", predictions=told)


# One of each kind of block: drawing takes a second a record.
MADE_UP = ("batch", "sequence", "largest-batch", "ladder", "techniques", "paper-two-gpus")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A folder of records, one of each block."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "test-gpu" / "study").mkdir(parents=True)
    for name in MADE_UP:
        text = json.dumps(invented(name, folder))
        (folder / "test-gpu" / "study" / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def inside(text: str, name: str) -> str:
    begin, end = study.markers(name)
    return text[text.index(begin) + len(begin) : text.index(end)].strip()


def whole(folder):
    """The text of both pages."""
    return "".join((folder / page).read_text(encoding="utf-8") for page in study.PAGES)


def test_committed_pages_are_generated_from_the_committed_records():
    records = study.load(ROOT / study.RECORDS)
    for name, names in study.PAGES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        assert study.page(text, names, records) == text, "run `python -m benchmarks.pages.study --into docs`"
        for image in re.findall(r"\]\((img/study/[^)]+)\)", text):
            assert (DOCS / image).is_file(), image


def test_page_shows_every_figure_of_its_records(made_up, tmp_path):
    for page in study.PAGES:
        shutil.copy(DOCS / page, tmp_path)
    study.main(["--records", str(made_up), "--into", str(tmp_path)])
    text = whole(tmp_path)
    batch = inside(text, "batch")
    assert "Test GPU (100.0 GiB, driver 1)" in batch and "tigon at commit abc; 2026-01-02" in batch
    row = next(line for line in batch.splitlines() if line.startswith("| 8 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["14.00", "5.00", "16,384"] and cells[-2:] == ["17.1", "3.4"]
    row = next(line for line in batch.splitlines() if line.startswith("| 112 |"))
    assert "OOM" in row and row.rstrip().endswith("| OOM | 19.4 |")
    assert "Most rows in a micro-batch that ran: unpatched 8, all but linear CE 16, tigon 112, Liger 112." in batch
    advice = inside(text, "advice")
    assert "At 8 x 1024 tokens tigon's kernels save 11.3 of 14.0 GiB." in advice
    assert "saves 2.0 GiB of that" in advice
    assert "0.548" not in text and "-55 %, +43 % (64 sequences)" in inside(text, "paper-two-gpus")
    for image in re.findall(r"\]\((img/study/[^)]+)\)", text):
        assert (tmp_path / image).read_text(encoding="utf-8").startswith("<svg"), image
    study.main(["--records", str(made_up), "--into", str(tmp_path)])
    assert whole(tmp_path) == text, "made twice, the pages differ"


def test_page_without_markers_and_file_that_is_no_record_are_refused(tmp_path):
    with pytest.raises(UsageError, match="has no lines <!-- study: batch -->"):
        study.page("# nothing", study.PAGES["study.md"], {})
    (tmp_path / "gpu" / "study").mkdir(parents=True)
    (tmp_path / "gpu" / "study" / "batch.json").write_text('{"schema": 1, "name": "sequence"}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"is not the results.json of the sweep batch"):
        study.load(tmp_path)


def test_every_figure_of_others_names_its_source():
    for source in (published.STUDY, published.PAPER, published.AMD):
        assert source.name and source.setting
    assert "arXiv 2410.10989" in whole(DOCS)
    assert set(published.PAPER_GAINS) == set(published.AMD_GAINS)


def test_ladder_compares_with_the_last_rung_that_ran(made_up):
    record = json.loads((made_up / "test-gpu/study/ladder.json").read_text(encoding="utf-8"))
    for row, peak_gib in zip(record["points"], range(20, 0, -1), strict=False):
        row |= {"status": "ok", "peak_allocated_bytes": peak_gib * GIB}
        row |= {"tokens_per_s": 1000.0, "step_s": 1.0, "last_loss": 8.0}
    record["points"][1] |= {"status": failures.OUT_OF_MEMORY}
    third = blocks.ladder(record).splitlines()[4]
    assert "| -2.00 |" in third, "its neighbour did not run: the rung before that counts"


def test_advice_lists_rungs_that_change_the_loss_apart_from_free_ones(made_up):
    record = json.loads((made_up / "test-gpu/study/ladder.json").read_text(encoding="utf-8"))
    for row, peak_gib in zip(record["points"], range(20, 0, -1), strict=False):
        row |= {"status": "ok", "peak_allocated_bytes": peak_gib * GIB, "step_s": 1.0, "last_loss": 8.0}
    galore = next(row for row in record["points"] if row["variant"].startswith("GaLore instead"))
    galore["last_loss"] = 10.0
    free, other = blocks.advice({"ladder": record}).splitlines()[0].split("These change the loss")
    assert "GaLore instead" not in free and "tiled MLPs (1.0 GiB)" in free
    assert "GaLore instead of 8 bits (2.0 GiB, loss +2.0)" in other


def test_page_replaces_predictions_of_the_measurement_day_by_current_ones(made_up, tmp_path):
    folder = next(made_up.glob("*/study")).parent
    record = json.loads(next(folder.glob("study/*.json")).read_text(encoding="utf-8"))
    point = next(point for point in record["points"] if point["status"] == "ok")
    file = folder / "planner" / "sweeps-predicted.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"cases": {f"{record['name']}: {point['id']}": {"allocated": 12345}}}), encoding="utf-8")
    points = study.load(made_up)[folder.name][record["name"]]["points"]
    assert [found["predicted_allocated_bytes"] for found in points if found["id"] == point["id"]] == [12345]
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no predictions"):
        study.load(made_up)
