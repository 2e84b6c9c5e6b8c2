"""Draws the report's charts as SVG text. Charts contain no text of the user's, so they cannot contain its markup."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tigon.objectives.metric_sections import MetricSection
from tigon.report.chart import GRID, INK, MUTED, new_figure, shared_legend, svg, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCENT, SECOND, BASELINE = "#c2410c", "#0f766e", MUTED
_COLOURS = (ACCENT, SECOND, "#4338ca", "#a16207", "#be185d")


def draw(
    records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], section: MetricSection | None
) -> dict[str, str]:
    """Draw every chart that this run has data for.

    Args:
        records: The records of metrics.jsonl.
        summary: A mapping with `unigram_entropy` in nats and the rows of `comparison`.
        section: The metrics of the run's objective, whose chart replaces the chart of the loss.

    Returns:
        The SVG text of each chart by its name.
    """
    train = [record for record in records if record["event"] == "train"]
    eval_records = [record for record in records if record["event"] == "eval"]
    charts = {}
    if section is not None and train:
        charts[section.name] = _metrics(section, train, eval_records, summary["unigram_entropy"])
    elif train:
        charts["loss"] = _loss(train, eval_records, summary["unigram_entropy"])
    if len(train) > 1:  # a line needs two points
        charts["throughput"] = _throughput(train)
    measured = [row for row in summary["comparison"] if not row["error"]]
    if measured:
        charts["comparison"] = _comparison(measured)
    return charts


def _loss(train: Sequence[Any], eval_records: Sequence[Any], entropy: float) -> str:
    figure, (axes,) = new_figure(1, columns=1)
    one = "o" if len(train) == 1 else ""  # a line needs two points
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], marker=one, color=ACCENT, label="training")
    if eval_records:
        steps, losses = [r["step"] for r in eval_records], [r["eval_loss"] for r in eval_records]
        axes.plot(steps, losses, "o-", color=SECOND, ms=4, label="eval")
    axes.axhline(entropy, color=BASELINE, ls="--", lw=1, label=f"unigram entropy of the eval text, {entropy:.2f}")
    _along_steps(axes, "loss (nats per token)")
    shared_legend(figure, [axes], loc="outside upper center", ncols=3)  # inside it would cover lines on a phone
    return svg(figure, "loss")


def _metrics(section: MetricSection, train: Sequence[Any], eval_records: Sequence[Any], entropy: float | None) -> str:
    """One panel for each column with an axis, and one line for each row."""
    section = measured(section, [*train, *eval_records])
    panels = [(number, column) for number, column in enumerate(section.columns) if column.axis is not None]
    figure, all_axes = new_figure(len(panels), columns=len(panels))
    colours = iter(itertools.cycle(_COLOURS))
    has_eval = False
    for row in section.rows:
        colour = BASELINE if row.is_baseline else next(colours)
        for axes, (number, column) in zip(all_axes, panels, strict=True):
            if number >= len(row.metrics):
                continue
            name, scale = row.metrics[number], 100 if column.is_share else 1
            points = _points(train, name, scale)
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=row.label)
            eval_points = _points(eval_records, name, scale)
            if eval_points:
                axes.plot(*zip(*eval_points, strict=True), "o", color=colour, ms=4)
                has_eval = True
    first = all_axes[0]
    if has_eval:
        first.plot([], [], "o", color=INK, ms=4, label="eval")
    for axes, (_, column) in zip(all_axes, panels, strict=True):
        _along_steps(axes, column.axis)
        if column.is_share:
            axes.set(ylim=(0, None))
        elif column.is_nats:
            axes.axhline(entropy, color=BASELINE, ls="--", lw=1, label="unigram entropy")
    shared_legend(figure, all_axes, loc="outside upper center", ncols=6)
    return svg(figure, section.name)


def measured(section: MetricSection, records: Sequence[Any]) -> MetricSection:
    """The section without the columns of which no record has a value, such as the KL without a reference."""
    has = [
        any(value_of(record, row.metrics[number]) is not None for record in records for row in section.rows[:1])
        for number in range(len(section.columns))
    ]
    rows = (
        replace(row, metrics=tuple(name for name, kept in zip(row.metrics, has, strict=False) if kept))
        for row in section.rows
    )
    columns = tuple(column for column, kept in zip(section.columns, has, strict=True) if kept)
    return replace(section, columns=columns, rows=tuple(rows)) if any(has) else section


def _points(records: Sequence[Any], name: str, scale: int) -> list[tuple[int, float]]:
    values = ((record["step"], value_of(record, name)) for record in records)
    return [(step, scale * value) for step, value in values if value is not None]


def value_of(record: Mapping[str, Any], name: str) -> float | None:
    """A metric of a record. TRL puts `eval_` in front of the names in records of evaluations."""
    value: float | None = record.get(name, record.get(f"eval_{name}"))
    return value


def _throughput(train: Sequence[Any]) -> str:
    figure, (speed, memory) = new_figure(2, columns=2)
    steps = [r["step"] for r in train]
    speed.plot(steps, [r["tokens_per_s"] for r in train], color=ACCENT)
    _along_steps(speed, "tokens/s")
    speed.set_ylim(0, None)
    memory.plot(steps, [r["memory_bytes"] / 2**30 for r in train], color=ACCENT, label="now")
    memory.plot(steps, [r["memory_peak_bytes"] / 2**30 for r in train], color=SECOND, ls="--", label="peak so far")
    top = 1.15 * max(max(r["memory_bytes"], r["memory_peak_bytes"]) for r in train) / 2**30
    _along_steps(memory, "memory (GiB)")
    memory.set_ylim(0, top or None)
    memory.legend(frameon=False)
    return svg(figure, "throughput")


def _along_steps(axes: Axes, label: str | None) -> None:
    axes.set(xlabel="step", ylabel=label)
    whole_numbers(axes, most=8, steps=(1, 2, 5, 10))


def _comparison(rows: Sequence[Any]) -> str:
    figure, (memory, speed) = new_figure(2, columns=2)
    # Break long labels into two lines, so that three of them fit under the bars.
    labels = [row["label"].replace("all but linear", "all but\nlinear").replace("all of", "all of\n") for row in rows]
    at_rest = [row["at_rest_bytes"] / 2**20 for row in rows]
    step = [(row["peak_bytes"] - row["at_rest_bytes"]) / 2**20 for row in rows]
    memory.bar(labels, at_rest, color=GRID, label="weights and optimizer")
    bars = memory.bar(labels, step, bottom=at_rest, color=ACCENT, label="step")
    peaks = [row["peak_bytes"] / 2**20 for row in rows]
    memory.bar_label(bars, labels=[f"{peak:,.{0 if peak >= 100 else 1}f}" for peak in peaks], padding=2, color=INK)
    memory.set(ylabel="peak memory of a step (MiB)", ylim=(0, max(r["peak_bytes"] for r in rows) / 2**20 * 1.3))
    memory.legend(frameon=False, loc="upper right")
    medians, ranges = [row["tokens_per_s"] for row in rows], [row["tokens_per_s_range"] for row in rows]
    pairs = list(zip(medians, ranges, strict=True))
    spread = [[median - low for median, (low, _) in pairs], [high - median for median, (_, high) in pairs]]
    bars = speed.bar(labels, medians, color=SECOND, yerr=spread, ecolor=MUTED, capsize=3)
    speed.bar_label(bars, labels=[f"{median:,.0f}" for median in medians], padding=2, color=INK)
    speed.set(ylabel="tokens/s, median and range", ylim=(0, max(high for _, high in ranges) * 1.15))
    return svg(figure, "comparison")
