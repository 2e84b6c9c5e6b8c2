"""The chart of `tigon plan --plot`: components by batch and by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tigon.errors import UsageError
from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import GIB
from tigon.planner.request import Request, text_config
from tigon.planner.search.recommend import Plan, label
from tigon.planner.simulate.ledger import COMPONENTS
from tigon.report.chart import INK, LIMIT, MEMORY_COLOURS, MUTED, new_figure, shared_legend, svg, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 7


def write(plan: Plan, folder: Path) -> list[Path]:
    """Draw the chart as SVG and PNG into `folder`; returns the files written. Raises UsageError if the folder cannot be
    written to."""
    figure = _components(plan)
    written = [folder / "memory.svg", folder / "memory.png"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(svg(figure, "memory") + "\n", encoding="utf-8")
        figure.savefig(written[1], dpi=160)
    except OSError as error:
        raise UsageError(f"--plot {folder}: {error.strerror or error}; name a folder that you can write to.") from None
    return written


def _axes_of(plan: Plan) -> list[tuple[str, list[int], Callable[[int], Request]]]:
    """(label, values, function from a value to its request) for batch and for sequence length.

    The values continue beyond the memory limit if there is one.
    """
    request, reach = plan.option.request, plan.max_sizes
    positions = getattr(text_config(request.config), "max_position_embeddings", None) or 1 << 20
    return [
        (
            f"samples of {request.seq:,} tokens",
            _values(max(request.batch, round(1.3 * reach.largest_batch)), unit=1),
            lambda n: replace(request, batch=n),
        ),
        (
            f"tokens in each of {request.batch:,} sample{'s' if request.batch > 1 else ''}",
            _values(min(positions, max(request.seq, round(1.3 * reach.longest_sequence))), unit=64),
            lambda n: replace(request, seq=n),
        ),
    ]


def _values(most: int, *, unit: int) -> list[int]:
    """POINTS evenly spaced values up to `most`."""
    even = {max(unit, round(most * i / POINTS / unit) * unit) for i in range(POINTS + 1)}
    return sorted(min(value, most) for value in even)


def _draw_limit(axes: Axes, plan: Plan, top: float) -> None:
    """Draws the memory limit as a line. Its name goes in the legend, because next to the line it would cover curves."""
    limit = plan.gpu.memory_bytes / GIB
    name = plan.gpu.name if "GiB" in plan.gpu.name else f"{plan.gpu.name}, {limit:.0f} GiB"
    axes.axhline(limit, color=LIMIT, lw=1.2, ls="--", label=name)
    axes.set_ylim(0, max(top, limit) * 1.12)


def _components(plan: Plan) -> Figure:
    figure: Figure
    figure, panels = new_figure(2, columns=2, height=3.8)
    for axes, (title, values, at) in zip(panels, _axes_of(plan), strict=True):
        predictions = [estimate(at(n), gpu=plan.gpu, evaluation=False) for n in values]
        _stack(axes, values, predictions)
        axes.plot(values, [e.device_bytes / GIB for e in predictions], color=INK, lw=1, ls=":", label="on the device")
        _draw_limit(axes, plan, max(e.device_bytes for e in predictions) / GIB)
        axes.set(xlabel=title, ylabel="GiB at the peak", xlim=(values[0], values[-1]))
        whole_numbers(axes)
    shared_legend(figure, panels, order=COMPONENTS, reverse=True, loc="outside right center")
    figure.suptitle(label(plan.option.request.settings), fontsize=9, color=MUTED)
    return figure


def _stack(axes: Axes, values: Sequence[int], predictions: Sequence[Estimate]) -> None:
    shown = [name for name in COMPONENTS if any(e.components[name] for e in predictions)]
    axes.stackplot(
        values,
        [[e.components[name] / GIB for e in predictions] for name in shown],
        labels=shown,
        colors=[MEMORY_COLOURS[name][0] for name in shown],
        lw=0,
    )
