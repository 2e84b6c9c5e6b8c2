"""A case of training steps as a Markdown table with a line per variant."""

from __future__ import annotations

from tigon.bench.training.record import OVER, CaseRecord, StepMeasurement
from tigon.bench.training.time_by_kind import KINDS
from tigon.report.table import markdown_table
from tigon.units import off_by

REFERENCES = ("liger:full", "hf:full")
"""Tokens/s are divided by those of the first of these that was measured."""
EXCEEDS = "‡"


def reference_of(case: CaseRecord) -> StepMeasurement | None:
    """The measurement with which the case's others are compared."""
    measured = {m.variant: m for m in case.measurements if m.step_ms is not None}
    return next((measured[name] for name in REFERENCES if name in measured), None)


def case_table(case: CaseRecord) -> str:
    """The table of a case. A variant that was not measured has its reason instead of figures."""
    reference = reference_of(case)
    names = [
        "variant",
        "micro-batches",
        "recomputes",
        "tokens/s",
        *([f"x {reference.variant}"] if reference else []),
        "peak, GiB",
        "% of matmul rate",
        *(f"{kind}, ms" for kind in KINDS),
        "predicted peak, time",
    ]
    return markdown_table(names, [_line(m, case, reference, len(names)) for m in case.measurements])


def _line(m: StepMeasurement, case: CaseRecord, reference: StepMeasurement | None, columns: int) -> list[str]:
    if m.step_ms is None or m.micro_batch is None or m.tokens_per_s is None:
        return [m.variant, f"{m.status}: {m.detail}".replace("|", "/"), *[""] * (columns - 2)]
    ratio = []
    if reference is not None and reference.tokens_per_s:
        ratio = [f"{m.tokens_per_s / reference.tokens_per_s:.3f}"]
    mark = f" {EXCEEDS}" if m.status == OVER else ""
    return [
        m.variant + mark,
        f"{case.batch // m.micro_batch} x {m.micro_batch}",
        m.recomputed or "-",
        f"{m.tokens_per_s:,.0f}",
        *ratio,
        _gib(m.peak_bytes),
        "-" if m.products_share is None else f"{100 * m.products_share:.0f} %",
        *_kinds(m),
        _predicted(m),
    ]


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 2**30:.2f}" if nbytes >= 2**30 else f"{nbytes / 2**30:.3g}"


def _kinds(m: StepMeasurement) -> list[str]:
    times_ms = [None if m.split_ms is None else m.split_ms.get(kind) for kind in KINDS]
    return ["-" if time_ms is None else f"{time_ms:.3g}" if time_ms < 100 else f"{time_ms:.0f}" for time_ms in times_ms]


def _predicted(m: StepMeasurement) -> str:
    """How far the planner's predictions are from the measured peak and time."""
    if m.predicted is None or m.peak_bytes is None or m.step_ms is None:
        return "-"
    peak, time = off_by(m.predicted["peak_bytes"], m.peak_bytes), off_by(m.predicted["step_ms"], m.step_ms.median)
    return f"{peak}, {time}"
