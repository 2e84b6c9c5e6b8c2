"""The charts of a sweep as SVG: lines along an axis of numbers, and a bar per point along any other axis.

A bar without a figure has the point's status, such as OOM. Lines mark out of memory with a cross. Names come from the
sweep file, so mathematics in them is not parsed, and matplotlib escapes them in the SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from tigon.report.chart import INK, LIMIT, horizontal_bars, new_figure, svg, whole_numbers
from tigon.sweep import failures
from tigon.sweep.points import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

# Colour and marker per variant: readers can tell variants apart without colour. The usual names of the kernels look the
# same in every sweep. Other names get the remaining looks in order.
LOOKS = (
    ("#6b7280", "o"), ("#0f766e", "s"), ("#c2410c", "^"), ("#1d4ed8", "D"),
    ("#7e22ce", "v"), ("#a16207", "<"), ("#be185d", ">"), ("#4d7c0f", "P"),
)  # fmt: skip
_OWN_LOOKS = {"unpatched": 0, "all but linear CE": 1, "tigon": 2, "Liger": 3}
GIB = 1 << 30
MOST_CHARTS = 12
# How many letters fit at the charts' width and font size. Longer names are shortened; the table has them in full.
_LEGEND_LINE, _LEGEND_NAME, _LEGEND_KEY = 112, 90, 7
_ROW_NAME, _TITLE = 60, 110
_NEAR = 0.16  # fraction of a line chart's axis: numbers of six digits overlap at a smaller distance
_LEGEND_LINE_INCHES = 0.17
_AXIS_WORDS = {
    "train.batch_size": "rows in a micro-batch",
    "data.sequence_length": "tokens in a row",
    "model.name": "model",
    "train.gradient_accumulation": "micro-batches in a step",
    "sharding.gpus": "GPUs",
}


def peak_gib(row: Row) -> float | None:
    """Peak of the memory that PyTorch allocated, in GiB."""
    peak_bytes = row.get("peak_allocated_bytes")
    return None if peak_bytes is None else peak_bytes / GIB


QUANTITIES: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("peak memory (GiB)", peak_gib),
    ("tokens/s", lambda row: row.get("tokens_per_s")),
)
"""What every chart shows: the label of an axis, and the value of a point."""


@dataclass(frozen=True)
class Slice:
    """The points along one axis, with the other axes fixed."""

    axis: str
    fixed: Mapping[str, Any]
    values: tuple[Any, ...]
    rows: Mapping[tuple[str, Any], Row]
    """(variant, value) -> point"""

    @property
    def numeric(self) -> bool:
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)

    def ordered(self, variants: Sequence[str]) -> list[Row]:
        """The points by value, and of one value by variant."""
        places = ((variant, value) for value in self.values for variant in variants)
        return [self.rows[place] for place in places if place in self.rows]

    @property
    def title(self) -> str:
        return ", ".join(f"{axis_words(key)}: {_tick(value)}" for key, value in self.fixed.items())


def axis_words(key: str) -> str:
    """An axis of the grid in words."""
    return _AXIS_WORDS.get(key, short(key).replace("_", " "))


def slices(results: Mapping[str, Any]) -> Iterator[Slice]:
    """One slice per axis with at least two values and per combination of the other axes' values."""
    for axis in results["axes"]:
        groups: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
        for row in results["points"]:
            if axis in row["axes"]:
                fixed = tuple((key, _hashable(value)) for key, value in row["axes"].items() if key != axis)
                groups.setdefault(fixed, []).append(row)
        for fixed, rows in groups.items():
            values = tuple(dict.fromkeys(_hashable(row["axes"][axis]) for row in rows))
            if len(values) >= 2:
                by_place = {(row["variant"], _hashable(row["axes"][axis])): row for row in rows}
                ordered = tuple(sorted(values)) if all(isinstance(value, (int, float)) for value in values) else values
                yield Slice(axis, dict(fixed), ordered, by_place)


def _hashable(value: object) -> Any:
    return str(value) if isinstance(value, (list, dict)) else value


def names(results: Mapping[str, Any]) -> list[str]:
    """The names of the charts that have figures."""
    return [name for name, _ in _planned(results)]


