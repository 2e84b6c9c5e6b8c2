"""Draws the live memory of one or two runs as one SVG: one panel per run, side by side on one scale.

The horizontal axis counts allocations and frees instead of time, so short steps stay visible and loading the model does
not fill the page. A block below a thousandth of the peak counts a fiftieth (`Timeline.places`). profile.html can show
time too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tigon.profiler.render.result import Profile
from tigon.profiler.timeline.timeline import CATEGORIES, Phase, Timeline, title
from tigon.report.chart import INK, MEMORY_COLOURS, MUTED, new_figure, shared_legend, svg
from tigon.units import in_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 400
"""Number of columns in a panel. Each shows the lowest and the highest of its events."""
BAND_COLOURS = {
    "load": "#f3f4f6",
    "forward": "#eff6ff",
    "loss": "#fff1e6",
    "backward": "#f0fdf4",
    "optimizer": "#faf5ff",
}
_LINE_CHARACTERS, _PANEL_CHARACTERS = 96, 130
"""Letters per line under a panel, and for the names of the bands across it."""


def draw(profiles: Sequence[Profile]) -> str:
    """The SVG. Texts come from the user, so mathematics in them is not parsed, and matplotlib escapes SVG markup."""
    figure, panels = new_figure(len(profiles), columns=len(profiles), height=5.2)
    figure.set_size_inches(8.4 if len(profiles) == 1 else 14, 5.2)
    top = 1.25 * max(_highest(profile) for profile in profiles)
    unit, size = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20)
    for axes, profile in zip(panels, profiles, strict=True):
        places = [0.0, *profile.timeline.places()]
        _stack(axes, profile.timeline, places, size)
        _bands(axes, profile, places, top=top / size, size=size)
        _mark_peak(axes, profile, places, size)
        axes.set(xlim=(0, places[-1]), ylim=(0, top / size), ylabel=unit, xticks=[])
        axes.set_title(_wrapped(profile.timeline.label), fontsize=9, color=INK, loc="left", parse_math=False)
        axes.set_xlabel(_caption(profile), fontsize=7.5, color=MUTED, loc="left", parse_math=False)
    order = (*map(title, CATEGORIES), "predicted")
    shared_legend(
        figure,
        panels,
        order=order,
        loc="outside upper left",
        ncols=len(order),
        columnspacing=1,
        handlelength=1.4,
        fontsize=8,
    )
    return _with_two_decimals(svg(figure, "timeline"))


def _with_two_decimals(drawing: str) -> str:
    """Cut the coordinates of the paths after two decimals instead of six, which makes the file a third as large."""
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), drawing)


def sampled(totals: Sequence[int], columns: int) -> list[int]:
    """Choose the events to draw, because a run has far more events than a chart has pixels.

    Args:
        totals: Live bytes after each event.
        columns: Number of sections of equal length that the events are divided into.

    Returns:
        Indexes into `totals`, ascending: the lowest and the highest event of each section, and the first and the last
        event of all.
    """
    n = len(totals)
    kept = {0, n - 1} if n else set()
    width = max(1, n / columns)
    for column in range(min(columns, n)):
        stretch = range(int(column * width), min(n, max(int((column + 1) * width), int(column * width) + 1)))
        kept |= {min(stretch, key=totals.__getitem__), max(stretch, key=totals.__getitem__)}
    return sorted(kept)


def _highest(profile: Profile) -> int:
    phases = profile.predicted.phases.values() if profile.predicted else ()
    highest: int = max(profile.peak.nbytes, *phases, 0)
    return highest


# `places` below has one entry for the beginning and one after each event.


def _stack(axes: Axes, timeline: Timeline, places: Sequence[float], size: int) -> None:
    """Fill each category down to zero, the highest first, so that the lower categories cover it."""
    totals = timeline.totals()
    wanted = set(sampled(totals, COLUMNS))
    rows = [list(live.values()) for i, live in enumerate(timeline.live_bytes()) if i in wanted]
    xs = [places[i + 1] for i in sorted(wanted)]
    for number, name in reversed(list(enumerate(CATEGORIES))):
        if name in timeline.categories:
            heights = [sum(row[: number + 1]) / size for row in rows]
            corners = _outline(xs, heights, least=max(totals) / size / 2000)
            axes.fill(*zip(*corners, strict=True), color=MEMORY_COLOURS[name][0], lw=0, label=title(name))


def _outline(xs: Sequence[float], heights: Sequence[float], *, least: float) -> list[tuple[float, float]]:
    """Corners of a step outline closed along zero, with a step at each of `xs` but no changes below `least`."""
    corners = [(xs[0], 0.0), (xs[0], heights[0])]
    for x, height in zip(xs, heights, strict=True):
        if abs(height - corners[-1][1]) >= least:
            corners += [(x, corners[-1][1]), (x, height)]
    return [*corners, (xs[-1], corners[-1][1]), (xs[-1], 0.0)]


def _bands(axes: Axes, profile: Profile, places: Sequence[float], *, top: float, size: int) -> None:
    """Draw the phases behind the stack, their names above it, and the predicted peak of each phase."""
    labelled = False
    for band in profile.timeline.bands():
        start, end = places[band.start], places[band.end]
        axes.axvspan(start, end, color=BAND_COLOURS[band.name], lw=0, zorder=-1)
        number = str(band.step or "")
        room = (end - start) / places[-1] * _PANEL_CHARACTERS
        name = next((name for name in (f"{band.name} {number}", f"{band.name[0]}{number}") if len(name) < room), "")
        axes.text((start + end) / 2, top * 0.985, name, ha="center", va="top", fontsize=7, color=MUTED)
        if profile.predicted and profile.predicted.phases.get(band.name):
            label = "" if labelled else "predicted"
            axes.hlines(profile.predicted.phases[band.name] / size, start, end, color=INK, lw=1.3, ls="--", label=label)
            labelled = True


def _mark_peak(axes: Axes, profile: Profile, places: Sequence[float], size: int) -> None:
    peak = profile.peak
    place = places[peak.event + 1]
    right = place > places[-1] / 2
    axes.plot([place], [peak.nbytes / size], "o", ms=5, color=INK)
    axes.annotate(
        f"peak {in_bytes(peak.nbytes)}, {phase_title(peak.phase)}",
        (place, peak.nbytes / size),
        xytext=(-6 if right else 6, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
        color=INK,
        parse_math=False,
    )


def _caption(profile: Profile) -> str:
    peak, calls = profile.peak, profile.timeline.call_table
    shares = [f"{title(name)} {in_bytes(size)}" for name, size in peak.components.items() if size]
    made_of = ", ".join(share.replace(" ", "\N{NO-BREAK SPACE}") for share in shares)
    lines = ["allocations and releases, in order", "", _wrapped(f"at the peak: {made_of}")]
    lines += [
        _cut(f"{in_bytes(piece.nbytes)} {title(piece.category)}, {piece.count} x {calls[piece.call]}")
        for piece in peak.pieces[:3]
    ]
    lines.append(_cut(f"reached by {in_bytes(peak.reached_by.nbytes)}: {calls[peak.reached_by.call]}"))
    if profile.predicted:
        lines.append(_cut(f"dashed: the peak of each phase as predicted, {profile.predicted.source}"))
    return "\n".join(lines)


def phase_title(phase: Phase | None) -> str:
    """A phase as text."""
    if phase is None:
        return "before the run"
    layer = "" if phase.layer is None else f", layer {phase.layer}"
    recomputed = ", recomputing" if phase.recomputed else ""
    return phase.name + ("" if phase.step == 0 else f" of step {phase.step}") + layer + recomputed


def _wrapped(text: str) -> str:
    """Wrap to two lines instead of cutting, because the difference between two runs is often at the end."""
    return "\n".join(textwrap.wrap(text, _LINE_CHARACTERS, max_lines=2, placeholder="…"))


def _cut(text: str) -> str:
    return text if len(text) <= _LINE_CHARACTERS else text[: _LINE_CHARACTERS - 1] + "…"
