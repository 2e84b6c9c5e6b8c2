"""Measures one row: first errors, then memory, then the times of all implementations in turns.

If an implementation is not installed, does not support the inputs, fails or runs out of memory, the record says so and
the run continues. tigon is not timed if its error exceeds the limit of `numerical_errors.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.bench import numerical_errors, timing
from tigon.bench.impls import Impl, NoSuchOp, impls_for
from tigon.bench.inputs import Bound, Inputs, differentiable, make_inputs, make_upstream
from tigon.bench.record import Measurement, RowRecord, Times, jsonable
from tigon.bench.suites import Row
from tigon.bench.timing import Graphs, Run, Spread
from tigon.errors import BenchError
from tigon.ops import OPS, Op
from tigon.profiler.recording.peak import PeakMeter

_LEAST_REPETITIONS = 10
# Time that one row may spend on further repetitions.
_ROW_BUDGET_S = 8.0


# The dimension of an op's shape that shrinks until fp64 fits. It is the first dimension for ops not listed here.
_TOKENS = {"rope": 2, "multi_head_linear_cross_entropy": 1}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A row with its tensors."""

    row: Row
    inputs: Inputs
    upstream: Sequence[Tensor]

    @classmethod
    def of(cls, row: Row, dtype: torch.dtype, device: torch.device) -> Problem:
        inputs = make_inputs(row, dtype, device)
        return cls(row, inputs, make_upstream(OPS[row.op], inputs, row.mean))

    @property
    def op(self) -> Op:
        return OPS[self.row.op]

    def bind(self, impl: Impl) -> Bound:
        return Bound(impl, self.op, self.inputs, self.upstream, self.row.frozen, self.row.mean)

    def leaves(self) -> Inputs:
        """The inputs, of which those that get a gradient require one. Some costs depend on it."""
        if not self.row.frozen:
            return self.inputs
        names = differentiable(self.op, self.inputs, self.row.frozen)
        return {
            n: v.detach().requires_grad_(n in names) if isinstance(v, Tensor) else v for n, v in self.inputs.items()
        }

    def oracle(self, dtype: torch.dtype | None = None) -> numerical_errors.Named:
        """Outputs and gradients of the unfused formula."""
        return numerical_errors.oracle(self.op, self.inputs, self.upstream, dtype, self.row.frozen, self.row.mean)

    def with_half_the_tokens(self, dtype: torch.dtype, device: torch.device) -> Problem | None:
        """The same problem on half the tokens, or None if there is only one token."""
        shape, at = list(self.row.shape), _TOKENS.get(self.row.op, 0)
        if shape[at] == 1:
            return None
        shape[at] //= 2
        return Problem.of(dataclasses.replace(self.row, shape=tuple(shape)), dtype, device)


def measure_row(
    row: Row, impls: Collection[str], dtype: torch.dtype, device: torch.device, repetitions: int,
    ceilings: dict[str, float],
) -> RowRecord:  # fmt: skip
    """Measure the named implementations that apply to the row."""
    torch.compiler.reset()
    problem = Problem.of(row, dtype, device)
    record = _blank(problem, dtype, ceilings)
    wanted = implementations(row, impls)
    chosen = [impl for impl in impls_for(OPS[row.op]) if impl.name in wanted]
    bound: dict[str, Bound] = {}
    for impl in chosen:
        measurement = Measurement(impl=impl.name, role=impl.role)
        record.measurements.append(measurement)
        made = _guarded(measurement, device, functools.partial(problem.bind, impl))
        if made is not None:
            bound[impl.name] = made
    by_name = {m.impl: m for m in record.measurements}
    _judge_errors(record, problem, bound, by_name, dtype, device)
    ready = {name: b for name, b in bound.items() if by_name[name].status == "ok"}
    for name, b in list(ready.items()):
        if _guarded(by_name[name], device, functools.partial(_memory, b, by_name[name], device)) is None:
            del ready[name]
    record.repetitions = _time(ready, by_name, row, repetitions, device)
    for measurement in record.measurements:
        _rates(measurement, record)
    return record


