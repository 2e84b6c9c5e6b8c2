"""Tables: what counts as the best peer, when a target is reached, and that the docs show the committed records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench_records import measured, row, run

from benchmarks.kernels import suites
from benchmarks.kernels.peers import CATALOGUE
from benchmarks.kernels.table import MEANINGS, implementations, overview, provenance
from benchmarks.kernels.targets import PerformanceTarget
from benchmarks.pages import regions
from benchmarks.pages.bench import load, record_name, records_of, section
from tigon.bench import table
from tigon.bench.record import Measurement
from tigon.errors import UsageError

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PLANNED = "planned"
"""A folder beside the GPUs': what the planner predicts, and nobody measured."""
RECORDS = sorted(path for path in (ROOT / "benchmarks" / "results").glob("*/*.json") if path.parent.name != PLANNED)
NOT_MEASURED = "Not measured yet."


def cells(text: str, line: int = 0) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[2 + line].strip("|").split("|")]


def target(quantity: str, bound: float, **fields) -> PerformanceTarget:
    return PerformanceTarget(quantity=quantity, bound=bound, **fields)


def test_summary_names_the_fastest_peer():
    assert cells(table.summary([row()]))[:5] == ["rms_norm 8x16", "0.11", "0.15 (liger)", "0.1 (copy)", "91 %"]


def test_peer_that_errs_too_much_is_marked_and_never_the_best():
    peers = [
        measured("tigon", "ours", 0.11),
        measured("eager", "baseline", 1.0),
        measured("liger", "peer", 0.05, breaks_rule=["output 0"]),
        measured("compile", "peer", 0.2),
    ]
    assert cells(table.summary([row(measurements=peers)]))[2] == f"0.2 (compile), 0.05 (liger) {table.WRONG}"
    peers[2] = measured("liger", "peer", 0.9, breaks_rule=["output 0"])
    assert cells(table.summary([row(measurements=peers)]))[2] == "0.2 (compile)"


def test_time_with_launches_is_labelled():
    peers = [measured("tigon", "ours", 0.11), measured("liger", "peer", 0.15, graph_ms=None)]
    assert cells(table.summary([row(measurements=peers)]))[2] == "0.25 (liger, with launches)"


def test_refused_tigon_has_no_figure():
    refused = Measurement(impl="tigon", role="ours", status="refused", detail="wrong")
    shown = cells(table.summary([row(measurements=[refused, measured("compile", "peer", 0.2)])]))
    assert shown[1] == "refused" and shown[4] == "-"


@pytest.mark.parametrize(
    ("wanted", "ok"),
    [
        (target("fraction", 0.9), True),
        (target("fraction", 0.92), False),
        (target("ms", 0.11), True),
        (target("ms", 0.10), False),
        (target("ratio", 1.05, vs="liger"), True),
        (target("ratio", 0.7, vs="liger"), False),
        (target("ratio", 1.05, vs="quack"), None),  # not installed
        (target("host_us", 80.0), True),
        (target("host_us", 60.0), False),
        (target("ms", 1.0, memory_gib=0.2), True),
        (target("ms", 1.0, memory_gib=0.05), None),  # nothing that small
        (target("ms", 1.0, of="tigon eval"), None),  # not measured
        (target("kept_bytes", 0.0), None),
    ],
)
def test_target_is_reached_missed_or_not_measured(wanted, ok):
    text, verdict = wanted.result(row())
    assert verdict is ok
    assert text.endswith({True: "reached", False: "missed", None: "not measured"}[ok])


def test_target_within_a_memory_limit_ignores_settings_that_exceed_it():
    settings = [
        measured("tigon", "ours", 1.0, mib=3000),
        measured("tigon 1 GiB", "ours", 1.1, mib=1500),
        measured("products", "limit", 1.0),
    ]
    record = row("linear_cross_entropy", (8, 16, 32), measurements=settings, flops=10**9)
    text, ok = target("ratio", 1.04, vs="products", memory_gib=2.0).result(record)
    assert not ok and text == "<= 1.04 x products within 2 GiB: 1.100, missed by tigon 1 GiB"
    text, ok = target("ratio", 1.04, vs="products", memory_gib=3.0).result(record)
    assert ok and text == "<= 1.04 x products within 3 GiB: 1.000, reached"


