"""Sets the look of every chart, and turns a chart into SVG text for a file or for a page.

A page has each of its charts twice, for a desktop and for a phone, and their colours follow the page's.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
LIMIT = "#b91c1c"
"""The colour of a memory limit."""
_PAGE: Mapping[str, tuple[str, str]] = {
    "ink": (INK, "#e5e7eb"),
    "soft": ("#4b5563", "#9ca3af"),
    "line": (GRID, "#374151"),
    "page": ("#ffffff", "#111827"),
    "card": ("#f9fafb", "#1f2937"),
    "band": ("rgba(31,41,55,.045)", "rgba(229,231,235,.06)"),
}
"""Style variables of a page, light and dark."""
PAGE_COLOURS: Mapping[str, str] = {INK: "ink", MUTED: "soft", GRID: "line", "#ffffff": "page"}
"""Colours of a chart -> the style variables that a page gives them."""
IN_THE_DARK: Mapping[str, str] = {
    "#c2410c": "#fb923c",
    "#0f766e": "#2dd4bf",
    "#4338ca": "#818cf8",
    "#a16207": "#eab308",
    "#be185d": "#f472b6",
    "#1d4ed8": "#60a5fa",
    "#7e22ce": "#c084fc",
    "#4d7c0f": "#a3e635",
    LIMIT: "#f87171",
}
"""Colours of data -> the same on a dark page, where they have a contrast of 3 or less."""
MEMORY_COLOURS: Mapping[str, tuple[str, str]] = {
    "weights": ("#1e3a8a", "#5b7fe0"),
    "gradients": ("#3b82f6", "#3b82f6"),
    "optimizer": ("#93c5fd", "#a5d0fe"),
    "checkpoints": ("#0f766e", "#14a89b"),
    "activations": ("#f59e0b", "#f5b13b"),
    "logits": ("#c2410c", "#ea6a2d"),
    "workspace": ("#9ca3af", "#8a93a1"),
}
"""The components of memory in the order in which charts stack them, with their colours on a light and on a dark page.
Memory at rest is blue. Memory that grows with the batch has warm colours."""
WIDE, NARROW = 8.4, 4.2
"""Inches."""
_for_phone: ContextVar[bool] = ContextVar("for_phone", default=False)


@dataclass(frozen=True)
class Drawn:
    """The SVG text of one chart, for a desktop and for a phone."""

    wide: str
    phone: str


def drawn_twice(draw: Callable[[], Mapping[str, str]]) -> dict[str, Drawn]:
    """Draw the charts of a page for both widths. draw: draws them with `new_figure` and `svg`, name -> SVG."""
    wide = draw()
    with for_phone():
        phone = draw()
    return {name: Drawn(svg, phone[name]) for name, svg in wide.items()}


@contextlib.contextmanager
def for_phone() -> Iterator[None]:
    """Draw figures half as wide, with their panels one below the other, so that text is readable on a phone."""
    token = _for_phone.set(True)
    try:
        yield
    finally:
        _for_phone.reset(token)


def new_figure(panels: int, *, columns: int, height: float = 3.2) -> tuple[Any, Any]:
    """A matplotlib figure of `height` inches with `panels` axes in rows of `columns`; see `for_phone`."""
    import matplotlib
    from matplotlib.figure import Figure

    # Keep text as text: files are small, the same on every machine, and readable by a screen reader.
    as_text = {"svg.fonttype": "none", "svg.hashsalt": "tigon", "font.family": "sans-serif", "font.size": 9}
    matplotlib.rcParams.update(as_text)
    width = WIDE
    if _for_phone.get():
        width, height, columns = NARROW, height * min(columns, panels), 1
    figure = Figure(figsize=(width, height), layout="constrained")
    lines = -(-panels // columns)
    all_axes = [figure.add_subplot(lines, columns, i + 1) for i in range(panels)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=MUTED, labelcolor=INK)
        axes.grid(axis="y", color=GRID, lw=0.8)
        axes.set_axisbelow(True)
    return figure, all_axes


def whole_numbers(axes: Axes, most: int = 5, steps: Sequence[int] | None = None) -> None:
    """Mark the x axis at about `most` whole numbers. steps: how far apart, times a power of ten; None: any distance."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, steps=steps))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def horizontal_bars(
    axes: Axes,
    labels: Sequence[str],
    values: Sequence[float],
    *,
    unit: str,
    colours: Sequence[str] | str,
    texts: Sequence[str] = (),
) -> None:
    """One bar per label, the first at the top. texts: what stands beside each bar, if it is not the value."""
    bars = axes.barh(range(len(labels)), values, color=colours)
    axes.set_yticks(range(len(labels)), labels)
    shown = texts or [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values]
    axes.bar_label(bars, labels=shown, padding=2, color=INK, fontsize=7)
    axes.set(xlabel=unit, xlim=(0, 1.25 * max(values, default=0.0) or 1.0))
    lay_flat(axes)


def lay_flat(axes: Axes) -> None:
    """Put the first of horizontal bars at the top, and draw the grid across them."""
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.grid(visible=False, axis="y")


def shared_legend(figure: Figure, panels: Sequence[Axes], *, order: Sequence[str] = (), **options: Any) -> None:
    """One legend for all panels, with each label once.

    Args:
        figure: The figure.
        panels: Its axes.
        order: Labels that come first, in this order, if the panels have them.
        options: Arguments of matplotlib's `Figure.legend`. A phone has room for two columns.
    """
    known: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    labels = [label for label in dict.fromkeys((*order, *known)) if label in known]
    if _for_phone.get():
        options["ncols"] = min(options.get("ncols", 1), 2)
    figure.legend([known[label] for label in labels], labels, frameon=False, **options)


def svg(figure: Figure, name: str) -> str:
    """The bare <svg> element: no XML header, no DTD address, no metadata block.

    Ids are prefixed with the chart's name, so that several fit on a page.
    """
    name = f"phone-{name}" if _for_phone.get() else name
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # matplotlib's font lacks most scripts; it only measures text here, and the viewer shows it in another font
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)


def on_page(text: str) -> str:
    """An SVG that is part of an HTML page: its colours become the page's `style_variables`."""
    variables = {**PAGE_COLOURS, **{colour: f"data-{colour[1:]}" for colour in IN_THE_DARK}}
    for colour, variable in variables.items():
        text = text.replace(f'fill="{colour}"', f'style="fill: {colour}"')  # of a hatched bar
        text = re.sub(rf"(?<=: ){colour}\b", f"var(--{variable}, {colour})", text)
    return text


def style_variables(*, dark: bool) -> str:
    """The colours of a light or a dark page, and of the charts on it, as variables of a style sheet."""
    data = {f"data-{colour[1:]}": (colour, other) for colour, other in IN_THE_DARK.items()}
    pairs = {**_PAGE, **MEMORY_COLOURS, **data}
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in pairs.items())
