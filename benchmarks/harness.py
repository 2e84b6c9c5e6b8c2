"""The cases share this: command line, record, times of calls and of training steps, kernels of a call, predictions.

Times are those of `tigon.bench.timing`, so every case and `tigon bench` measure alike: implementations take turns, and
a call on a GPU starts on an idle device with a cold L2.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # PyTorch imports it from C
from torch.profiler import ProfilerActivity, profile

from tigon.bench import timing
from tigon.bench.record import environment, other_machine, save
from tigon.bench.session import Session
from tigon.bench.training.planned import gpu_of
from tigon.errors import TigonError
from tigon.planner.request import Request
from tigon.planner.search.option import estimate_option
from tigon.profiler.recording.peak import PeakMeter

Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement of `python -m benchmarks`."""

    measure: Callable[[Bench], None]
    options: Callable[[argparse.ArgumentParser], Any] | None = None
    packages: tuple[str, ...] = ()
    """Packages whose versions the record names beside the usual ones."""
    needs_gpu: bool = True
    """Whether it measures without a GPU only with `--tiny`."""


class Bench:
    """A run of a case: its options, its device, and its record, which is written after every line."""

    def __init__(self, name: str, case: Case, doc: str, arguments: list[str]) -> None:
        parser = argparse.ArgumentParser(
            f"python -m benchmarks {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--tiny", action="store_true", help="small shapes, also without a GPU, to see that it runs")
        parser.add_argument("--json", type=Path, metavar="RECORD", help="write the record to this file")
        if case.options is not None:
            case.options(parser)
        self.refuse = parser.error
        """Ends the command with this message."""
        self._parser, self.given = parser, parser.parse_args(arguments)
        self.tiny: bool = self.given.tiny
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if case.needs_gpu and self.device.type == "cpu" and not self.tiny:
            parser.error("needs a GPU; add --tiny to run small shapes on the CPU")
        self.writes = True
        """Whether this process prints and writes; of several processes only the first does."""
        self._start_s = time.monotonic()
        self._packages = case.packages
        self._environment: dict[str, Any] | None = None
        self.fields: dict[str, Any] = {"command": shlex.join(["python", "-m", "benchmarks", name, *arguments])}

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds(self) -> float:
        """Seconds since the case began."""
        return time.monotonic() - self._start_s

    def resume(self, table: str, choosing: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Go on with the record at `--json`, if it exists and was measured here by the same command.

        choosing: Options that choose lines and change none, so that they may differ. Returns the lines of a table.
        """
        path: Path | None = self.given.json
        if path is None or not path.exists():
            return []
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if other := other_machine(earlier["environment"], self.environment()):
            sys.exit(f"{path} was measured with another {other[0]}; move it away, or choose another place for --json")
        was = vars(self._parser.parse_args(shlex.split(earlier["command"])[4:]))  # after python -m benchmarks CASE
        for name, value in vars(self.given).items():
            if name not in ("json", *choosing) and was[name] != value:
                sys.exit(
                    f"{path} was measured by another command, {earlier['command']}; move it away, or choose "
                    "another place for --json"
                )
        self.fields = {**earlier, **self.fields}
        lines: list[dict[str, Any]] = self.fields.setdefault(table, [])
        return lines

    def add(self, table: str, line: dict[str, Any], text: str = "") -> None:
        """Append a line to a table of the record, print it or `text`, and write the record."""
        self.fields.setdefault(table, []).append(line)
        if self.writes:
            print(text or f"{table} {json.dumps(line)}", flush=True)
            self.save()

    def save(self) -> None:
        """Write the record, if `--json` names one."""
        if self.given.json is None or not self.writes:
            return
        if "environment" not in self.fields:  # it starts CUDA in this process
            self.fields = {"environment": self.environment(), **self.fields}
        self.fields["seconds"] = round(self.seconds, 1)
        save(self.fields, self.given.json)

    def session(self) -> Session:
        """The record of a case with `session_options`, in the form of `tigon bench`."""
        given = self.given
        return Session(json_path=given.json, resume=given.resume, time_limit_s=given.time_limit)

    def environment(self) -> dict[str, Any]:
        """The machine and the versions."""
        if self._environment is None:
            self._environment = environment(self.device, self._packages)
        return self._environment

    def free(self) -> None:
        """Return memory that is no longer referenced to the device."""
        timing.release(self.device)


def session_options(parser: argparse.ArgumentParser) -> None:
    """The options of `Bench.session`."""
    parser.add_argument("--resume", action="store_true", help="measure only what the record at --json lacks")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start nothing more after this time")


# --- calls ------------------------------------------------------------------------------------------------------------


def times_ms(calls: Calls, device: torch.device, *, turns: int = 10, warm_ups: int = 2) -> dict[str, float]:
    """Name -> milliseconds of a call: the median of its turns. The first turns compile."""
    runs = {name: timing.Run(call, before=lambda: None, idle=True) for name, call in calls.items()}
    timing.take_turns(runs, warm_ups, device)
    medians = {}
    for name, times in timing.take_turns(runs, turns, device).items():
        if isinstance(times, Exception):
            raise times
        medians[name] = statistics.median(times)
    return medians


def host_us(call: Callable[[], Any], device: torch.device, about_ms: float) -> float | None:
    """Microseconds until Python has called everything; None on a CPU."""
    return timing.host_us(call, lambda: None, about_ms, device)


def peaks_bytes(calls: Calls, device: torch.device) -> dict[str, int]:
    """Name -> bytes that a call adds to the peak of what was allocated before it."""
    peaks = {}
    for name, call in calls.items():
        gc.collect()
        meter = PeakMeter(device)
        meter.start([])
        call()
        peaks[name] = meter.stop().step_bytes
    return peaks


def kernels_of(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """The kernels of one call: how many, how long the GPU was busy, and the longest by name. Empty on a CPU."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as recorded:
        call()
        timing.synchronize(device)
    return kernel_table(recorded.events())


def kernel_table(events: Any) -> dict[str, Any]:
    """`kernels_of` from the events of a profile."""
    kernels = [event for event in events or () if event.device_type == DeviceType.CUDA]
    return {"busy_ms": busy_ms(kernels), "launches": len(kernels), "kernels": by_name(kernels)}


def busy_ms(kernels: list[Any]) -> float:
    """Milliseconds in which the GPU ran at least one of these."""
    total_us, end_us = 0.0, 0.0
    for start, stop in sorted((one.time_range.start, one.time_range.end) for one in kernels):
        total_us += max(0.0, stop - max(start, end_us))
        end_us = max(end_us, stop)
    return total_us / 1e3


def by_name(kernels: list[Any], longest: int = 20) -> dict[str, tuple[int, float]]:
    """Name -> (calls, milliseconds) of those that take the most time."""
    sums: dict[str, tuple[int, float]] = {}
    for one in kernels:
        calls, ms = sums.get(one.name[:120], (0, 0.0))
        sums[one.name[:120]] = calls + 1, ms + one.time_range.elapsed_us() / 1e3
    return dict(sorted(sums.items(), key=lambda item: -item[1][1])[:longest])


# --- training steps ---------------------------------------------------------------------------------------------------


def figures(timed: timing.Steps, tokens: int) -> dict[str, Any]:
    """What a record has of training steps."""
    return {
        "ms": timed.median_ms,
        "tokens_per_s": 1e3 * tokens / timed.median_ms,
        "peak_bytes": timed.peak_bytes,
        "losses": timed.losses,
        "all_ms": timed.ms,
    }


def predicted(request: Request, device: torch.device) -> dict[str, Any]:
    """The planner's peak and step of a request on this device, or why it has none."""
    try:
        estimate = estimate_option(request, gpu_of(device)).estimate
    except TigonError as error:
        return {"detail": " ".join(str(error).split())[:200]}
    return {"peak_bytes": estimate.peak_allocated_bytes, "ms": 1e3 * estimate.step_s}