def draw(results: Mapping[str, Any]) -> dict[str, str]:
    """Draw every chart: name -> SVG."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        return {name: make(name) for name, make in _planned(results)}


def _planned(results: Mapping[str, Any]) -> list[tuple[str, Callable[[str], str]]]:
    charts: list[tuple[str, Callable[[str], str]]] = []
    for number, part in enumerate(slices(results)):
        if not any(row["status"] == failures.OK for row in part.rows.values()) or len(charts) >= MOST_CHARTS:
            continue
        name = f"{short(part.axis).replace('_', '-')}-{number}"
        if part.numeric:
            charts.append((f"lines-{name}", partial(lines, results, part)))
        else:
            charts.append((f"bars-{name}", partial(bars, results, part.ordered(results["variants"]), part=part)))
    if not charts and any(row["status"] == failures.OK for row in results["points"]):
        charts.append(("points", partial(bars, results, results["points"])))
    return charts


# --- lines -----------------------------------------------------------------------------------------------------------


def lines(results: Mapping[str, Any], part: Slice, name: str) -> str:
    """Peak memory (measured and predicted) and tokens/s along a numeric axis."""
    figure, (memory, speed) = new_figure(2, columns=2, height=3.5)
    predicted = False
    for variant in _variants(results, part):
        color, marker = _look(results, variant)
        own = [(value, part.rows[variant, value]) for value in part.values if (variant, value) in part.rows]
        ok = [(value, row) for value, row in own if row["status"] == failures.OK]
        look: dict[str, Any] = {"color": color, "marker": marker, "ms": 4, "lw": 1.6}
        memory.plot([v for v, _ in ok], [peak_gib(row) for _, row in ok], label=_label(variant), **look)
        speed.plot([v for v, _ in ok], [row["tokens_per_s"] for _, row in ok], **look)
        forecast = [(value, row["predicted_allocated_bytes"]) for value, row in own if row["predicted_allocated_bytes"]]
        if forecast:
            predicted = True
            memory.plot([v for v, _ in forecast], [b / GIB for _, b in forecast], color=color, ls=":", lw=1)
        ran_out_at = [value for value, row in own if row["status"] in (failures.OUT_OF_MEMORY, failures.SKIPPED)]
        if ran_out_at:
            zeros = [0] * len(ran_out_at)
            memory.plot(ran_out_at, zeros, color=color, marker="x", ls="", ms=6, mew=1.6, clip_on=False)
    for axes, (label, _) in zip((memory, speed), QUANTITIES, strict=True):
        _number_axis(axes, part)
        axes.set_ylabel(label, color=INK)
        axes.set_ylim(0, None)
    ran_out = any(row["status"] == failures.OUT_OF_MEMORY for row in part.rows.values())
    notes = ["dotted: predicted" if predicted else "", "×: out of memory, or larger" if ran_out else ""]
    room = _TITLE - sum(len(note) + 3 for note in notes)
    notes = [shortened(part.title, room), *notes]
    memory.set_title(" · ".join(note for note in notes if note), color=INK, fontsize=8, loc="left")
    _limit(memory, results)
    _legend(figure, memory)
    return svg(figure, name)


def _number_axis(axes: Axes, part: Slice) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    values = sorted(float(value) for value in part.values)
    least, most = values[0], values[-1]
    logarithmic = least > 0 and most >= 8 * least
    if logarithmic:
        axes.set_xscale("log", base=2)

    def apart(a: float, b: float) -> bool:
        return min(a, b) <= 0.8 * max(a, b) if logarithmic else abs(a - b) > _NEAR * (most - least)

    shown: list[float] = []  # both ends, then from the largest down every value that would not overlap another
    for value in (most, least, *reversed(values)):
        if all(apart(value, other) for other in shown):
            shown.append(value)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e5 else f"{value:,.0f}"))
    if len(shown) > 5:
        axes.tick_params(axis="x", labelrotation=40)
    axes.set_xlabel(axis_words(part.axis), color=INK)


# --- one bar per point -----------------------------------------------------------------------------------------------


def bars(results: Mapping[str, Any], rows: Sequence[Row], name: str, *, part: Slice | None = None) -> str:
    """Peak memory and tokens/s, one bar per point. part: the points' slice, in which a variant has one colour."""
    figure, panels = new_figure(2, columns=2, height=max(2.4, 0.8 + 0.26 * len(rows)))
    own = [f"{row['variant']}, {_tick(row['axes'][part.axis])}" if part else row["id"] for row in rows]
    labels = [shortened(text, _ROW_NAME) for text in own]
    colours = [_look(results, row["variant"])[0] for row in rows] if part else LOOKS[2][0]
    for axes, (unit, value_of) in zip(panels, QUANTITIES, strict=True):
        values = [value_of(row) if row["status"] == failures.OK else None for row in rows]
        texts = [
            failures.mark(row["status"]) if value is None else f"{value:,.{1 if value < 1000 else 0}f}"
            for row, value in zip(rows, values, strict=True)
        ]
        horizontal_bars(axes, labels, [value or 0 for value in values], unit=unit, colours=colours, texts=texts)
    panels[1].tick_params(labelleft=False)  # the points are those of the first panel
    whole_numbers(panels[1])
    predicted = [
        (place, row["predicted_allocated_bytes"] / GIB)
        for place, row in enumerate(rows)
        if row["predicted_allocated_bytes"] and row["status"] == failures.OK
    ]
    memory, sizes = panels[0], [size for _, size in predicted]
    memory.plot(sizes, [place for place, _ in predicted], "|", color=INK, ms=9, mew=1.4)
    memory.set_xlim(0, 1.25 * max([*sizes, *(peak_gib(row) or 0 for row in rows)]))
    notes = [shortened(part.title, _TITLE) if part else "", "line: predicted" if predicted else ""]
    if limit_bytes := results["memory_limit_bytes"]:
        memory.axvline(limit_bytes / GIB, color=LIMIT, ls="--", lw=1)
        notes.append(f"dashed: limit of {limit_bytes / GIB:g} GiB")
    figure.suptitle(" · ".join(filter(None, notes)), x=0.01, ha="left", color=INK, fontsize=8)
    return svg(figure, name)