def test_details_list_every_implementation_and_why_one_is_missing():
    text = table.details(row())
    assert "| quack | not installed: No module named 'quack' |" in text
    for name in ("tigon", "eager", "compile", "liger"):
        assert f"| {name} | " in text
    assert "0.11 (0.099 - 0.121)" in text


def test_provenance_names_card_driver_versions_commit_and_date():
    text = provenance(run(row(), not_run=["rope 1"]))
    for part in ("Testcard", "driver 1.2", "torch 2.11.0", "abc", "2026-11-21", "4000 GB/s", "700 TFLOP/s", "rope 1"):
        assert part in text
    assert "triton" not in text


def test_section_replaces_only_the_region_of_its_record():
    document = "a\n<!-- record x/one -->\nold\n<!-- end -->\nb\n<!-- record x/two -->\nkept\n<!-- end -->\n"
    changed = regions.put(document, "<!-- record x/one -->", "<!-- end -->", r"new \1")
    assert changed == document.replace("old", r"new \1")
    assert regions.put(changed, "<!-- record x/one -->", "<!-- end -->", "old") == document
    with pytest.raises(UsageError, match="x/three"):
        regions.put(document, "<!-- record x/three -->", "<!-- end -->", "new")


def test_bound_is_the_measured_products_if_there_are_any():
    own, products = measured("tigon", "ours", 0.5), measured("products", "limit", 0.4)
    assert table.bound(row("linear_cross_entropy", (8, 16, 32), flops=10**9, measurements=[own])) == (0.1, "FLOPs")
    both = row("linear_cross_entropy", (8, 16, 32), flops=10**9, measurements=[own, products])
    assert table.bound(both) == (0.4, "products")
    assert cells(table.summary([both]))[3:5] == ["0.4 (products)", "80 %"]
    assert "| tigon | " in table.details(both) and "bound 0.4 ms (products)" in table.details(both)


def test_overview_counts_rows_without_a_faster_peer_and_targets_that_are_reached(monkeypatch):
    slower = row(shape=(4, 8), measurements=[measured("tigon", "ours", 0.3), measured("compile", "peer", 0.2)])
    targets = (target("ratio", 1.05, vs="compile"), target("ms", 0.3))
    monkeypatch.setitem(suites._REACH, "targets", {slower.id: targets})
    shown = cells(overview({"x/one": run(row(), slower)}))
    assert shown == ["x/one", "2", "1 of 2", "rms_norm 4x8: 1.50 x compile", "1 of 2"]


def test_every_implementation_has_a_meaning():
    assert set(MEANINGS) == set(CATALOGUE.names())


def _shown_records() -> dict[str, str]:
    pattern = r"<!-- record (\S+) -->\n(.*?)\n<!-- end -->"
    return dict(re.findall(pattern, DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))


def test_docs_show_the_figures_of_the_records():
    """`python -m benchmarks.pages.bench RECORD.json --into docs/benchmarks.md` mends it."""
    measured_names = {record_name(path) for path in RECORDS}
    shown = _shown_records()
    assert shown and measured_names <= set(shown)
    for path in RECORDS:
        name = record_name(path)
        assert shown[name] == section(load(path), name), name
        for image in re.findall(r"\]\((img/\S+\.svg)\)", shown[name]):
            assert (DOCUMENT.parent / image).exists(), image
    for name in set(shown) - measured_names:
        assert shown[name] == NOT_MEASURED, name
    text = DOCUMENT.read_text(encoding="utf-8")
    runs = records_of(text, ROOT / "benchmarks" / "results")
    for marker, made in (("overview", overview), ("implementations", implementations)):
        assert regions.put(text, f"<!-- {marker} -->", "<!-- end -->", made(runs)) == text
