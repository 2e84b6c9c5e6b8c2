"""Sets the look of every chart, and turns a chart into SVG text for a file or for a page."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
PAGE_COLOURS: Mapping[str, str] = {INK: "ink", MUTED: "soft", GRID: "line", "#ffffff": "page"}
"""Colours of a chart -> the style variables of the report pages, which differ in dark mode."""
IN_THE_DARK: Mapping[str, str] = {
    "#c2410c": "#fb923c", "#0f766e": "#2dd4bf", "#4338ca": "#818cf8", "#a16207": "#eab308", "#be185d": "#f472b6",
    "#1d4ed8": "#60a5fa", "#7e22ce": "#c084fc", "#4d7c0f": "#a3e635", "#b91c1c": "#f87171",
}  # fmt: skip
"""Colours of data -> the same on a dark page, where they have a contrast of 3 or less."""
DARK_STYLE = " ".join(f"--data-{colour[1:]}: {dark};" for colour, dark in IN_THE_DARK.items())
"""The style variables of a dark page."""
WIDE, NARROW = 8.4, 4.2
"""Inches."""
_for_phone: ContextVar[bool] = ContextVar("for_phone", default=False)


@contextlib.contextmanager
def for_phone() -> Iterator[None]:
    """Draw figures half as wide, with their panels one below the other, so that text is readable on a phone."""
    token = _for_phone.set(True)
    try:
        yield
    finally:
        _for_phone.reset(token)


def legend_columns(wide: int) -> int:
    """How many columns a legend over the whole figure may have, of which `wide` fit a wide figure."""
    return min(wide, 2) if _for_phone.get() else wide


def new_figure(panels: int, *, columns: int, height: float = 3.2) -> tuple[Any, Any]:
    """A matplotlib figure of `height` inches with `panels` axes in rows of `columns`; see `for_phone`."""
    import matplotlib
    from matplotlib.figure import Figure

    # Keep text as text: files are small, the same on every machine, and readable by a screen reader.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tigon", "font.family": "sans-serif",
                                "font.size": 9})  # fmt: skip
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


def svg(figure: Any, name: str) -> str:
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
    """An SVG that is part of an HTML page: its colours follow the page's. A dark page needs `DARK_STYLE`."""
    variables = {**PAGE_COLOURS, **{colour: f"data-{colour[1:]}" for colour in IN_THE_DARK}}
    for colour, variable in variables.items():
        text = text.replace(f'fill="{colour}"', f'style="fill: {colour}"')  # of a hatched bar
        text = re.sub(rf"(?<=: ){colour}\b", f"var(--{variable}, {colour})", text)
    return text