def implementations(row: Row, impls: Collection[str]) -> set[str]:
    """Names of the implementations in `impls` that are measured on a row, and always the row's limits."""
    wanted = set(impls) & set(row.impls) if row.impls else set(impls)
    found = impls_for(OPS[row.op])
    limits = {impl.name for impl in found if impl.role == "limit" and (not row.limits or impl.name in row.limits)}
    return limits | {impl.name for impl in found if impl.name in wanted and impl.role != "limit"}


def _blank(problem: Problem, dtype: torch.dtype, ceilings: dict[str, float]) -> RowRecord:
    row, inputs = problem.row, problem.inputs
    cost = problem.op.cost(**problem.leaves())
    by_bytes_ms = cost.moved_bytes / ceilings["copy_gb_per_s"] / 1e6
    by_flops_ms = cost.flops / ceilings["matmul_tflop_per_s"] / 1e9
    return RowRecord(
        id=row.id,
        op=row.op,
        shape=list(row.shape),
        dtype=numerical_errors.DTYPE_NAMES[dtype],
        options=jsonable(row.options),
        logits=row.logits,
        problem=row.problem,
        graph=row.graph,
        reach=[dataclasses.asdict(r) for r in row.reach],
        input_bytes=sum(t.nbytes for t in inputs.values() if isinstance(t, Tensor)),
        moved_bytes=cost.moved_bytes,
        saved_bytes=cost.saved_bytes,
        flops=cost.flops,
        limit_ms=max(by_bytes_ms, by_flops_ms),
    )


def _guarded(measurement: Measurement, device: torch.device, work: Callable[[], Any]) -> Any:
    """The result of `work`, or None and the reason in the measurement. Its time is added to `prepare_s`."""
    start_s = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as error:
        _write_down(measurement, error)
    finally:
        measurement.prepare_s = round((measurement.prepare_s or 0.0) + time.monotonic() - start_s, 2)
    # Outside the handler, because the exception's traceback holds the tensors of the failed call.
    timing.release(device)
    _check_device(device, measurement)
    return None


def _write_down(measurement: Measurement, error: Exception) -> None:
    measurement.status, measurement.detail = status_of(error)


def status_of(error: Exception) -> tuple[str, str]:
    """The status of a measurement that raised `error`, and the error's first line."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    detail = f"{type(error).__name__}: {first_line}"[:300]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory", detail
    if isinstance(error, ImportError):
        return "not installed", detail
    if isinstance(error, NoSuchOp):
        return "no such op", detail
    if isinstance(error, (TypeError, NotImplementedError)):
        return "not supported", detail
    return "failed", detail


def _check_device(device: torch.device, measurement: Measurement) -> None:
    """Raise BenchError if the device no longer works. An illegal address ends the CUDA context of the whole process."""
    try:
        timing.synchronize(device)
    except RuntimeError as error:
        raise BenchError(
            f"{measurement.impl} left the device unusable ({measurement.detail}); leave it out with --without."
        ) from error


def _judge_errors(
    record: RowRecord, problem: Problem, bound: dict[str, Bound], by_name: dict[str, Measurement], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Measure the errors of all implementations of the row's problem. Refuse tigon if it breaks the rule."""
    smaller, truth = _truth(problem, dtype, device)
    record.error_shape = list(smaller.row.shape)
    op, inputs = smaller.op, smaller.inputs
    baseline: dict[str, float] | None = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        baseline = numerical_errors.errors_of(smaller.oracle(), truth)
    timing.release(device)
    record.allowed_errors = numerical_errors.allowed_errors(op, inputs, truth, dtype, baseline)
    for name, b in bound.items():
        measurement = by_name[name]
        if measurement.role not in ("variant", "limit"):
            judged = b if smaller is problem else smaller.bind(b.impl)
            _guarded(measurement, device, functools.partial(_errors, judged, measurement, truth, record.allowed_errors))


def _truth(problem: Problem, dtype: torch.dtype, device: torch.device) -> tuple[Problem, numerical_errors.Named]:
    """The fp64 results on the row's shape or, if they do not fit, on half the tokens as often as needed."""
    smaller: Problem | None = problem
    while smaller is not None:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return smaller, smaller.oracle(torch.float64)
        timing.release(device)
        smaller = smaller.with_half_the_tokens(dtype, device)
    raise BenchError(f"fp64 results of {problem.row.id} do not fit on this device, even for one token.")


