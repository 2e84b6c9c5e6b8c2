"""Rows as Markdown: one line per row with tigon, its best peer and the bound, and one table with all figures of a row.

The best peer is the fastest one whose error is allowed. A faster peer with a larger error is named after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tigon.bench.record import Measurement, RowRecord
from tigon.report.table import markdown_table

WRONG = "†"
SUMMARY = (
    "op, shape",
    "tigon, ms",
    "best peer, ms",
    "bound, ms",
    "% of bound",
    "extra memory of tigon / best peer, MiB",
    "error of tigon / eager",
)
_DETAILS = (
    "implementation",
    "forward, ms",
    "backward, ms",
    "both, ms",
    "eager both, ms",
    "host, us",
    "extra memory, MiB",
    "rate",
    "% of bound",
    "error",
)


def summary(rows: Sequence[RowRecord]) -> str:
    """A line per row. Times are medians of forward + backward in ms."""
    return markdown_table(SUMMARY, [summary_cells(row) for row in rows])


def summary_cells(row: RowRecord) -> list[str]:
    own = next((m for m in row.measurements if m.impl == "tigon"), None)
    best = own if own and own.judged_ms(row.graph) else None
    peer, wrong = best_of(row, ("peer", "baseline")), _faster_but_wrong(row)
    bound_ms, kind = bound(row)
    return [
        f"{row.op} {'x'.join(map(str, row.shape))}{', peaked' if row.logits == 'peaked' else ''}"
        f"{', ' + row.problem if row.problem else ''}",
        _number(median_ms(best, row)) if best else (own.status if own else "not measured"),
        (_named(peer, row) if peer else "-") + (f", {_named(wrong, row)} {WRONG}" if wrong else ""),
        f"{_number(bound_ms)} ({kind})",
        f"{100 * bound_ms / median_ms(best, row):.0f} %" if best else "-",
        f"{_mib(best)} / {_mib(peer)}",
        f"{_worst(best)} / {_worst(next((m for m in row.measurements if m.role == 'baseline'), None))}",
    ]


def bound(row: RowRecord) -> tuple[float, str]:
    """The time in ms that a row's times are compared with, and its kind: "products", "FLOPs" or "copy".

    "products" is the measured time of the matrix products alone. Rows without that measurement have the time of the
    op's FLOPs at the rate of a large matrix product, or of its bytes at the rate of a large copy.
    """
    products = next((m for m in row.measurements if m.role == "limit" and m.judged_ms(row.graph)), None)
    if products is not None:
        return median_ms(products, row), products.impl
    return row.limit_ms, "FLOPs" if row.flops else "copy"


def best_of(row: RowRecord, roles: Sequence[str], memory_gib: float | None = None) -> Measurement | None:
    """The fastest measurement of these roles within the error limit, and within `memory_gib` extra memory if given."""
    fitting = [
        m
        for m in row.measurements
        if m.role in roles
        and m.judged_ms(row.graph)
        and not m.breaks_rule
        and (memory_gib is None or (m.extra_peak_bytes is not None and m.extra_peak_bytes <= memory_gib * 2**30))
    ]
    return min(fitting, key=lambda m: median_ms(m, row), default=None)


def _faster_but_wrong(row: RowRecord) -> Measurement | None:
    right = best_of(row, ("peer", "baseline"))
    wrong = [m for m in row.measurements if m.role == "peer" and m.breaks_rule and m.judged_ms(row.graph)]
    fastest = min(wrong, key=lambda m: median_ms(m, row), default=None)
    if fastest is None or (right is not None and median_ms(right, row) <= median_ms(fastest, row)):
        return None
    return fastest


def details(row: RowRecord) -> str:
    """The figures of every implementation."""
    errors_on = f", errors on {'x'.join(map(str, row.error_shape))}" if row.error_shape != row.shape else ""
    bound_ms, kind = bound(row)
    heading = f"**{row.id}** ({row.dtype}, bound {_number(bound_ms)} ms ({kind}){errors_on})"
    return f"{heading}\n\n{markdown_table(_DETAILS, [_detail_cells(m, row) for m in row.measurements])}"


def _detail_cells(m: Measurement, row: RowRecord) -> list[str]:
    times = m.graph_ms or m.eager_ms
    if times is None:
        return [m.impl, f"{m.status}: {m.detail}".replace("|", "\\|"), *[""] * (len(_DETAILS) - 2)]
    both = times["both"]
    rate = f"{m.tflop_per_s:.0f} TFLOP/s" if m.tflop_per_s else f"{m.gb_per_s:.0f} GB/s" if m.gb_per_s else "-"
    return [
        m.impl,
        _number(times["forward"].median),
        _number(times["backward"].median),
        f"{_number(both.median)} ({_number(both.low)} - {_number(both.high)})",
        _number(m.eager_ms["both"].median) if m.eager_ms else "-",
        f"{m.host_us:.0f}" if m.host_us is not None else "-",
        _mib(m),
        rate,
        f"{100 * bound(row)[0] / median_ms(m, row):.0f} %" if m.role != "variant" else "-",
        _worst(m) + (f" {WRONG}" if m.breaks_rule else ""),
    ]


# --- cells ------------------------------------------------------------------------------------------------------------


def median_ms(m: Measurement, row: RowRecord) -> float:
    """The median of the times by which the measurement is judged. It must have been timed."""
    judged = m.judged_ms(row.graph)
    assert judged is not None, f"{m.impl} has no time"
    return judged.median


def _named(m: Measurement, row: RowRecord) -> str:
    launches = m.graph_ms is None and any(other.graph_ms for other in row.measurements)
    return f"{_number(median_ms(m, row))} ({m.impl}{', with launches' if launches else ''})"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _mib(m: Measurement | None) -> str:
    if m is None or m.extra_peak_bytes is None:
        return "-"
    mib = m.extra_peak_bytes / 2**20
    return f"{mib:,.0f}" if mib >= 10 else _number(mib)


def _worst(m: Measurement | None) -> str:
    return f"{max(m.errors.values()):.1e}" if m and m.errors else "-"
