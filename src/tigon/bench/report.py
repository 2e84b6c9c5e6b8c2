"""`tigon bench report`: table and charts of a record, on any machine, and the record's section in the docs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tigon._install import install_command
from tigon.bench import charts, table
from tigon.bench.record import RunRecord, load
from tigon.errors import BenchError


def report(run: RunRecord, folder: Path) -> None:
    """Write table.md and the charts into `folder`. Raises BenchError without matplotlib or if it cannot be written."""
    drawn = {folder / f"{name}.svg": svg for name, svg in drawn_charts(lambda: charts.draw(run)).items()}
    write_files({folder / "table.md": table.section(run) + "\n", **drawn})
    print(f"wrote {folder / 'table.md'} and {len(drawn)} charts")


def report_file(path: Path, folder: Path | None, document: Path | None = None) -> None:
    """Print the table of a record; write `report` into `folder` and the record's section into `document`, if given."""
    run = load(path)
    print(table.provenance(run), table.summary(run), sep="\n\n")
    if folder is not None:
        report(run, folder)
    if document is not None:
        into_document(run, path, document)


def record_name(path: Path) -> str:
    """A record's name in the docs: the GPU's folder and the file name without its suffix."""
    return f"{path.parent.name}/{path.stem}"


def into_document(run: RunRecord, path: Path, document: Path) -> None:
    """Write the table and charts of the record at `path` between its markers, and the tables over all records.

    Charts go to img/benchmarks/NAME next to the document. The other records of the document are read from the folders
    next to that of `path`; one that does not exist is left out of the tables over all records.
    """
    name = record_name(path)
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{document} cannot be read: {error.strerror}.") from None
    new = table.replace_section(text, f"record {name}", section(run, name))
    runs = records_of(text, path.resolve().parent.parent)
    for marker, made in (("overview", table.overview), ("implementations", table.implementations)):
        if f"<!-- {marker} -->" in text:
            new = table.replace_section(new, marker, made(runs))
    beside = document.parent / chart_folder(name)
    drawn = {beside / f"{chart}.svg": svg for chart, svg in drawn_charts(lambda: charts.draw(run)).items()}
    write_files({**drawn, document: new})
    print(f"wrote the section {name} of {document} and {len(drawn)} charts")


def records_of(document: str, results: Path) -> dict[str, RunRecord]:
    """The records that the document has markers for and `results` has files for, by name."""
    paths = {name: results / f"{name}.json" for name in table.records_in(document)}
    return {name: load(path) for name, path in paths.items() if path.exists()}


def section(run: RunRecord, name: str) -> str:
    """The record's section in the docs: table, all figures, charts. Charts of sweeps are shown, bar charts folded."""
    images = {chart: f"![{chart}]({chart_folder(name)}/{chart}.svg)" for chart in charts.chart_names(run)}
    sweeps = [image for chart, image in images.items() if charts.is_sweep(run, chart)]
    bars = [image for chart, image in images.items() if not charts.is_sweep(run, chart)]
    parts = [table.section(run), *([table.folded("Charts", "\n".join(bars))] if bars else []), *sweeps]
    return "\n\n".join(parts)


def chart_folder(name: str) -> str:
    """The folder of the charts of a record's section, seen from the page."""
    return f"img/benchmarks/{name}"


def drawn_charts(draw: Callable[[], dict[str, str]]) -> dict[str, str]:
    """`draw()`; raises BenchError if matplotlib is not installed."""
    try:
        return draw()
    except ModuleNotFoundError as error:
        raise BenchError(
            f"charts need {error.name}, which is not installed; run {install_command('train')}, or draw them on "
            "another machine with `tigon bench report FILE.json --plot DIR`."
        ) from None


def write_files(files: dict[Path, str]) -> None:
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{path} cannot be written: {error.strerror}; choose another place.") from None