def _errors(bound: Bound, measurement: Measurement, truth: numerical_errors.Named, allowed: dict[str, float]) -> bool:
    bound.restore()
    outputs, grads = bound.both()
    got = numerical_errors.name_results(outputs, bound.names, grads)
    measurement.errors = numerical_errors.errors_of(got, truth)
    measurement.breaks_rule = numerical_errors.breaks_rule(measurement.errors, allowed)
    if measurement.breaks_rule and measurement.role == "ours":
        worst = measurement.breaks_rule[0]
        measurement.status = "refused"
        error, limit = measurement.errors[worst], allowed[worst]
        measurement.detail = f"{worst} has error {error:.1e}, allowed {limit:.1e}; not timed"
    return True


def _memory(bound: Bound, measurement: Measurement, device: torch.device) -> bool:
    """Measure the peak of one eager forward + backward and the bytes that the forward keeps, after a compiling run."""
    bound.restore()
    bound.both()
    bound.restore()
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
    return True


def _time(
    ready: dict[str, Bound], by_name: dict[str, Measurement], row: Row, repetitions: int, device: torch.device
) -> int:
    """Fill in the times, and return the number of repetitions."""
    runs: dict[str, Run] = {}
    graphs = Graphs(device) if device.type == "cuda" and row.graph else None
    for name, b in ready.items():
        for phase, call in (("forward", b.forward), ("both", b.both)):
            runs[f"{name}|eager_ms|{phase}"] = Run(call, b.restore, idle=True)
        if graphs is not None:
            _capture(graphs, b, by_name[name], runs, device)
        elif row.graph:
            by_name[name].graph_detail = "no CUDA graphs on this device"
        else:
            by_name[name].graph_detail = "launches do not matter at this size"
    with timing.no_garbage_collection():
        timing.take_turns(runs, 1, device)
        start_s = time.monotonic()
        times = timing.take_turns(runs, 1, device)
        round_s = time.monotonic() - start_s
        # The first round shows how many repetitions fit into the row's time budget. At least ten are made.
        made = min(repetitions, max(_LEAST_REPETITIONS, int(_ROW_BUDGET_S / max(round_s, 1e-9))))
        for name, more in timing.take_turns(runs, made - 1, device).items():
            first = times[name]
            times[name] = first + more if isinstance(first, list) and isinstance(more, list) else _failure(first, more)
        for name, b in ready.items():
            _collect(name, by_name[name], times)
            _host(by_name[name], b, row, device)
    return made


def _host(measurement: Measurement, b: Bound, row: Row, device: torch.device) -> None:
    judged = measurement.judged_ms(row.graph)
    if judged is not None:
        probe = dataclasses.replace(measurement)
        measurement.host_us = _guarded(probe, device, lambda: timing.host_us(b.both, b.restore, judged.median, device))


def _failure(*outcomes: list[float] | Exception) -> Exception:
    return next(outcome for outcome in outcomes if isinstance(outcome, Exception))


def _capture(graphs: Graphs, b: Bound, measurement: Measurement, runs: dict[str, Run], device: torch.device) -> None:
    if not b.impl.capturable:
        measurement.graph_detail = "the host waits for the device, which a graph cannot record"
        return
    probe = dataclasses.replace(measurement)
    b.restore()
    forward = _guarded(probe, device, lambda: graphs.capture(b.forward))
    b.restore()
    both = forward and _guarded(probe, device, lambda: graphs.capture(b.both))
    if forward and both:
        runs[f"{b.impl.name}|graph_ms|forward"] = Run(forward, b.restore, idle=False)
        runs[f"{b.impl.name}|graph_ms|both"] = Run(both, b.restore, idle=False)
    else:
        measurement.graph_detail = probe.detail


def _collect(name: str, measurement: Measurement, times: dict[str, list[float] | Exception]) -> None:
    for kind in ("graph_ms", "eager_ms"):
        forward, both = times.get(f"{name}|{kind}|forward"), times.get(f"{name}|{kind}|both")
        failed = next((t for t in (forward, both) if isinstance(t, Exception)), None)
        if failed is not None:
            _write_down(measurement, failed)
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
