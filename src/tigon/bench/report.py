"""`tigon bench report`: tables and charts of a record, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tigon._install import install_command
from tigon.bench import charts, record, table
from tigon.bench.record import Record, RunRecord
from tigon.bench.training import charts as train_charts
from tigon.bench.training import table as train_table
from tigon.bench.training.record import TrainRecord
from tigon.errors import BenchError


def load(path: Path) -> RunRecord | TrainRecord:
    """Read a record of either command. Raises BenchError if the file has none."""
    training = record.kind_of(path) == TrainRecord.kind
    return record.load(path, TrainRecord) if training else record.load(path, RunRecord)


def section(run: Record) -> str:
    """The record as Markdown, without charts."""
    return train_table.section(run) if isinstance(run, TrainRecord) else table.section(_kernels(run))


def draw(run: Record) -> dict[str, str]:
    """Name -> SVG. Raises BenchError if matplotlib is not installed."""
    if isinstance(run, TrainRecord):
        return drawn_charts(lambda: train_charts.draw(run))
    return drawn_charts(lambda: charts.draw(_kernels(run)))


def _kernels(run: Record) -> RunRecord:
    assert isinstance(run, RunRecord), f"{run.kind} has no table"
    return run


def report(run: Record, folder: Path) -> None:
    """Write table.md and the charts into `folder`. Raises BenchError without matplotlib or if it cannot be written."""
    drawn = {folder / f"{name}.svg": svg for name, svg in draw(run).items()}
    write_files({folder / "table.md": section(run) + "\n", **drawn})
    print(f"wrote {folder / 'table.md'} and {len(drawn)} charts")


def report_file(path: Path, folder: Path | None) -> None:
    """Print the tables of a record, and write `report` into `folder`, if given."""
    run = load(path)
    if isinstance(run, TrainRecord):
        print(train_table.section(run))
    else:
        print(table.provenance(run), table.summary(run), sep="\n\n")
    if folder is not None:
        report(run, folder)


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
