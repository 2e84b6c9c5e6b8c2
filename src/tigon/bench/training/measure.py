"""Measures one case: every variant is prepared and run once, then all take turns from the same starting weights.

A variant that is not installed, does not support the model, fails or runs out of memory has the reason in the record,
and the others go on.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.profiler

from tigon._quiet import library_log_lines_dropped
from tigon.bench import timing
from tigon.bench.measure import release_after_failure, status_of
from tigon.bench.timing import Spread
from tigon.bench.training import planned
from tigon.bench.training.cases import Case
from tigon.bench.training.record import OVER, CaseRecord, StepMeasurement
from tigon.bench.training.time_by_kind import time_by_kind
from tigon.bench.training.trainee import Trainee
from tigon.bench.training.variants import AUTO, FITS, WHOLE, Ready, Variant
from tigon.profiler.recording.peak import PeakMeter, training_state

WARM_UP_STEPS = 1


@dataclass
class _Entry:
    """A variant that is being measured."""

    variant: Variant
    measurement: StepMeasurement
    ready: Ready | None = None
    micro: int = 0

    @property
    def works(self) -> bool:
        return self.ready is not None and self.measurement.status == "ok"


class DoesNotFit(Exception):
    """No micro-batch of a variant fits the memory limit."""


@dataclass
class CaseRun:
    """The measurement of one case. `measure` is the whole of it."""

    case: Case
    device: torch.device
    rounds: int
    steps: int
    product_tflop_per_s: float

    def measure(self, variants: Sequence[Variant]) -> CaseRecord:
        """Prepare the variants, let them take turns, and profile each."""
        start_s = time.monotonic()
        print(f"\n{self.case.id}", flush=True)
        torch.compiler.reset()  # its caches hold the models of the case before
        timing.release(self.device)
        self.trainee = Trainee(self.case, self.device, WARM_UP_STEPS + self.steps)
        case = self.case
        record = CaseRecord(
            id=case.id,
            model=case.model,
            batch=case.batch,
            seq=case.seq,
            precision=case.precision,
            limit_bytes=case.limit_bytes,
            flops=self.trainee.flops(),
        )
        entries = [_Entry(v, StepMeasurement(variant=v.name, code=v.code.name)) for v in variants]
        record.measurements = [entry.measurement for entry in entries]
        for entry in entries:
            print(f"  preparing {entry.variant.name}", flush=True)
            self._guarded(entry, self._prepare)
        times_ms: dict[str, list[float]] = {entry.variant.name: [] for entry in entries}
        for number in range(self.rounds):
            print(f"  round {number + 1} of {self.rounds}", flush=True)
            for entry in entries:
                if entry.works:
                    self._guarded(entry, lambda e: self._turn(e, times_ms[e.variant.name]))
        for entry in entries:
            if entry.works and times_ms[entry.variant.name]:
                self._conclude(entry, record, times_ms[entry.variant.name])
        record.seconds = round(time.monotonic() - start_s, 1)
        return record

    def _guarded(self, entry: _Entry, work: Callable[[_Entry], None]) -> None:
        """Run `work`. If it fails, write the reason down and free what it held."""
        try:
            with warnings.catch_warnings(), library_log_lines_dropped():
                warnings.simplefilter("ignore")
                work(entry)
            return
        except DoesNotFit as error:
            entry.measurement.status, entry.measurement.detail = "does not fit", str(error)
        except Exception as error:
            entry.measurement.status, entry.measurement.detail = status_of(error)
        # Outside the handler, because the exception's traceback holds the tensors of the failed step.
        self.trainee.optimizer.zero_grad()
        entry.ready = None
        release_after_failure(self.device, entry.variant.name, entry.measurement.detail)

    # --- before the turns -------------------------------------------------------------------------------------------

    def _prepare(self, entry: _Entry) -> None:
        """Find what `auto` and `fits` stand for, and run one step, which compiles the kernels."""
        start_s, measurement, variant = time.monotonic(), entry.measurement, entry.variant
        try:
            recomputed, micro = variant.recomputed, self.case.batch
            if recomputed == AUTO:
                recomputed, micro = planned.chosen(self.case, self.trainee.config, self.device)
            elif variant.micro not in (WHOLE, FITS):
                micro = int(variant.micro)
            measurement.recomputed = recomputed
            ready = variant.prepare(self.trainee.model, recomputed)
            self.trainee.restore()
            with ready.active():
                if variant.micro == FITS:
                    micro = self._largest_micro_batch(ready)
                self.trainee.step(ready.loss, 0, micro)
                timing.synchronize(self.device)
            measurement.micro_batch = entry.micro = micro
            measurement.predicted = planned.predicted(
                self.case, self.trainee.config, self.device, variant.code, recomputed, micro
            )
            entry.ready = ready
        finally:
            measurement.prepare_s = round(time.monotonic() - start_s, 2)

    def _largest_micro_batch(self, ready: Ready) -> int:
        """The largest micro-batch whose peak is within the memory limit, or that the device can hold."""
        limit_bytes = self.case.limit_bytes
        # The optimizer's state has to exist, because it is part of the peak.
        smallest = self.case.micro_batches()[-1]
        self._trial(ready, smallest)
        lowest_bytes = 0
        for micro in self.case.micro_batches():
            try:
                lowest_bytes = self._trial(ready, micro)
            except torch.cuda.OutOfMemoryError:
                lowest_bytes = 0
            if lowest_bytes and (limit_bytes is None or lowest_bytes <= limit_bytes):
                return micro
            self.trainee.optimizer.zero_grad()
            timing.release(self.device)
        raise DoesNotFit(
            f"{lowest_bytes / 2**30:.2f} GiB at a micro-batch of {smallest}" if lowest_bytes else "out of memory"
        )

    def _trial(self, ready: Ready, micro: int) -> int:
        """The peak of an optimizer step of at most two micro-batches: the second adds to the gradients of the first."""
        trainee = self.trainee
        meter = PeakMeter(self.device)
        meter.start(list(training_state(trainee.model, trainee.optimizer)))
        try:
            trainee.accumulate(ready.loss, trainee.ids[0].split(micro)[:2])
            trainee.optimizer.step()
        finally:
            peak = meter.stop()
        trainee.optimizer.zero_grad()
        return peak.peak_bytes

    # --- turns ------------------------------------------------------------------------------------------------------

    def _turn(self, entry: _Entry, times_ms: list[float]) -> None:
        """Warm up and time the steps of one variant, from the starting weights."""
        trainee, ready = self.trainee, entry.ready
        assert ready is not None
        if self.device.type == "cuda":
            timing.release(self.device)
        trainee.restore()
        with ready.active():
            timed = timing.time_steps(
                lambda number: trainee.step(ready.loss, number, entry.micro),
                self.device,
                steps=self.steps,
                warm_ups=WARM_UP_STEPS,
            )
        times_ms += timed.ms
        entry.measurement.losses.append(timed.losses)
        if timed.peak_bytes is not None:
            entry.measurement.peak_bytes = max(timed.peak_bytes, entry.measurement.peak_bytes or 0)

    # --- after the turns --------------------------------------------------------------------------------------------

    def _conclude(self, entry: _Entry, record: CaseRecord, times_ms: list[float]) -> None:
        measurement = entry.measurement
        median_ms = statistics.median(times_ms)
        measurement.step_ms = Spread.of(times_ms)
        measurement.tokens_per_s = 1000 * record.tokens / median_ms
        if record.flops is not None:
            measurement.products_share = record.flops / median_ms / 1e9 / self.product_tflop_per_s
        self._guarded(entry, lambda e: self._profile(e, median_ms))
        if measurement.status != "ok":
            # The times hold, but something in the profiled step failed.
            measurement.status, measurement.detail = "ok", f"not profiled: {measurement.detail}"
        if record.limit_bytes is not None and (measurement.peak_bytes or 0) > record.limit_bytes:
            measurement.status = OVER

    def _profile(self, entry: _Entry, median_ms: float) -> None:
        """The time by kind of one step and, on a CPU, the peak of another, because measuring it slows the step down."""
        trainee, ready, cuda = self.trainee, entry.ready, self.device.type == "cuda"
        assert ready is not None
        if cuda:
            timing.release(self.device)
        trainee.restore()
        with ready.active():
            trainee.step(ready.loss, 0, entry.micro)
            if not cuda:
                meter = PeakMeter(self.device)
                meter.start(list(training_state(trainee.model, trainee.optimizer)))
                trainee.step(ready.loss, 0, entry.micro)
                entry.measurement.peak_bytes = meter.stop().peak_bytes
            activity = torch.profiler.ProfilerActivity
            activities = [activity.CPU, activity.CUDA] if cuda else [activity.CPU]
            with torch.profiler.profile(activities=activities) as profile:
                trainee.step(ready.loss, 0, entry.micro)
                timing.synchronize(self.device)
        events = profile.events()
        entry.measurement.kinds_ms = time_by_kind(events, on_cuda=cuda, step_ms=median_ms)
