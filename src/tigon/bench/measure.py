"""Measures one row: errors, memory and times of every implementation.

If an implementation is not installed, does not support the row, fails or runs out of memory, the record says so and
the run continues. tigon is not timed if its error exceeds the limit of `numerical_errors.py`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tigon.bench import numerical_errors, timing
from tigon.bench.impls import Impl, NoSuchOp
from tigon.bench.inputs import Bound, Problem
from tigon.bench.record import Measurement, RowRecord, Times
from tigon.bench.rows import Row
from tigon.bench.timing import Graphs, Run, Spread
from tigon.errors import BenchError
from tigon.profiler.recording.peak import PeakMeter

T = TypeVar("T")
_LEAST_REPETITIONS = 10
# Time that one row may spend on further repetitions.
_ROW_BUDGET_S = 8.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How rows are measured."""

    dtype: torch.dtype
    device: torch.device
    repetitions: int
    ceilings: dict[str, float]


@dataclass
class _Entry:
    """An implementation that is being measured."""

    measurement: Measurement
    bound: Bound | None

    @property
    def works(self) -> bool:
        return self.bound is not None and self.measurement.status == "ok"


def measure_row(row: Row, impls: Sequence[Impl], setting: Setting) -> RowRecord:
    """Measure implementations of the row's op."""
    torch.compiler.reset()
    problem = Problem.of(row, setting.dtype, setting.device)
    record = _blank(problem, setting)
    entries = []
    for impl in impls:
        measurement = Measurement(impl=impl.name, role=impl.role)
        record.measurements.append(measurement)
        bound = guarded(measurement, setting.device, partial(Bound, impl, problem))
        entries.append(_Entry(measurement, bound))
    _judge_errors(record, problem, entries, setting)
    for entry in entries:
        if (bound := entry.bound) is not None and entry.works:
            guarded(entry.measurement, setting.device, partial(_memory, bound, entry.measurement))
    record.repetitions = _time([entry for entry in entries if entry.works], row, setting)
    for entry in entries:
        _rates(entry.measurement, record)
    return record


def _blank(problem: Problem, setting: Setting) -> RowRecord:
    row, ceilings = problem.row, setting.ceilings
    cost = problem.op.cost(**problem.leaves())
    by_bytes_ms = cost.moved_bytes / ceilings["copy_gb_per_s"] / 1e6
    by_flops_ms = cost.flops / ceilings["matmul_tflop_per_s"] / 1e9
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in row.options.items()}
    return RowRecord(
        id=row.id,
        op=row.op,
        shape=list(row.shape),
        dtype=numerical_errors.DTYPE_NAMES[setting.dtype],
        options=options,
        logits=row.logits,
        problem=row.problem,
        graph=row.graph,
        input_bytes=sum(t.nbytes for t in problem.inputs.values() if isinstance(t, Tensor)),
        moved_bytes=cost.moved_bytes,
        saved_bytes=cost.saved_bytes,
        flops=cost.flops,
        limit_ms=max(by_bytes_ms, by_flops_ms),
    )


def guarded(measurement: Measurement, device: torch.device, work: Callable[[], T]) -> T | None:
    """The result of `work`, or None and the reason in the measurement. Its time is added to `prepare_s`."""
    start_s = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as error:
        measurement.status, measurement.detail = status_of(error)
    finally:
        measurement.prepare_s = round((measurement.prepare_s or 0.0) + time.monotonic() - start_s, 2)
    # Outside the handler, because the exception's traceback holds the tensors of the failed call.
    release_after_failure(device, measurement.impl, measurement.detail)
    return None


def release_after_failure(device: torch.device, name: str, detail: str) -> None:
    """Free what a failed call held.

    Raises BenchError if the device no longer works: an illegal address ends the CUDA context of the whole process.
    """
    timing.release(device)
    try:
        timing.synchronize(device)
    except RuntimeError as error:
        raise BenchError(f"{name} left the device unusable ({detail}); leave it out with --without.") from error


def status_of(error: Exception) -> tuple[str, str]:
    """The status of a measurement that raised `error`, and the error's first line."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    statuses: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
        (torch.cuda.OutOfMemoryError, "out of memory"),
        (ImportError, "not installed"),
        (NoSuchOp, "no such op"),
        ((TypeError, NotImplementedError), "not supported"),
    )
    status = next((status for kind, status in statuses if isinstance(error, kind)), "failed")
    return status, f"{type(error).__name__}: {first_line}"[:300]


def _judge_errors(record: RowRecord, problem: Problem, entries: Sequence[_Entry], setting: Setting) -> None:
    """Measure the errors of all implementations of the row's problem. Refuse tigon if it breaks the rule."""
    smaller, truth = _truth(problem, setting)
    record.error_shape = list(smaller.row.shape)
    baseline: dict[str, float] | None = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        baseline = numerical_errors.errors_of(numerical_errors.oracle(smaller), truth)
    timing.release(setting.device)
    record.allowed_errors = numerical_errors.allowed_errors(smaller, truth, setting.dtype, baseline)

    def judge(bound: Bound, measurement: Measurement) -> None:
        judged = bound if smaller is problem else Bound(bound.impl, smaller)
        judged.restore()
        outputs, grads = judged.both()
        got = numerical_errors.name_results(outputs, judged.names, grads)
        measurement.errors = numerical_errors.errors_of(got, truth)
        _apply_rule(measurement, record.allowed_errors)

    for entry in entries:
        if (bound := entry.bound) is not None and entry.measurement.role not in ("variant", "limit"):
            guarded(entry.measurement, setting.device, partial(judge, bound, entry.measurement))


