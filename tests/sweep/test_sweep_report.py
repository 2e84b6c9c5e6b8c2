"""The report of a sweep shows every measurement, escapes names and opens in a browser."""

from __future__ import annotations

import html
import itertools
import json
import re
import xml.etree.ElementTree

import pytest
from rich.cells import cell_len

from tigon.sweep import charts, failures
from tigon.sweep.run import sweep

pytestmark = pytest.mark.charts

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def evil(write_sweep, fake_workers):
    """A sweep whose every string is hostile, with points of all kinds."""
    path = write_sweep(
        title=f"{EVIL} | `t` $x_1$", about=f"{EVIL} [l](javascript:alert(1))",
        grid={"train.batch_size": [4, 16]},
        variants={f"_{EVIL}": {}, "fat $y^2$": {"train.seed": 2}, "bad": {"train.seed": 5}},
    )  # fmt: skip
    return sweep(path)


def test_names_are_never_read_as_markup(evil):
    page = (evil / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page
    for svg in (evil / "charts").iterdir():
        text = svg.read_text(encoding="utf-8")
        assert "<script" not in text
        xml.etree.ElementTree.fromstring(text)  # well formed, whatever the names
        assert "fat $y^2$" in text, "read as mathematics"
    markdown = (evil / "report.md").read_text(encoding="utf-8")
    assert "<script" not in markdown and not re.search(r"(?<!\\)\]\(javascript", markdown)


def test_table_shows_what_was_measured_and_why_a_point_was_not(evil):
    page = (evil / "report.html").read_text(encoding="utf-8")
    assert "4.0 MiB" in page
    assert failures.OUT_OF_MEMORY in page
    assert "ValueError: the moon is full" in page
    assert "CPU (test)" in page and "2026-01-01" in page and "abc" in page


def test_out_of_memory_and_failure_are_marked_in_the_charts(evil):
    found = json.loads((evil / "results.json").read_text(encoding="utf-8"))
    (lines,) = charts.draw(found).values()
    assert "×: out of memory, or larger" in lines
    for row in found["points"]:
        row["axes"] = {"model.name": f"model-{row['axes']['train.batch_size']}"}
    (bars,) = charts.draw(found | {"axes": ["model.name"]}).values()
    assert bars.count(">OOM<") == 2 and bars.count(">failed<") >= 2  # one in each panel


def test_charts_of_a_union_of_grids_have_one_slice_per_axis(write_sweep, fake_workers):
    grids = [
        {"train.batch_size": [1, 2], "data.sequence_length": [8]},
        {"train.batch_size": [2], "data.sequence_length": [8, 16]},
    ]
    found = json.loads((sweep(write_sweep(grid=grids)) / "results.json").read_text(encoding="utf-8"))
    parts = {(part.axis, tuple(part.values)) for part in charts.slices(found)}
    assert parts == {("train.batch_size", (1, 2)), ("data.sequence_length", (8, 16))}


LONG = "all kernels and the recomputation of every second layer, with the optimizer's states on the host " * 2


def widths_of(svg: str) -> tuple[float, dict[str, float]]:
    """The figure's width, and where each text begins that says something of a variant."""
    root = xml.etree.ElementTree.fromstring(svg)
    found = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        place = re.search(r"translate\(([\d.]+)", text.get("transform", ""))
        found["".join(text.itertext())] = float(text.get("x") or (place[1] if place else 0))
    return float(root.get("viewBox").split()[2]), found


@pytest.mark.parametrize("name", [LONG, "一" * 100, "short"], ids=["long", "wide", "short"])
def test_long_name_fits_the_legend_and_stays_whole_in_the_page(name, write_sweep, fake_workers):
    variants = {f"{number} {name}{number}": {} for number in range(3)}
    out = sweep(write_sweep(variants=variants, grid={"train.batch_size": [1, 2]}))
    svg = next((out / "charts").glob("*.svg")).read_text(encoding="utf-8")
    width, texts = widths_of(svg)
    shown = {text: at for text, at in texts.items() if re.fullmatch(rf"\d {name[:5]}.*\d", text)}
    assert len(shown) == 3, "names that differ at their ends look alike"
    assert all(at + 4.6 * cell_len(text) < width for text, at in shown.items())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(html.escape(variant, quote=False) in page.replace("&#39;", "'") for variant in variants)


def test_letters_that_matplotlib_lacks_are_kept_as_text_without_a_warning(write_sweep, fake_workers, recwarn):
    out = sweep(write_sweep(variants={"一番": {}, "二番": {}}))
    assert "一番" in next((out / "charts").glob("*.svg")).read_text(encoding="utf-8"), "drawn, it would be a box"
    assert not [str(one.message) for one in recwarn if "missing from font" in str(one.message)]


@pytest.mark.parametrize(
    "values",
    [
        (131072, 163840, 393216), (1, 4, 8, 16, 32, 64, 96, 112), (512, 2048, 4096, 8192, 16384, 24576),
        (2, 3, 4, 5, 6, 7, 8), (100_000, 100_001), (4,), (0, 1, 1000),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_along_an_axis_do_not_touch_and_mark_both_ends(values):
    figure, (axes, _) = charts.new_figure(2, columns=2, height=3.5)
    part = charts.Slice("data.sequence_length", {}, values, {})
    axes.plot(values, values)
    charts._number_axis(axes, part)
    figure.canvas.draw()
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    assert {float(label.get_text().replace(",", "")) for label in labels} >= {float(values[0]), float(values[-1])}
    if all(label.get_rotation() == 0 for label in labels):
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
