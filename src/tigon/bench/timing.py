"""Times calls, eager and by CUDA graph, and training steps.

Implementations take turns, with one run each per repetition, so that clock drift and power limits affect all of them
equally.

On a GPU every run starts with a cold L2, because a buffer of four times its size is read first. The buffer is not
written, because writing back dirty lines would fall into the measured run (60 MB, 14 us on an H200). Times come from
CUDA events around the run. A graph replay is queued while that buffer is still read, so its time is kernel time without
launch gaps. An eager run starts on an idle GPU, so its time includes launches. On a CPU the host's clock is used, and
CUDA-graph times are missing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

HOST_CALLS = 50
# For a call this long, a few repetitions are enough to measure its host time.
_HOST_BUDGET_MS = 60.0


@dataclass(frozen=True)
class Spread:
    """Median and the quantiles 0.2 and 0.8 over the repetitions, in milliseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return cls(statistics.median(values), fifths[0], fifths[3])


@dataclass(frozen=True)
class Run:
    """One call to time. `before` is not timed. `idle` waits for the device first, so that launches are timed too."""

    call: Callable[[], Any]
    before: Callable[[], None]
    idle: bool


@dataclass(frozen=True)
class Steps:
    """Training steps after the warm-up."""

    ms: list[float]
    losses: list[float]
    """Of every step, the warm-up included."""
    peak_bytes: int | None
    """The most that PyTorch's allocator had allocated in the timed steps; None on a CPU."""

    @classmethod
    def joined(cls, turns: Sequence[Steps]) -> Steps:
        """The steps of several turns."""
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        ms, losses = ([value for turn in turns for value in getattr(turn, name)] for name in ("ms", "losses"))
        return cls(ms, losses, max(peaks, default=None))

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


class StepClock:
    """Times steps, each between synchronisations, and reads the allocator's peaks before and after the warm-up."""

    def __init__(self, device: torch.device, warm_ups: int) -> None:
        self._device, self._warm_ups = device, warm_ups
        self._all_ms: list[float] = []
        self.warm_up_peak_bytes: int | None = None
        self._reset_peak()

    def begin(self) -> None:
        if len(self._all_ms) == self._warm_ups:
            self.warm_up_peak_bytes = self.peak_bytes
            self._reset_peak()
        synchronize(self._device)
        self._start_s = time.perf_counter()

    def end(self) -> None:
        synchronize(self._device)
        self._all_ms.append(1000 * (time.perf_counter() - self._start_s))

    @property
    def warm_up_ms(self) -> list[float]:
        return self._all_ms[: self._warm_ups]

    @property
    def ms(self) -> list[float]:
        """Milliseconds of the steps after the warm-up."""
        return self._all_ms[self._warm_ups :]

    @property
    def peak_bytes(self) -> int | None:
        """The peak since the warm-up; None on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


@functools.cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.ones(max(4 * l2_bytes, 256 << 20) // 4, device=device)


def flush_cache(device: torch.device) -> None:
    """Fill the L2 with clean lines of another buffer."""
    _flush_buffer(device).sum()


def free_flush_buffer() -> None:
    """Free the buffer of `flush_cache`, which would count in the peaks of what is measured next."""
    _flush_buffer.cache_clear()


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(runs: Mapping[str, Run], repetitions: int, device: torch.device) -> dict[str, list[float] | Exception]:
    """Time every run in `repetitions` rounds, in milliseconds. A run that fails has its exception instead."""
    times: dict[str, list[float] | Exception] = {name: [] for name in runs}
    for _ in range(repetitions):
        pending: list[tuple[list[float], Callable[[], float]]] = []
        for name, run in runs.items():
            sofar = times[name]
            if isinstance(sofar, Exception):
                continue
            try:
                pending.append((sofar, _timed(run, device)))
            except Exception as error:
                # The traceback would keep the tensors of the failed call alive.
                times[name] = error.with_traceback(None)
                release(device)
        synchronize(device)
        gc.collect()
        for values, elapsed in pending:
            values.append(elapsed())
    return times


def joined(first: list[float] | Exception, more: list[float] | Exception) -> list[float] | Exception:
    """The times of two calls of `take_turns`, or the exception of the first that failed."""
    if isinstance(first, Exception):
        return first
    return more if isinstance(more, Exception) else first + more


def _timed(run: Run, device: torch.device) -> Callable[[], float]:
    run.before()
    if device.type != "cuda":
        start_s = time.perf_counter()
        run.call()
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        return lambda: elapsed_ms
    flush_cache(device)
    if run.idle:
        torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run.call()
    end.record()
    return lambda: float(start.elapsed_time(end))


def time_steps(step: Callable[[int], torch.Tensor], device: torch.device, *, steps: int, warm_ups: int = 1) -> Steps:
    """Run training steps one after the other, each between synchronisations.

    step: runs the optimizer step of this number, counted from 0, and returns its loss.
    """
    clock, losses = StepClock(device, warm_ups), list[torch.Tensor]()
    for number in range(warm_ups + steps):
        clock.begin()
        losses.append(step(number).detach())
        clock.end()
    return Steps(clock.ms, torch.stack(losses).tolist(), clock.peak_bytes)


class Graphs:
    """CUDA graphs of one row. They share a memory pool, because one runs at a time and no result is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, call: Callable[[], Any]) -> Callable[[], None]:
        """Capture `call` and return its replay. Raises what the capture raises."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # Other streams cannot reuse memory that the trial runs allocated on this stream.
        release(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                call()
        except Exception:
            # An interrupted capture leaves its pool open. The allocator then refuses to free memory or record there.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay


def host_us(call: Callable[[], Any], before: Callable[[], None], about_ms: float, device: torch.device) -> float | None:
    """Host time of one call in microseconds: the mean over consecutive calls without waiting for the device.

    None on a CPU, where the whole call is host time.
    """
    if device.type != "cuda":
        return None
    calls = max(3, min(HOST_CALLS, int(_HOST_BUDGET_MS / max(about_ms, 1e-3))))
    before()
    call()
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed_s = time.perf_counter() - start_s
    synchronize(device)
    return elapsed_s / calls * 1e6


def release(device: torch.device) -> None:
    """Return memory that is no longer referenced to the device."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn Python's garbage collector off, so that its pauses do not affect measurements.

    Existing objects are frozen, so that the collection after every round of `take_turns` does not visit all of torch.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def ceilings(device: torch.device, repetitions: int) -> dict[str, float]:
    """Measure the device's current ceilings: GB/s of a copy (read plus written) and TFLOP/s of a bf16 product.

    The data are random, because on zeros the product is 13 % faster on an H200. On a CPU the sizes are small and the
    product is fp32.
    """
    gpu = device.type == "cuda"
    elements, side = (1 << 30, 8192) if gpu else (1 << 22, 512)
    dtype = torch.bfloat16 if gpu else torch.float32
    source = torch.randn(elements, device=device, dtype=torch.float32).to(dtype)
    copy = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)

    def nothing() -> None: ...

    runs = {
        "copy": Run(lambda: copy.copy_(source), nothing, idle=False),
        "matmul": Run(lambda: torch.mm(a, b, out=product), nothing, idle=False),
    }
    take_turns(runs, 3, device)
    times = take_turns(runs, repetitions, device)
    medians = {name: statistics.median(values) for name, values in times.items() if isinstance(values, list)}
    return {
        "copy_gb_per_s": 2 * source.nbytes / medians["copy"] / 1e6,
        "matmul_tflop_per_s": 2 * side**3 / medians["matmul"] / 1e9,
        "matmul_size": side,
    }