def _apply_rule(measurement: Measurement, allowed: dict[str, float]) -> None:
    measurement.breaks_rule = numerical_errors.breaks_rule(measurement.errors, allowed)
    if measurement.breaks_rule and measurement.role == "ours":
        worst = measurement.breaks_rule[0]
        measurement.status = "refused"
        error, limit = measurement.errors[worst], allowed[worst]
        measurement.detail = f"{worst} has error {error:.1e}, allowed {limit:.1e}; not timed"


def _truth(problem: Problem, setting: Setting) -> tuple[Problem, numerical_errors.Named]:
    """The fp64 results on the row's shape or, if they do not fit, on half the tokens as often as needed."""
    smaller: Problem | None = problem
    while smaller is not None:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return smaller, numerical_errors.oracle(smaller, torch.float64)
        timing.release(setting.device)
        smaller = smaller.with_half_the_tokens(setting.dtype, setting.device)
    raise BenchError(f"fp64 results of {problem.row.id} do not fit on this device, even for one token.")


def _memory(bound: Bound, measurement: Measurement) -> None:
    """Measure the peak of one eager forward + backward and the bytes that the forward keeps, after a compiling run."""
    bound.restore()
    bound.both()
    bound.restore()
    device = bound.device
    meter = PeakMeter(device)
    meter.start(bound.tensors())
    results = bound.both()
    measurement.extra_peak_bytes = meter.stop().step_bytes
    del results
    if device.type == "cuda":
        bound.restore()
        before = torch.cuda.memory_allocated(device)
        outputs = bound.forward()
        kept = torch.cuda.memory_allocated(device) - before
        own = {t.untyped_storage().data_ptr() for t in bound.tensors()}
        fresh = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}
        measurement.kept_bytes = max(0, kept - sum(size for at, size in fresh.items() if at not in own))


def _time(entries: Sequence[_Entry], row: Row, setting: Setting) -> int:
    """Fill in the times, and return the number of repetitions."""
    device, runs = setting.device, dict[str, Run]()
    graphs = Graphs(device) if device.type == "cuda" and row.graph else None
    for entry in entries:
        bound, name = entry.bound, entry.measurement.impl
        assert bound is not None
        runs[f"{name}|eager_ms|forward"] = Run(bound.forward, bound.restore, idle=True)
        runs[f"{name}|eager_ms|both"] = Run(bound.both, bound.restore, idle=True)
        if graphs is not None:
            runs |= _captured(graphs, bound, entry.measurement, device)
        else:
            why_none = "no CUDA graphs on this device" if row.graph else "launches do not matter at this size"
            entry.measurement.graph_detail = why_none
    with timing.no_garbage_collection():
        timing.take_turns(runs, 1, device)
        start_s = time.monotonic()
        first = timing.take_turns(runs, 1, device)
        round_s = time.monotonic() - start_s
        # The first round shows how many repetitions fit into the row's time budget. At least ten are made.
        made = min(setting.repetitions, max(_LEAST_REPETITIONS, int(_ROW_BUDGET_S / max(round_s, 1e-9))))
        more = timing.take_turns(runs, made - 1, device)
        times = {name: timing.joined(first[name], more[name]) for name in runs}
        for entry in entries:
            _collect(entry.measurement, times)
            _host(entry, row, device)
    return made


def _host(entry: _Entry, row: Row, device: torch.device) -> None:
    judged, bound = entry.measurement.judged_ms(row.graph), entry.bound
    if judged is not None and bound is not None:
        probe = replace(entry.measurement)
        time_host = partial(timing.host_us, bound.both, bound.restore, judged.median, device)
        entry.measurement.host_us = guarded(probe, device, time_host)


def _captured(graphs: Graphs, bound: Bound, measurement: Measurement, device: torch.device) -> dict[str, Run]:
    """The replays of forward and of both; nothing if one cannot be captured."""
    if not bound.impl.capturable:
        measurement.graph_detail = "the host waits for the device, which a graph cannot record"
        return {}
    probe, runs = replace(measurement), dict[str, Run]()
    for phase, call in (("forward", bound.forward), ("both", bound.both)):
        bound.restore()
        replay = guarded(probe, device, partial(graphs.capture, call))
        if replay is None:
            measurement.graph_detail = probe.detail
            return {}
        runs[f"{measurement.impl}|graph_ms|{phase}"] = Run(replay, bound.restore, idle=False)
    return runs


def _collect(measurement: Measurement, times: dict[str, list[float] | Exception]) -> None:
    for kind in ("graph_ms", "eager_ms"):
        forward, both = (times.get(f"{measurement.impl}|{kind}|{phase}") for phase in ("forward", "both"))
        failed = next((t for t in (forward, both) if isinstance(t, Exception)), None)
        if failed is not None:
            measurement.status, measurement.detail = status_of(failed)
        elif isinstance(forward, list) and isinstance(both, list):
            setattr(measurement, kind, _phases(forward, both))


def _phases(forward: list[float], both: list[float]) -> Times:
    """Backward time is the difference of both and forward within a repetition.

    Timing backward directly would need retain_graph, which fails for implementations that overwrite their inputs.
    """
    backward = [b - f for f, b in zip(forward, both, strict=True)]
    return {"forward": Spread.of(forward), "backward": Spread.of(backward), "both": Spread.of(both)}


def _rates(measurement: Measurement, record: RowRecord) -> None:
    judged = measurement.judged_ms(record.graph)
    if judged is None or measurement.role == "variant":
        return
    measurement.fraction = record.limit_ms / judged.median
    if record.flops:
        measurement.tflop_per_s = record.flops / judged.median / 1e9
    else:
        measurement.gb_per_s = record.moved_bytes / judged.median / 1e6
