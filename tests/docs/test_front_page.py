"""The tables and the picture of README.md are those that the committed records give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers")

from duel_record import made_up

from benchmarks.pages import duel, front_page, published, what_fits

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_is_that_of_the_records() -> None:
    text = front_page.PICTURE.read_text(encoding="utf-8")
    assert text == front_page.picture(duel.load()), "make pages draws it again"


def test_picture_has_colours_for_dark_pages_and_every_bar_fits() -> None:
    text = front_page.picture(made_up())
    assert "prefers-color-scheme: dark" in text
    root = ElementTree.fromstring(text)
    shown = [element.text or "" for element in root.iter(f"{SVG}text")]
    width = float(root.attrib["width"])
    bars = [(float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in root.iter(f"{SVG}rect")]
    assert len(bars) == 6 + 6 + 3 and all(x + length < width for x, length in bars)
    assert {"300", "900", "19.0", "40.0"} <= {*shown} and not {"112", "304"} & {*shown}


def test_longest_row_is_refused_if_its_process_took_more_than_24_gib(tmp_path: Path, monkeypatch: Any) -> None:
    assert front_page.longest_row() == 524288
    row = {"tokens": 1, "measured": {"peak_reserved_bytes": 24 << 30, "non_allocator_bytes": 1}}
    path = tmp_path / "row.json"
    path.write_text(json.dumps({"rows": [row]}), encoding="utf-8")
    monkeypatch.setattr(front_page, "LONG_ROWS", path)
    with pytest.raises(SystemExit, match=r"the process took 24\.00 GiB"):
        front_page.longest_row()


def test_largest_value_is_the_largest_that_ran() -> None:
    ran = {
        point["axes"][front_page.BATCH]
        for point in front_page.points("batch")
        if point["variant"] == "unpatched" and point["status"] == "ok"
    }
    assert front_page.largest("batch", "unpatched", front_page.BATCH) == max(ran) == 8


def test_planned_record_has_every_cell_of_the_table() -> None:
    record = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))
    assert record["tokens"].keys() == what_fits.ROWS.keys()
    assert all(row.keys() == what_fits.CARDS.keys() for row in record["tokens"].values())
    assert all(row["8 GB"] <= row["24 GB"] <= row["80 GB"] for row in record["tokens"].values())
    assert published.UNSLOTH_QLORA["8B"].keys() == what_fits.CARDS.keys()


@pytest.mark.parametrize("model", published.UNSLOTH_QLORA)
def test_qlora_is_planned_longer_than_published_on_every_card(model: str) -> None:
    record = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))["tokens"]
    for card, published_tokens in published.UNSLOTH_QLORA[model].items():
        assert max(record[row][card] for row in record if row.startswith(f"{model}, QLoRA")) > published_tokens


@pytest.mark.parametrize(
    ("row", "card"), [("1B, full fine-tuning in bf16", "16 GB"), ("70B, QLoRA, layers on the host", "16 GB")]
)
def test_cell_is_the_longest_sequence_that_a_plan_of_the_recipe_prints(row: str, card: str) -> None:
    recorded = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))["tokens"][row][card]
    # Other versions of transformers trace other operators. The search itself is exact to 4%.
    assert what_fits.planned(row, card) == pytest.approx(recorded, rel=0.04)


def test_nearest_run_is_the_planned_and_the_measured_peak_of_a_record() -> None:
    assert what_fits.nearest("8B, QLoRA") == "–"
    assert what_fits.nearest("8B, LoRA") == "21.83 / 22.27"
    assert what_fits.nearest("1B, LoRA") == "–"
    assert what_fits.nearest("70B, QLoRA, layers on the host") == "13.86 / 13.86"


def test_table_shows_a_dash_where_nothing_fits() -> None:
    tokens = {row: dict.fromkeys(what_fits.CARDS, 0) for row in what_fits.ROWS}
    without_run = [row for row in what_fits.ROWS.values() if row.nearest is None]
    dashes = len(what_fits.ROWS) * len(what_fits.CARDS) + len(without_run)
    assert what_fits.table({"tokens": tokens}).count("–") == dashes
