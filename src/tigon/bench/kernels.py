"""`tigon bench kernels`: choose and measure rows, print each result, and write the record after every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tigon.bench import record as records
from tigon.bench import table, timing
from tigon.bench.impls import CATALOGUE, Catalogue
from tigon.bench.measure import Setting, measure_row
from tigon.bench.numerical_errors import DTYPE_NAMES
from tigon.bench.record import RunRecord
from tigon.bench.rows import SMALL, USUAL, Row, select
from tigon.bench.session import Session
from tigon.errors import BenchError, OptionError

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The options of the command; an empty sequence stands for all."""

    suite: str | None = None
    """None: "usual" on a GPU and "small" on a CPU."""
    ops: Sequence[str] = ()
    impls: Sequence[str] = ()
    """The bound is always measured."""
    without: Sequence[str] = ()
    shapes: Sequence[str] = ()
    """Shapes to use instead of the suite's, such as "16384x4096". They require exactly one op."""
    dtype: str | None = None
    """bf16, fp16 or fp32; None: bf16 on a GPU and fp32 on a CPU."""
    repetitions: int = 20
    """Number of rounds. Every implementation runs once per round. Below 10 the quantiles mean little."""
    session: Session


def bench_kernels(options: KernelOptions, catalogue: Catalogue = CATALOGUE) -> RunRecord:
    """Measure a suite on the GPU if there is one, else on the CPU.

    A resumed run measures missing rows, and rows that lack an implementation.

    Raises:
        OptionError: an option's value is unknown, or `repetitions` is below 1.
        ShapeError: a shape does not parse or does not fit its op.
        BenchError: tigon's error exceeds the limit on a row (raised after all rows are measured and written), nothing
            could be measured, the file of the session is not a record, or an implementation left the device unusable.
    """
    session, device = options.session, timing.device()
    gpu = device.type == "cuda"
    suite = options.suite or (USUAL if gpu else SMALL)
    _check(options, catalogue)
    chosen = [name for name in options.impls or catalogue.names() if name not in options.without]
    rows = select(catalogue.suites, suite, options.ops, options.shapes)
    dtype = _DTYPES[options.dtype or ("bf16" if gpu else "fp32")]
    session.check(RunRecord)
    run = RunRecord(
        environment=records.environment(device, ("trl",)),
        suite="shapes given" if options.shapes else suite,
        repetitions=options.repetitions,
        ceilings=timing.ceilings(device, options.repetitions),
    )
    print(records.provenance(run, []), flush=True)
    _resume(run, session, DTYPE_NAMES[dtype])
    setting = Setting(dtype=dtype, device=device, repetitions=options.repetitions, ceilings=run.ceilings)
    known = {row.id: {m.impl for m in row.measurements} for row in run.rows}
    wanted = {row.id: catalogue.of_row(row, {*chosen, *known.get(row.id, ())}) for row in rows}
    missing = [row for row in rows if not {impl.name for impl in wanted[row.id]} <= known.get(row.id, set())]
    todo = {row.id: partial(measure_row, row, wanted[row.id], setting) for row in missing}
    for measured in session.measure(run, run.rows, todo, device):
        if _has_figures(run, chosen):
            session.save(run)
        print(f"\n{table.details(measured)}", flush=True)
    _finish(run, session, [row for row in rows if not wanted[row.id]], chosen)
    return run


def _resume(run: RunRecord, session: Session, dtype: str) -> None:
    """Take over the rows of the record that `--resume` continues, each with its commit and date."""
    earlier = session.continued(run)
    was = ", ".join(sorted({row.dtype for row in earlier.rows} - {dtype}))
    if was:
        raise BenchError(
            f"{session.json_path} has dtype {was}, this run {dtype}; leave out --resume, or write another file."
        )
    for row in earlier.rows:
        row.tigon_commit = row.tigon_commit or earlier.environment["tigon_commit"]
        row.date = row.date or earlier.environment["date"]
    run.rows = earlier.rows


def _check(options: KernelOptions, catalogue: Catalogue) -> None:
    names = catalogue.names()
    for name in (*options.impls, *options.without):
        if name not in names:
            raise OptionError(f"--impl {name!r} is not known; choose from {', '.join(names)}.")
    if options.dtype is not None and options.dtype not in _DTYPES:
        raise OptionError(f"--dtype {options.dtype} is not known; choose one of {', '.join(_DTYPES)}.")
    if options.repetitions < 1:
        raise OptionError(f"--repetitions {options.repetitions} must be at least 1; 10 or more for figures to quote.")


def _has_figures(run: RunRecord, chosen: Sequence[str]) -> bool:
    """Whether a chosen implementation (or the limit, if only it was chosen) has times, or errors over the limit."""
    return any(
        m.judged_ms(row.graph) is not None or m.status == "refused"
        for row in run.rows
        for m in row.measurements
        if m.role != "limit" or not chosen
    )


def _finish(run: RunRecord, session: Session, without_impl: Sequence[Row], chosen: Sequence[str]) -> None:
    has_figures = _has_figures(run, chosen)
    if run.rows and has_figures:
        print(f"\n{table.summary(run.rows)}\n")
    reasons = [f"{m.impl} on {row.id}: {m.status}: {m.detail}" for row in run.rows for m in row.measurements]
    reasons += [f"{row.id}: {row.op} has no {' or '.join(chosen) or 'limit'}" for row in without_impl]
    session.finish(run, has_figures=has_figures, reasons=reasons)
    refused = [
        f"{m.impl} on {row.id}: {m.detail}" for row in run.rows for m in row.measurements if m.status == "refused"
    ]
    if refused:
        raise BenchError("tigon's error exceeds the limit, so it was not timed on these rows: " + "; ".join(refused))
