"""What the commands share: the record's file, a time limit, and an end with reasons."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from tigon.bench import record as records
from tigon.bench import timing
from tigon.bench.record import R, Record
from tigon.errors import BenchError, OptionError


class Line(Protocol):
    """A row or a case of a record."""

    id: str
    tigon_commit: str | None
    date: str | None


L = TypeVar("L", bound=Line)
_TIME_LIMIT = "time limit"
_MOST_REASONS = 5


@dataclass(kw_only=True)
class Session:
    """Where a command writes, and when it starts no further row."""

    json_path: Path | None = None
    resume: bool = False
    time_limit_s: float | None = None
    _start_s: float = field(default_factory=time.monotonic)

    def check(self, form: type[Record]) -> None:
        """Raise OptionError or BenchError if a file could not be written, before anything is measured."""
        path = self.json_path
        if path is None:
            if self.resume:
                raise OptionError("--resume requires --json FILE, the record to continue.")
            return
        records.check_place(path)
        if path.exists() and not (path.is_file() and path.stat().st_size == 0):
            try:
                records.load(path, form)
            except BenchError as error:
                raise BenchError(
                    f"--json would write over another file: {error} Choose another place, or remove it."
                ) from None

    def continued(self, run: R) -> R:
        """The record that `--resume` continues, or `run` itself.

        Raises BenchError if the record has another card, other versions or another number of repetitions.
        """
        if not self.resume or self.json_path is None or not self.json_path.exists():
            return run
        earlier = records.load(self.json_path, type(run))
        differing = [(name, getattr(earlier, name), getattr(run, name)) for name in run.SAME]
        other = records.other_machine(earlier.environment, run.environment)
        for name, was, now in ([other] if other else []) + [one for one in differing if one[1] != one[2]]:
            raise BenchError(
                f"{self.json_path} has {name} {was}, this run {now}; leave out --resume, or write another file."
            )
        return earlier

    def measure(
        self, run: Record, lines: list[L], todo: Mapping[str, Callable[[], L]], device: torch.device
    ) -> Iterator[L]:
        """Measure one line of the record after the other, and yield each.

        The record names what the time limit leaves out, and what does not fit the device.

        Args:
            run: the record, which is written by the caller.
            lines: the record's lines. A new one replaces an earlier one of its id.
            todo: id -> measures the line.
            device: the device, whose memory is freed after each line.
        """
        for position, (name, work) in enumerate(todo.items()):
            if self.time_limit_s is not None and time.monotonic() - self._start_s > self.time_limit_s:
                run.not_run += [f"{left} ({_TIME_LIMIT})" for left in list(todo)[position:]]
                return
            try:
                line = work()
            except torch.cuda.OutOfMemoryError:
                run.not_run.append(f"{name} (it does not fit the device)")
                continue
            finally:
                timing.release(device)
            line.tigon_commit, line.date = run.environment["tigon_commit"], run.environment["date"]
            lines[:] = [*(earlier for earlier in lines if earlier.id != line.id), line]
            yield line

    def save(self, run: Record) -> None:
        """Write the record, if a file is named."""
        run.seconds = round(time.monotonic() - self._start_s, 1)
        if self.json_path is not None:
            records.save(dataclasses.asdict(run), self.json_path)

    def finish(self, run: Record, *, has_figures: bool, reasons: Sequence[str]) -> None:
        """Write the record.

        Raises BenchError if nothing was measured, unless only the time limit was the reason: an empty record misleads.
        reasons: why rows have no figures.
        """
        why = [*reasons, *(name for name in run.not_run if not name.endswith(f"({_TIME_LIMIT})"))]
        if why and not has_figures:
            more = f"; and {len(why) - _MOST_REASONS} more" if len(why) > _MOST_REASONS else ""
            raise BenchError(f"nothing was measured, and nothing is written: {'; '.join(why[:_MOST_REASONS])}{more}")
        if run.not_run:
            print(f"not measured: {', '.join(run.not_run)}")
        self.save(run)
        if self.json_path is not None:
            print(f"wrote {self.json_path}")
