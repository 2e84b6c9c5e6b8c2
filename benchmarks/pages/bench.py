"""Writes records of `tigon bench` into docs/benchmarks.md and docs/training-benchmarks.md, with their charts.

    python -m benchmarks.pages.bench RECORD.json --into docs/benchmarks.md

A page has the markers `<!-- record GPU/NAME -->` or `<!-- training GPU/NAME -->` and `<!-- end -->` for each record.
Charts go to docs/img/benchmarks/GPU/NAME.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.kernels import charts
from benchmarks.kernels import table as kernel_table
from benchmarks.kernels.table import implementations, overview
from benchmarks.pages import regions
from benchmarks.training import charts as train_charts
from benchmarks.training import table as train_table
from tigon.bench import record
from tigon.bench.record import RunRecord
from tigon.bench.training.record import TrainRecord


def load(path: Path) -> RunRecord | TrainRecord:
    """Read a record of either command. Raises BenchError if the file has none."""
    training = record.kind_of(path) == TrainRecord.kind
    return record.load(path, TrainRecord) if training else record.load(path, RunRecord)


def draw(run: RunRecord | TrainRecord) -> dict[str, str]:
    """Name -> SVG."""
    return train_charts.draw(run) if isinstance(run, TrainRecord) else charts.draw(run)


def record_name(path: Path) -> str:
    """A record's name in the docs: the GPU's folder and the file name without its suffix."""
    return f"{path.parent.name}/{path.stem}"


def chart_folder(name: str) -> str:
    """The folder of the charts of a record's section, seen from the page."""
    return f"img/benchmarks/{name}"


def section(run: RunRecord | TrainRecord, name: str) -> str:
    """The record's section in the docs: a table and charts. Charts of sweeps are shown, bar charts folded."""
    if isinstance(run, TrainRecord):
        images = [f"![{chart}]({chart_folder(name)}/{chart}.svg)" for chart in train_charts.chart_names(run)]
        return "\n\n".join([train_table.section(run), *images])
    shown = {chart: f"![{chart}]({chart_folder(name)}/{chart}.svg)" for chart in charts.chart_names(run)}
    sweeps = [image for chart, image in shown.items() if charts.is_sweep(run, chart)]
    bars = [image for chart, image in shown.items() if not charts.is_sweep(run, chart)]
    folded = [kernel_table.folded("Charts", "\n".join(bars))] if bars else []
    command = f"`python -m benchmarks report benchmarks/results/{name}.json` prints every implementation."
    parts = [kernel_table.provenance(run), kernel_table.summary(run), command, *folded, *sweeps]
    return "\n\n".join(parts)


def records_in(document: str) -> list[str]:
    """The names of the records that the document has markers for, in its order."""
    return re.findall(r"^<!-- record (\S+) -->$", document, re.MULTILINE)


def records_of(document: str, results: Path) -> dict[str, RunRecord]:
    """The records of kernels that the document has markers for and `results` has files for, by name."""
    paths = {name: results / f"{name}.json" for name in records_in(document)}
    return {name: record.load(path, RunRecord) for name, path in paths.items() if path.exists()}


def page(text: str, run: RunRecord | TrainRecord, path: Path) -> str:
    """The page with the section of the record at `path`, and the tables over all records or of all codes."""
    name = record_name(path)
    kind = "training" if isinstance(run, TrainRecord) else "record"
    parts = {f"{kind} {name}": section(run, name), "codes": train_table.codes()}
    if isinstance(run, RunRecord):
        runs = records_of(text, path.resolve().parent.parent)
        parts |= {"overview": overview(runs), "implementations": implementations(runs)}
    for marker, inside in parts.items():
        begin = f"<!-- {marker} -->"
        if begin in text or marker.endswith(name):
            text = regions.put(text, begin, "<!-- end -->", inside)
    return text


def write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("record", type=Path, metavar="RECORD.json")
    parser.add_argument("--into", type=Path, required=True, metavar="PAGE.md")
    given = parser.parse_args(arguments)
    run, document = load(given.record), given.into
    new = page(document.read_text(encoding="utf-8"), run, given.record)
    beside = document.parent / chart_folder(record_name(given.record))
    drawn = {beside / f"{chart}.svg": svg for chart, svg in draw(run).items()}
    write({**drawn, document: new})
    print(f"wrote the section {record_name(given.record)} of {document} and {len(drawn)} charts")


if __name__ == "__main__":
    main()
