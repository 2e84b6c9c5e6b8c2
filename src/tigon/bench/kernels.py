"""`tigon bench kernels`: choose and measure rows, print each result, and write the record after every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tigon.bench import record as records
from tigon.bench import table, timing
from tigon.bench.impls import impl_names
from tigon.bench.measure import implementations, measure_row
from tigon.bench.numerical_errors import DTYPE_NAMES
from tigon.bench.record import Measurement, RowRecord, RunRecord
from tigon.bench.report import report
from tigon.bench.session import Session
from tigon.bench.suites import Row, select
from tigon.errors import BenchError, OptionError

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def bench_kernels(
    *, suite: str | None = None, ops: Sequence[str] = (), impls: Sequence[str] = (), without: Sequence[str] = (),
    shapes: Sequence[str] = (), dtype: str | None = None, repetitions: int = 20, session: Session,
) -> RunRecord:  # fmt: skip
    """Measure a suite on the GPU if there is one, else on the CPU.

    Args:
        suite: a name of `suites.SUITES`; "targets" on a GPU and "small" on a CPU if left out.
        ops, impls: measure only these; all if empty. The bound (`products`) is always measured.
        without: implementations to leave out.
        shapes: shapes to use instead of the suite's, such as "16384x4096". Requires exactly one op.
        dtype: "bf16", "fp16" or "fp32"; bf16 on a GPU and fp32 on a CPU if left out.
        repetitions: number of rounds. Every implementation runs once per round. Below 10 the quantiles mean little.
        session: the files to write, and the time limit. A resumed run measures missing rows, and rows that lack an
            implementation.

    Raises:
        OptionError: an option's value is unknown, or `repetitions` is below 1.
        ShapeError: a shape does not parse or does not fit its op.
        BenchError: tigon's error exceeds the limit on a row (raised after all rows are measured and written), nothing
            could be measured, the file at `json_path` is not a record, or an implementation left the device unusable.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    gpu = device.type == "cuda"
    suite = suite or ("targets" if gpu else "small")
    _check((*impls, *without), dtype, repetitions)
    chosen = [name for name in impls or impl_names() if name not in without]
    rows = select(suite, tuple(ops), tuple(shapes))
    torch_dtype = _DTYPES[dtype or ("bf16" if gpu else "fp32")]
    session.check(RunRecord)
    run = RunRecord(
        environment=records.environment(device, ("trl",)), suite="shapes given" if shapes else suite,
        repetitions=repetitions, ceilings=timing.ceilings(device, repetitions),
    )  # fmt: skip
    _print_header(run)
    _resume(run, session, DTYPE_NAMES[torch_dtype])
    known = {row.id: {m.impl for m in row.measurements} for row in run.rows}
    missing = [row for row in rows if not implementations(row, chosen) <= known.get(row.id, set())]
    for position, row in enumerate(missing):
        if session.is_over(run, [left.id for left in missing[position:]]):
            break
        try:
            measured = measure_row(
                row, {*chosen, *known.get(row.id, ())}, torch_dtype, device, repetitions, run.ceilings
            )
        except torch.cuda.OutOfMemoryError:
            run.not_run.append(f"{row.id} (its inputs do not fit)")
            continue
        finally:
            timing.release(device)
        measured.tigon_commit, measured.date = run.environment["tigon_commit"], run.environment["date"]
        run.rows = [*(earlier for earlier in run.rows if earlier.id != row.id), measured]
        session.save(run, has_figures=_has_figures(run, chosen))
        _print_row(measured, run.seconds)
    _finish(run, session, rows, chosen)
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


def _check(impls: Sequence[str], dtype: str | None, repetitions: int) -> None:
    for name in impls:
        if name not in impl_names():
            raise OptionError(f"--impl {name!r} is not known; choose from {', '.join(impl_names())}.")
    if dtype is not None and dtype not in _DTYPES:
        raise OptionError(f"--dtype {dtype} is not known; choose one of {', '.join(_DTYPES)}.")
    if repetitions < 1:
        raise OptionError(f"--repetitions {repetitions} must be at least 1; 10 or more for figures to quote.")


def _has_figures(run: RunRecord, chosen: Sequence[str]) -> bool:
    """Whether a chosen implementation (or the limit, if only it was chosen) has times, or errors over the limit."""
    return any(
        m.judged_ms(row.graph) is not None or m.status == "refused"
        for row in run.rows
        for m in row.measurements
        if m.role != "limit" or not chosen
    )


def _finish(run: RunRecord, session: Session, rows: Sequence[Row], chosen: Sequence[str]) -> None:
    if run.rows and _has_figures(run, chosen):
        print(f"\n{table.summary(run)}\n")
    reasons = [f"{m.impl} on {row.id}: {m.status}: {m.detail}" for row in run.rows for m in row.measurements]
    reasons += [f"{row.id}: {row.op} has no {' or '.join(chosen) or 'limit'}" for row in rows
                if not implementations(row, chosen)]  # fmt: skip
    session.finish(run, has_figures=_has_figures(run, chosen), reasons=reasons, draw=report)
    refused = [
        f"{m.impl} on {row.id}: {m.detail}" for row in run.rows for m in row.measurements if m.status == "refused"
    ]
    if refused:
        raise BenchError("tigon's error exceeds the limit, so it was not timed on these rows: " + "; ".join(refused))


def _print_header(run: RunRecord) -> None:
    env, ceilings = run.environment, run.ceilings
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    print(f"{env['device']}, driver {env['driver']}, {versions}, commit {env['tigon_commit']}, {env['date']}")
    print(
        f"copy {ceilings['copy_gb_per_s']:.0f} GB/s, product {ceilings['matmul_tflop_per_s']:.3g} TFLOP/s, "
        f"{run.repetitions} repetitions"
    )


def _print_row(row: RowRecord, seconds: float) -> None:
    bound_ms, kind = table.bound(row)
    print(f"\n{row.id}  {row.dtype}  bound {bound_ms:.4g} ms ({kind})  [{seconds:.0f} s]", flush=True)
    for m in row.measurements:
        print(f"  {m.impl:18} {_line(m, row)}", flush=True)


def _line(m: Measurement, row: RowRecord) -> str:
    if m.graph_ms is None and m.eager_ms is None:
        return f"{m.status}: {m.detail}"
    parts = []
    for label, times in (("graph", m.graph_ms), ("eager", m.eager_ms)):
        if times is not None:
            both = times["both"]
            parts.append(
                f"{label} {both.median:.4g} ms [{both.low:.4g}, {both.high:.4g}] fwd {times['forward'].median:.4g}"
            )
    judged = m.judged_ms(row.graph)
    if judged is not None and m.role != "variant":
        parts.append(f"{100 * table.bound(row)[0] / judged.median:.0f} % of bound")
    if m.extra_peak_bytes is not None:
        parts.append(f"{m.extra_peak_bytes / 2**20:.4g} MiB")
    if m.host_us is not None:
        parts.append(f"host {m.host_us:.0f} us")
    if m.prepare_s is not None and m.prepare_s >= 1:
        parts.append(f"ready after {m.prepare_s:.0f} s")
    if m.errors:
        parts.append(
            f"error {max(m.errors.values()):.1e}{' WRONG: ' + ', '.join(m.breaks_rule) if m.breaks_rule else ''}"
        )
    if m.status != "ok":
        parts.append(f"{m.status}: {m.detail}")
    return "  ".join(parts)
