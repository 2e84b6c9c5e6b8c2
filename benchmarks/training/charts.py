"""Draws a record of training steps as SVG: for each case one chart of speed and memory, and one of the time by kind."""

from __future__ import annotations

import re

from tigon.bench.training.record import OVER, CaseRecord, StepMeasurement, TrainRecord
from tigon.bench.training.time_by_kind import KINDS
from tigon.report.chart import GRID, INK, MUTED, horizontal_bars, lay_flat, new_figure, svg

# One colour per code, as in the charts of the kernels.
CODE_COLOURS = {
    "hf": "#9ca3af",
    "compile": "#0f766e",
    "liger": "#1d4ed8",
    "trl": "#be185d",
    "tigon": "#c2410c",
    "tigon-fused": "#fb923c",
    "tigon-fp8-tensorwise": "#65a30d",
    "tigon-fp8-rowwise": "#a3e635",
    "tigon-fp8-graphs": "#365314",
    "tigon-graphs": "#7f1d1d",
    "tigon-graphs-fused": "#e11d48",
    "tigon-graphs-fused-add": "#fb7185",
}
KIND_COLOURS = {
    "matmuls": "#1d4ed8",
    "attention": "#7e22ce",
    "fused": "#c2410c",
    "optimizer": "#a16207",
    "rest": "#9ca3af",
    "idle": GRID,
}


def draw(run: TrainRecord) -> dict[str, str]:
    """Draw `speed-CASE` and `time-CASE` for every case with a measured variant: name -> SVG."""
    drawn = {}
    for case in run.cases:
        for kind, measured in _charted(case).items():
            chart = _speed if kind == "speed" else _time
            drawn[f"{kind}-{slug(case)}"] = chart(case, measured)
    return drawn


def chart_names(run: TrainRecord) -> list[str]:
    """What `draw` draws."""
    return [f"{kind}-{slug(case)}" for case in run.cases for kind in _charted(case)]


def _charted(case: CaseRecord) -> dict[str, list[StepMeasurement]]:
    """The kinds of charts of a case, with the measurements in each."""
    measured = [m for m in case.measurements if m.step_ms is not None]
    charts = {"speed": measured, "time": [m for m in measured if m.split_ms]}
    return {kind: shown for kind, shown in charts.items() if shown}


def slug(case: CaseRecord) -> str:
    """The case's id as a file name."""
    return re.sub(r"[^\w.-]+", "-", case.id)


def _speed(case: CaseRecord, measured: list[StepMeasurement]) -> str:
    figure, panels = new_figure(2, columns=2, height=1.0 + 0.28 * len(measured))
    colours = [CODE_COLOURS[m.code] for m in measured]
    for axes, unit, values in (
        (panels[0], "tokens/s", [m.tokens_per_s or 0.0 for m in measured]),
        (panels[1], "peak (GiB)", [(m.peak_bytes or 0) / 2**30 for m in measured]),
    ):
        horizontal_bars(axes, _labels(measured), values, unit=unit, colours=colours)
    if case.limit_bytes is not None:
        panels[1].axvline(case.limit_bytes / 2**30, color=INK, ls=":", lw=1.2)
    figure.suptitle(case.id + ("  (dotted: the limit)" if case.limit_bytes is not None else ""), color=INK)
    return svg(figure, f"speed-{slug(case)}")


def _time(case: CaseRecord, measured: list[StepMeasurement]) -> str:
    figure, (axes,) = new_figure(1, columns=1, height=1.2 + 0.28 * len(measured))
    left = [0.0] * len(measured)
    for kind in KINDS:
        values = [(m.split_ms or {}).get(kind) or 0.0 for m in measured]
        if any(values):
            look = {"color": KIND_COLOURS[kind], "edgecolor": MUTED, "lw": 0.3}
            axes.barh(_labels(measured), values, left=left, label=kind, **look)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set(xlabel="ms per optimizer step", xlim=(0, 1.05 * max(left) or 1.0))
    lay_flat(axes)
    axes.legend(frameon=False, fontsize=7, ncols=len(KINDS), loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.suptitle(case.id, color=INK)
    return svg(figure, f"time-{slug(case)}")


def _labels(measured: list[StepMeasurement]) -> list[str]:
    return [m.variant + (" (over the limit)" if m.status == OVER else "") for m in measured]
