"""What the commands `tigon bench kernels` and `train` share: places to write, a time limit, and an end with reasons."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tigon.bench import record as records
from tigon.bench.record import R, Record
from tigon.errors import BenchError, OptionError

_TIME_LIMIT = "time limit"
_MOST_REASONS = 5


@dataclass(kw_only=True)
class Session:
    """Where a command writes, and when it starts no further row."""

    json_path: Path | None = None
    resume: bool = False
    plot_dir: Path | None = None
    time_limit_s: float | None = None
    _start_s: float = field(default_factory=time.monotonic)

    def check(self, form: type[Record]) -> None:
        """Raise OptionError or BenchError if a file could not be written, before anything is measured."""
        if self.resume and self.json_path is None:
            raise OptionError("--resume requires --json FILE, the record to continue.")
        if self.json_path is not None:
            records.check_place(self.json_path)
            records.check_written_over(self.json_path, form)
        if self.plot_dir is not None:
            records.check_place(self.plot_dir / "table.md", flag="--plot")

    def continued(self, run: R) -> R:
        """The record that `--resume` continues, or `run` itself."""
        return records.continued(run, self.json_path) if self.resume and self.json_path is not None else run

    def is_over(self, run: Record, left: Sequence[str]) -> bool:
        """Whether the time limit is over. The record then names what is left."""
        if self.time_limit_s is None or time.monotonic() - self._start_s <= self.time_limit_s:
            return False
        run.not_run += [f"{name} ({_TIME_LIMIT})" for name in left]
        return True

    def save(self, run: Record, *, has_figures: bool) -> None:
        """Write the record after a row, if it has figures yet."""
        run.seconds = round(time.monotonic() - self._start_s, 1)
        if self.json_path is not None and has_figures:
            records.save(run, self.json_path)

    def finish(self, run: R, *, has_figures: bool, reasons: Sequence[str], draw: Callable[[R, Path], None]) -> None:
        """Write record and charts.

        Raises BenchError if nothing was measured, unless only the time limit was the reason: an empty record misleads.
        reasons: why rows have no figures.
        """
        why = [*reasons, *(name for name in run.not_run if not name.endswith(f"({_TIME_LIMIT})"))]
        if why and not has_figures:
            more = f"; and {len(why) - _MOST_REASONS} more" if len(why) > _MOST_REASONS else ""
            raise BenchError(f"nothing was measured, and nothing is written: {'; '.join(why[:_MOST_REASONS])}{more}")
        if run.not_run:
            print(f"not measured: {', '.join(run.not_run)}")
        if self.json_path is not None:
            records.save(run, self.json_path)
            print(f"wrote {self.json_path}")
        if self.plot_dir is not None:
            draw(run, self.plot_dir)