# --- small parts -----------------------------------------------------------------------------------------------------


def _variants(results: Mapping[str, Any], part: Slice) -> list[str]:
    return [name for name in results["variants"] if any(variant == name for variant, _ in part.rows)]


def _look(results: Mapping[str, Any], variant: str) -> tuple[str, str]:
    """(colour, marker)"""
    if variant in _OWN_LOOKS:
        return LOOKS[_OWN_LOOKS[variant]]
    used = {_OWN_LOOKS[name] for name in results["variants"] if name in _OWN_LOOKS}
    free = [look for number, look in enumerate(LOOKS) if number not in used]
    others = [name for name in results["variants"] if name not in _OWN_LOOKS]
    return free[others.index(variant) % len(free)]


def _limit(axes: Axes, results: Mapping[str, Any]) -> None:
    if results["memory_limit_bytes"]:
        limit_gib = results["memory_limit_bytes"] / GIB
        axes.axhline(limit_gib, color=LIMIT, ls="--", lw=1)
        look: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 7, "color": LIMIT}
        axes.text(1, limit_gib, f" limit {limit_gib:g} GiB", transform=axes.get_yaxis_transform(), **look)
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 1.08 * limit_gib))


def _legend(figure: Figure, axes: Axes) -> None:
    """Draw the legend below the panels, in as many columns as fit. The figure grows by the lines that this adds."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return
    labels = [shortened(label, _LEGEND_NAME) for label in labels]
    most = min(5, len(labels))
    ncols = max(1, min(most, _LEGEND_LINE // (max(map(cell_len, labels)) + _LEGEND_KEY)))
    more_lines = -(-len(labels) // ncols) - -(-len(labels) // most)
    figure.set_figheight(figure.get_figheight() + more_lines * _LEGEND_LINE_INCHES)
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=8)


def shortened(text: str, columns: int) -> str:
    """Shorten text to `columns` letters by cutting out the middle, because names often differ at their ends."""
    if cell_len(text) <= columns:
        return text
    return set_cell_size(text, 2 * columns // 3) + "…" + set_cell_size(text[::-1], columns // 3 - 1)[::-1]


def _label(text: str) -> str:
    """Protect a leading underscore, with which matplotlib would leave the line out of the legend."""
    return f"\u200b{text}" if text.startswith("_") else text


def _tick(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
