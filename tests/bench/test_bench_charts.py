"""Charts: lines for a sweep and bars otherwise, valid SVG, everybody in them who was measured."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from bench_records import measured, row, run

from benchmarks.kernels import charts
from benchmarks.kernels.peers import CATALOGUE
from tigon.ops import OPS


def test_swept_dimension_is_the_only_one_that_varies():
    assert charts.swept_dimension([row(shape=(8, n)) for n in (16, 32, 64)]) == 1
    assert charts.swept_dimension([row(shape=(n, 8)) for n in (16, 32, 64)]) == 0
    assert charts.swept_dimension([row(shape=(8, 16)), row(shape=(8, 32))]) is None
    assert charts.swept_dimension([row(shape=shape) for shape in ((8, 16), (8, 32), (9, 64))]) is None
    peaked = row(shape=(8, 64))
    peaked.logits = "peaked"
    assert charts.swept_dimension([row(shape=(8, 16)), row(shape=(8, 32)), peaked]) is None


@pytest.mark.parametrize("shapes", [[(8, 16), (8, 32), (8, 64)], [(8, 16), (9, 32)]], ids=["sweep", "bars"])
def test_charts_show_every_measured_implementation(shapes):
    drawn = charts.draw(run(*(row(shape=shape) for shape in shapes)))
    assert (
        set(drawn)
        == {"speed-rms_norm", "memory-rms_norm"}
        == set(charts.chart_names(run(*(row(shape=s) for s in shapes))))
    )
    for svg in drawn.values():
        text = "".join(ElementTree.fromstring(svg).itertext())
        for label in ("tigon", "Hugging Face", "torch.compile", "Liger"):
            assert label in text
        assert "quack" not in text  # not installed


def test_unmeasured_op_gets_no_chart():
    nobody = row(measurements=[measured("tigon", "ours", 1.0, graph_ms=None, eager_ms=None)])
    assert charts.draw(run(nobody)) == {}


def points_of(svg: str, impl: str) -> list[tuple[float, float]]:
    """The places of an implementation's markers, from the left; the last one is in the legend."""
    colour = charts.COLOURS[impl]
    uses = (node.attrib for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("use"))
    return [(float(use["x"]), float(use["y"])) for use in uses if f"stroke: {colour}" in use.get("style", "")]


def test_implementation_is_drawn_at_the_sizes_where_it_was_measured_and_nowhere_else():
    """An implementation that ran out of memory at one size keeps its points at the other sizes."""
    rows = [row(shape=(8, n)) for n in (16, 32, 64)]
    complete = charts.draw(run(*rows))["speed-rms_norm"]
    rows[1].measurements = [m for m in rows[1].measurements if m.impl != "liger"]
    svg = charts.draw(run(*rows))["speed-rms_norm"]
    assert "NaN" not in svg and "nan" not in svg
    (first, _, last, legend) = points_of(complete, "liger")
    assert points_of(svg, "liger") == [first, last, legend]
    assert points_of(svg, "tigon") == points_of(complete, "tigon") and len(points_of(svg, "tigon")) == 4


def test_charts_of_one_page_have_distinct_ids():
    drawn = charts.draw(run(row(), row("swiglu")))
    ids = [
        {node.attrib["id"] for node in ElementTree.fromstring(svg).iter() if "id" in node.attrib}
        for svg in drawn.values()
    ]
    assert sum(map(len, ids)) == len(set().union(*ids))


def test_every_implementation_has_a_colour_and_every_op_has_dimensions():
    shown = {impl.name for op in OPS for impl in CATALOGUE.impls_for(op) if impl.role != "variant"}
    assert shown <= set(charts.COLOURS)
    assert set(charts.DIMENSIONS) == set(OPS)
