"""Draws a record as SVG: one chart of speed and one of memory per op, with lines for a swept dimension, else bars."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tigon.bench.record import Measurement, RowRecord, RunRecord
from tigon.bench.table import bound
from tigon.bench.timing import Spread
from tigon.report.chart import INK, MUTED, horizontal_bars, new_figure, svg

# One colour per implementation, the same in every chart. Settings of one library share a hue.
COLOURS = {
    "tigon": "#c2410c", "tigon new gradient": "#fb923c", "tigon one chunk": "#ea580c", "tigon 16-bit sums": "#fb923c",
    "tigon small chunks": "#fdba74", "tigon kept logits": "#ea580c", "tigon recomputed logits": "#fb923c",
    "eager": "#9ca3af", "compile": "#0f766e", "torch": "#115e59", "liger": "#1d4ed8",
    "liger fp32": "#3b82f6", "liger cute": "#93c5fd", "liger scaled": "#60a5fa", "quack": "#7e22ce",
    "quack base": "#c084fc", "cce": "#a16207", "cce exact": "#facc15", "trl": "#be185d", "products": INK,
    "liger portable": "#93c5fd", "liger jsd": "#1d4ed8", "two products": MUTED, "four products": MUTED,
    "six products": MUTED, "eight products": MUTED, "products once": MUTED, "16-bit products": MUTED,
}  # fmt: skip
LABELS = {
    "eager": "Hugging Face", "compile": "torch.compile", "liger": "Liger", "liger fp32": "Liger, fp32 sums",
    "liger cute": "Liger CuTe", "liger scaled": "Liger scaled", "cce": "CCE", "cce exact": "CCE exact",
    "trl": "TRL", "products": "3 products alone", "two products": "2 products alone",
    "liger portable": "Liger portable", "liger jsd": "Liger JSD",
    "four products": "4 products alone", "six products": "6 products alone",
    "eight products": "8 products alone", "products once": "4 products alone",
    "16-bit products": "3 products in 16 bits",
}  # fmt: skip
# Names of the dimensions of a row's shape, per op.
DIMENSIONS = {
    "rms_norm": ("rows", "hidden size"),
    "add_rms_norm": ("rows", "hidden size"),
    "layer_norm": ("rows", "hidden size"),
    "gated_rms_norm": ("rows", "hidden size"),
    "causal_conv1d": ("batch", "tokens", "channels"),
    "gated_delta_rule": ("batch", "tokens", "heads of keys", "heads", "head width"),
    "rope": ("batch", "query heads", "tokens", "hidden size"),
    "swiglu": ("tokens", "width"),
    "geglu": ("tokens", "width"),
    "cross_entropy": ("tokens", "vocabulary"),
    "linear_cross_entropy": ("tokens", "hidden size", "vocabulary"),
    "attention_with_sinks": ("batch", "query heads", "tokens", "head width"),
    "shared_prefix_attention": ("batch", "query heads", "tokens", "head width"),
    "experts": ("tokens", "experts per token", "experts", "hidden size"),
    "topk_sigmoid": ("tokens", "experts"),
    "topk_softmax": ("tokens", "experts"),
    "load_balancing_loss": ("tokens", "experts"),
    "fp8_linear": ("tokens", "input width", "output width"),
    "logprobs": ("tokens", "vocabulary"),
    "linear_logprobs": ("tokens", "hidden size", "vocabulary"),
    "linear_kl": ("tokens", "hidden size", "vocabulary"),
    "lora_linear": ("tokens", "input width", "output width", "rank"),
    "lora_linears": ("tokens", "input width", "first output width", "second output width", "rank"),
    "multi_head_linear_cross_entropy": ("batch", "tokens", "hidden size", "vocabulary"),
}
_PANELS_PER_LINE = 3


Quantity = Callable[[Measurement, RowRecord], "Spread | None"]


def draw(run: RunRecord) -> dict[str, str]:
    """Draw speed-OP and memory-OP for every op with a measured row: name -> SVG."""
    quantities = {"speed": (_ms, "forward + backward (ms)"), "memory": (_mib, "extra peak (MiB)")}
    charts: dict[str, str] = {}
    for name in chart_names(run):
        kind, _, op = name.partition("-")
        charts[name] = _chart(name, _measured_rows(run, op), *quantities[kind])
    return charts


def chart_names(run: RunRecord) -> list[str]:
    """What `draw` draws."""
    ops = [op for op in dict.fromkeys(row.op for row in run.rows) if _measured_rows(run, op)]
    return [f"{kind}-{op}" for op in ops for kind in ("speed", "memory")]


def _measured_rows(run: RunRecord, op: str) -> list[RowRecord]:
    return [row for row in run.rows if row.op == op and any(m.eager_ms or m.graph_ms for m in row.measurements)]


def is_sweep(run: RunRecord, name: str) -> bool:
    """Whether the named chart has lines instead of bars."""
    return swept_dimension(_measured_rows(run, name.partition("-")[2])) is not None


def _ms(m: Measurement, row: RowRecord) -> Spread | None:
    return m.judged_ms(row.graph)


def _mib(m: Measurement, row: RowRecord) -> Spread | None:
    return None if m.extra_peak_bytes is None else Spread(*[m.extra_peak_bytes / 2**20] * 3)


def _chart(name: str, rows: Sequence[RowRecord], quantity: Quantity, unit: str) -> str:
    swept = swept_dimension(rows)
    if swept is None:
        figure = _bars(rows, quantity, unit)
    else:
        figure = _lines(rows, swept, quantity, unit)
    return svg(figure, name)


def swept_dimension(rows: Sequence[RowRecord]) -> int | None:
    """The only dimension that differs among three or more rows of the same kind, or None."""
    if len(rows) < 3 or len({row.logits for row in rows}) > 1:
        return None
    differing = [d for d, sizes in enumerate(zip(*(row.shape for row in rows), strict=True)) if len(set(sizes)) > 1]
    return differing[0] if len(differing) == 1 else None


def _shown(rows: Sequence[RowRecord]) -> list[str]:
    """Implementations that have a time in any row, without the variants (tigon on changed problems)."""
    measured = (m for row in rows for m in row.measurements if m.graph_ms or m.eager_ms)
    return list(dict.fromkeys(m.impl for m in measured if m.role != "variant"))


def _lines(rows: Sequence[RowRecord], dimension: int, quantity: Quantity, unit: str) -> Any:
    figure, (axes,) = new_figure(1, columns=1, height=3.4)
    rows = sorted(rows, key=lambda row: row.shape[dimension])
    # The hidden size of rope is its width times the query heads.
    times = rows[0].shape[1] if (rows[0].op, dimension) == ("rope", 3) else 1
    sizes = [times * row.shape[dimension] for row in rows]
    highest = 0.0
    for impl, marker in zip(_shown(rows), itertools.cycle("os^DvPX")):
        measurements = {size: _find(row, impl, quantity) for size, row in zip(sizes, rows, strict=True)}
        spreads = {size: spread for size, spread in measurements.items() if spread is not None}
        medians = [spread.median for spread in spreads.values()]
        highest = max(highest, *medians)
        width, zorder = (2.2, 3) if impl == "tigon" else (1.4, 2)
        own, colour = list(spreads), COLOURS.get(impl, MUTED)
        axes.plot(own, medians, f"{marker}-", ms=5, color=colour, lw=width, zorder=zorder, label=LABELS.get(impl, impl))
        lows, highs = [spread.low for spread in spreads.values()], [spread.high for spread in spreads.values()]
        axes.fill_between(own, lows, highs, color=colour, alpha=0.2, lw=0)
    if quantity is _ms:
        bounds = [bound(row) for row in rows]
        axes.plot(sizes, [ms for ms, _ in bounds], color=INK, ls=":", lw=1.2, label=f"bound ({bounds[0][1]})")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    # A single noisy repetition must not set the scale.
    axes.set(xlabel=_axis_label(rows[0], dimension), ylabel=unit, ylim=(0, 1.2 * highest or None))
    axes.legend(frameon=False)
    axes.set_title(rows[0].op, loc="left", color=INK)
    return figure


def _find(row: RowRecord, impl: str, quantity: Quantity) -> Spread | None:
    return next((quantity(m, row) for m in row.measurements if m.impl == impl), None)


def _axis_label(row: RowRecord, dimension: int) -> str:
    names = DIMENSIONS[row.op]
    rest = ", ".join(
        f"{name} {size:,}" for d, (name, size) in enumerate(zip(names, row.shape, strict=True)) if d != dimension
    )
    return f"{names[dimension]}  ({rest}, {row.dtype})"


def _bars(rows: Sequence[RowRecord], quantity: Quantity, unit: str) -> Any:
    """One panel per row, because scales differ by orders of magnitude, and one bar per implementation."""
    lines = -(-len(rows) // _PANELS_PER_LINE)
    shown = _shown(rows)
    height = 0.5 + lines * (0.9 + 0.19 * len(shown))
    figure, panels = new_figure(len(rows), height=height, columns=min(_PANELS_PER_LINE, len(rows)))
    for axes, row in zip(panels, rows, strict=True):
        measurements = {impl: _find(row, impl, quantity) for impl in shown}
        values = {impl: spread.median for impl, spread in measurements.items() if spread is not None}
        labels, colours = [LABELS.get(impl, impl) for impl in values], [COLOURS.get(impl, MUTED) for impl in values]
        horizontal_bars(axes, labels, list(values.values()), unit=unit, colours=colours)
        if quantity is _ms and not row.flops:
            axes.axvline(row.limit_ms, color=INK, ls=":", lw=1.2)
        axes.set_title(row.id.removeprefix(row.op + " "), loc="left", color=INK, fontsize=8)
    dotted = "  (dotted: the bound, copy)" if quantity is _ms and not rows[0].flops else ""
    figure.suptitle(rows[0].op + dotted, color=INK)
    return figure
