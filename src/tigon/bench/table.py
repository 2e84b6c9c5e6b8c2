"""A record as Markdown: one line per row with tigon, its best peer, the bound and the target, then all figures.

The best peer is the fastest one whose error is allowed. A faster peer with a larger error is named after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tigon.bench.record import PHASES, Measurement, RowRecord, RunRecord
from tigon.report.table import markdown_table

WRONG = "†"
_SUMMARY = (
    "op, shape",
    "tigon, ms",
    "best peer, ms",
    "bound, ms",
    "% of bound",
    "target: measured",
    "extra memory of tigon / best peer, MiB",
    "error of tigon / eager",
)
_DETAILS = (
    "implementation",
    *(f"{phase}, ms" for phase in PHASES),
    "eager both, ms",
    "host, us",
    "extra memory, MiB",
    "rate",
    "% of bound",
    "error",
)


def summary(run: RunRecord) -> str:
    """The table of a record's rows. Times are medians of forward + backward in ms."""
    return markdown_table(_SUMMARY, [_summary_cells(row) for row in run.rows])


def _summary_cells(row: RowRecord) -> list[str]:
    own = next((m for m in row.measurements if m.impl == "tigon"), None)
    best = own if own and own.judged_ms(row.graph) else None
    peer, wrong = best_of(row, ("peer", "baseline")), _faster_but_wrong(row)
    bound_ms, kind = bound(row)
    return [
        f"{row.op} {'x'.join(map(str, row.shape))}{', peaked' if row.logits == 'peaked' else ''}"
        f"{', ' + row.problem if row.problem else ''}",
        _number(median_ms(best, row)) if best else _why_not(own),
        (_named(peer, row) if peer else "-") + (f", {_named(wrong, row)} {WRONG}" if wrong else ""),
        f"{_number(bound_ms)} ({kind})",
        f"{100 * bound_ms / median_ms(best, row):.0f} %" if best else "-",
        "<br>".join(target_result(row, target)[0] for target in row.reach) or "-",
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


def target_result(row: RowRecord, target: dict[str, Any]) -> tuple[str, bool | None]:
    """The target and its measured value as text, and whether it was reached (None if it was not measured)."""
    quantity, bound = target["quantity"], target["bound"]
    of = _judged(row, target)
    value = None if of is None else _value(row, target, of)
    if of is None or value is None:
        return f"{_target_text(target)}: not measured", None
    ok = value >= bound if quantity == "fraction" else value <= bound
    by = f" by {of.impl}" if of.impl not in ("tigon", target["of"]) else ""
    return f"{_target_text(target)}: {_shown(quantity, value)}, {'reached' if ok else 'missed'}{by}", ok


def _judged(row: RowRecord, target: dict[str, Any]) -> Measurement | None:
    """The measurement that the target judges: the implementation it names, else tigon's fastest within its memory."""
    if not target["of"]:
        return best_of(row, ("ours",), target["memory_gib"])
    return next((m for m in row.measurements if m.impl == target["of"] and m.judged_ms(row.graph)), None)


def _value(row: RowRecord, target: dict[str, Any], of: Measurement) -> float | None:
    quantity = target["quantity"]
    if quantity == "ratio":
        vs = next((m for m in row.measurements if m.impl == target["vs"]), None)
        return None if vs is None or vs.judged_ms(row.graph) is None else median_ms(of, row) / median_ms(vs, row)
    if quantity == "ms":
        return median_ms(of, row)
    if quantity == "kept_bytes":
        return None if of.kept_bytes is None else of.kept_bytes / row.input_bytes
    value = getattr(of, quantity)
    return None if value is None else float(value)


def _target_text(target: dict[str, Any]) -> str:
    bound = target["bound"]
    texts = {
        "fraction": f">= {100 * bound:.0f} % of copy",
        "ms": f"<= {bound:g} ms",
        "ratio": f"<= {bound:g} x {target['vs']}",
        "host_us": f"host <= {bound:g} us",
        "kept_bytes": "keeps its inputs only",
    }
    text = texts[target["quantity"]]
    within = f" within {target['memory_gib']:g} GiB" if target["memory_gib"] is not None else ""
    return f"{target['of'] + ' ' if target['of'] else ''}{text}{within}"


def _shown(quantity: str, value: float) -> str:
    texts = {
        "fraction": f"{100 * value:.1f} %",
        "ms": f"{value:.3g} ms",
        "ratio": f"{value:.3f}",
        "host_us": f"{value:.0f} us",
        "kept_bytes": f"{value:.2g} of them",
    }
    return texts[quantity]


def details(run: RunRecord) -> str:
    """The figures of every implementation on every row."""
    parts = []
    for row in run.rows:
        errors_on = f", errors on {'x'.join(map(str, row.error_shape))}" if row.error_shape != row.shape else ""
        bound_ms, kind = bound(row)
        parts += [
            f"**{row.id}** ({row.dtype}, bound {_number(bound_ms)} ms ({kind}){errors_on})",
            "",
            markdown_table(_DETAILS, [_detail_cells(m, row) for m in row.measurements]),
            "",
        ]
    return "\n".join(parts).rstrip()


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


def provenance(run: RunRecord) -> str:
    """One paragraph: card, versions, commit, date, ceilings."""
    env = run.environment
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    driver = f", driver {env['driver']}" if env["driver"] else ""
    sources = dict.fromkeys((row.tigon_commit or env["tigon_commit"], row.date or env["date"]) for row in run.rows)
    commits = " and ".join(f"{commit}, {date}" for commit, date in sources or [(env["tigon_commit"], env["date"])])
    which = "last" if len(sources) > 1 else "same"
    left_out = f" Not measured: {', '.join(run.not_run)}." if run.not_run else ""
    return (
        f"{env['device']}{driver}; {versions}; tigon at commit {commits}. In the {which} run a "
        f"copy moved {run.ceilings['copy_gb_per_s']:.0f} GB/s (read plus written) and a product of "
        f"{run.ceilings['matmul_size']:.0f}³ made {run.ceilings['matmul_tflop_per_s']:.3g} TFLOP/s.{left_out}"
    )


def section(run: RunRecord) -> str:
    """The text between the markers of a record in the docs, without its charts."""
    return "\n".join((provenance(run), "", summary(run), "", folded("Every implementation", details(run))))


def folded(title: str, text: str) -> str:
    """Markdown that is folded until it is clicked."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


# --- cells ------------------------------------------------------------------------------------------------------------


def median_ms(m: Measurement, row: RowRecord) -> float:
    """The median of the times by which the measurement is judged. It must have been timed."""
    judged = m.judged_ms(row.graph)
    assert judged is not None, f"{m.impl} has no time"
    return judged.median


def _named(m: Measurement, row: RowRecord) -> str:
    launches = m.graph_ms is None and any(other.graph_ms for other in row.measurements)
    return f"{_number(median_ms(m, row))} ({m.impl}{', with launches' if launches else ''})"


def _why_not(m: Measurement | None) -> str:
    return m.status if m else "not measured"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _mib(m: Measurement | None) -> str:
    if m is None or m.extra_peak_bytes is None:
        return "-"
    return (
        f"{m.extra_peak_bytes / 2**20:,.0f}" if m.extra_peak_bytes >= 10 << 20 else _number(m.extra_peak_bytes / 2**20)
    )


def _worst(m: Measurement | None) -> str:
    return f"{max(m.errors.values()):.1e}" if m and m.errors else "-"
