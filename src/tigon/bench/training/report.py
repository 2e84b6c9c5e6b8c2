"""Tables and charts of a record of training steps, in a folder or in the docs."""

from __future__ import annotations

from pathlib import Path

from tigon.bench.report import chart_folder, drawn_charts, record_name, write_files
from tigon.bench.table import replace_section
from tigon.bench.training import charts, table
from tigon.bench.training.record import TrainRecord, load
from tigon.errors import BenchError


def report(run: TrainRecord, folder: Path) -> None:
    """Write table.md and the charts into `folder`. Raises BenchError without matplotlib or if it cannot be written."""
    drawn = {folder / f"{name}.svg": svg for name, svg in drawn_charts(lambda: charts.draw(run)).items()}
    write_files({folder / "table.md": table.section(run) + "\n", **drawn})
    print(f"wrote {folder / 'table.md'} and {len(drawn)} charts")


def report_file(path: Path, folder: Path | None, document: Path | None = None) -> None:
    """Print the tables of a record; write `report` into `folder` and the record's section into `document`, if given."""
    run = load(path)
    print(table.section(run))
    if folder is not None:
        report(run, folder)
    if document is not None:
        into_document(run, path, document)


def into_document(run: TrainRecord, path: Path, document: Path) -> None:
    """Write the record's section between `<!-- training NAME -->` and `<!-- end -->`, and its charts next to the page.

    The charts go to img/benchmarks/NAME.
    """
    name = record_name(path)
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{document} cannot be read: {error.strerror}.") from None
    new = replace_section(text, f"training {name}", section(run, name))
    if "<!-- codes -->" in text:
        new = replace_section(new, "codes", table.codes())
    beside = document.parent / chart_folder(name)
    drawn = {beside / f"{chart}.svg": svg for chart, svg in drawn_charts(lambda: charts.draw(run)).items()}
    write_files({**drawn, document: new})
    print(f"wrote the section {name} of {document} and {len(drawn)} charts")


def section(run: TrainRecord, name: str) -> str:
    """The record's section in the docs: tables, then charts."""
    images = [f"![{chart}]({chart_folder(name)}/{chart}.svg)" for chart in charts.chart_names(run)]
    return "\n\n".join([table.section(run), *images])
