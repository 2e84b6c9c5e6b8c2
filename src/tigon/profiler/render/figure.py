"""Sets the look of every chart, and turns a chart into SVG text."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"


def new_figure(panels: int, *, columns: int, height: float = 3.2) -> tuple[Any, Any]:
    """A matplotlib figure of `height` inches with `panels` axes in rows of `columns`."""
    import matplotlib
    from matplotlib.figure import Figure

    # Keep text as text: files are small, the same on every machine, and readable by a screen reader.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tigon", "font.family": "sans-serif",
                                "font.size": 9})  # fmt: skip
    figure = Figure(figsize=(8.4, height), layout="constrained")
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
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # matplotlib's font lacks most scripts; it only measures text here, and the viewer shows it in another font
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
