"""Compare plans of clusters with published runs: the tables of docs/cluster-plans.md.

    python -m benchmarks.pages.cluster_plans [--into docs/cluster-plans.md]

The runs are those of published_clusters.py. Nothing here is measured, and nothing was fitted to the runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages.published_clusters import RUNS, SOURCES, PublishedRun
from benchmarks.pages.regions import written
from tigon.planner.cluster.search import PlannedDivision, planned_division
from tigon.planner.gpus import GIB
from tigon.units import off_by

DOCUMENT = Path("docs/cluster-plans.md")


@dataclass(frozen=True)
class Compared:
    """A published run and its prediction."""

    run: PublishedRun
    planned: PlannedDivision

    @property
    def predicted(self) -> float:
        """The prediction in the run's metric."""
        if self.run.metric == "seconds per step":
            return self.planned.time.seconds
        return self.planned.tokens_per_s / self.run.cluster.gpus

    @property
    def time_error(self) -> float:
        """(predicted - published) / published, of the time of a step."""
        ratio = self.predicted / self.run.value
        return (ratio if self.run.metric == "seconds per step" else 1 / ratio) - 1


def compared(runs: Sequence[PublishedRun] = RUNS) -> list[Compared]:
    """Every run with its prediction."""
    return [Compared(run, planned_division(run.work, run.division, run.cluster)) for run in runs]


def _time_table(rows: Sequence[Compared]) -> str:
    lines = ["| source | run | metric | published | predicted | error of the time |", "|---|---|---|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row.run.source.name} | {row.run.name} | {row.run.metric} | {_number(row.run.value)} | "
            f"{_number(row.predicted)} | {100 * row.time_error:+.0f}% |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _memory_table(rows: Sequence[Compared]) -> str:
    lines = ["| run | published GiB | predicted GiB | error |", "|---|--:|--:|--:|"]
    for row in rows:
        if row.run.memory_gib is not None:
            gib = row.planned.memory.device / GIB
            lines.append(
                f"| {row.run.name} | {row.run.memory_gib:.1f} | {gib:.1f} | {off_by(gib, row.run.memory_gib)} |"
            )
    return "\n".join(lines)


def _not_fitting(rows: Sequence[Compared]) -> str:
    """The published runs that the plan would call too large for their GPUs."""
    lines = [
        f"- {row.run.source.name}, {row.run.name}: {row.planned.memory.device / GIB:.0f} of "
        f"{row.run.cluster.gpu.memory_bytes / GIB:.0f} GiB"
        for row in rows
        if not row.planned.fits
    ]
    return "\n".join([f"The plan calls {len(lines)} of the {len(rows)} runs too large, although they ran:", "", *lines])


def _summary(rows: Sequence[Compared]) -> str:
    lines = [
        "| source | runs | median error of the time, without its sign | smallest | largest |",
        "|---|--:|--:|--:|--:|",
    ]
    groups: list[tuple[str, list[Compared]]] = [
        (source.name, [row for row in rows if row.run.source is source]) for source in SOURCES
    ]
    for name, members in [*groups, ("all", list(rows))]:
        errors = [row.time_error for row in members]
        median = statistics.median(map(abs, errors))
        lines.append(
            f"| {name} | {len(members)} | {100 * median:.0f}% | {100 * min(errors):+.0f}% | {100 * max(errors):+.0f}% |"
        )
    return "\n".join(lines)


def _sources() -> str:
    return "\n".join(f"- **{one.name}**: [{one.title}]({one.url}), {one.place}." for one in SOURCES)


def _assumptions(rows: Sequence[Compared]) -> str:
    """Each assumption once, by source, with the number of its runs if it is not for all of them."""
    lines = []
    for source in SOURCES:
        members = [row.run for row in rows if row.run.source is source]
        counted = " ".join(f"{sentence[:-1]}{_of(count, members)}." for sentence, count in _counted(members))
        lines.append(f"- **{source.name}.** {counted}")
    return "\n".join(lines)


def _counted(runs: Sequence[PublishedRun]) -> list[tuple[str, int]]:
    sentences = [sentence for run in runs for sentence in run.assumed]
    return [(sentence, sentences.count(sentence)) for sentence in dict.fromkeys(sentences)]


def _of(count: int, runs: Sequence[PublishedRun]) -> str:
    return "" if count == len(runs) else f" ({count} of {len(runs)} runs)"


def parts(rows: Sequence[Compared]) -> dict[str, str]:
    """The generated regions of the page."""
    return {
        "summary": _summary(rows), "times": _time_table(rows), "memory": _memory_table(rows),
        "not fitting": _not_fitting(rows), "sources": _sources(), "assumptions": _assumptions(rows),
    }  # fmt: skip


def page(text: str, document: Path = DOCUMENT) -> str:
    """`text` of the page with its regions written again."""
    found = parts(compared())
    return written(text, "clusters", {name: lambda name=name: found[name] for name in found}, document)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path)
    document = parser.parse_args().into
    if document is None:
        print("\n\n".join(parts(compared()).values()))
        return
    document.write_text(page(document.read_text(encoding="utf-8"), document), encoding="utf-8")


if __name__ == "__main__":
    main()
