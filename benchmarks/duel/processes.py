"""The processes of rows: one after the other, or several that prepare beside each other and are timed alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.duel import turns
from benchmarks.duel.entries import ENTRIES, Row

ROW_LIMIT_S = 240
LEAST_S = {"unsloth": 110, "tigon": 70, "hf": 60, "liger": 60}
"""With less time left no row of this library is started."""
OVER_LIMIT, OUT_OF_MEMORY = "ended at its limit", "out of memory"
LOG_CHARACTERS, LAST_CHARACTERS = 3000, 300
DRAIN_S = 1.0
"""Kernels that a stopped process has launched run on for at most a step. The row's last warm-up step follows."""
TURN_LIMIT_S = 100
"""A row that is not through with its turn by then waits for a process that is stopped, and is ended."""
_POLL_S = 0.05
Line = dict[str, Any]
Answer = tuple[Row, Line, Line | None]
"""A row, its line, and the environment of its process. A row that failed has its reason under `error`, and no
environment."""


class Running:
    """A row in its own process."""

    def __init__(self, row: Row, slot: int, tiny: bool, xformers: Path | None) -> None:
        """slot: which of the rows that run beside each other. Each slot has a folder for what Unsloth compiles."""
        self.row, self.slot = row, slot
        self._start_s, self._stopped_s = time.monotonic(), 0.0
        self._stopped_since_s: float | None = None
        self._turn_since_s: float | None = None
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        command = [sys.executable, "-m", "benchmarks.duel", "--one", str(row)]
        with (self._folder / "log.txt").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*command, "--json", str(self._folder / "answer.json"), *["--tiny"] * tiny],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(row, slot, xformers) | {turns.VARIABLE: str(self._folder)},
            )

    @property
    def ready(self) -> bool:
        """Whether it waits for its turn."""
        return (self._folder / turns.READY).exists()

    @property
    def timed(self) -> bool:
        """Whether its timed steps are over."""
        return (self._folder / turns.DONE).exists() or self.ended

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def over_limit(self) -> bool:
        turn_s = 0.0 if self._turn_since_s is None or self.timed else time.monotonic() - self._turn_since_s
        return self.active_s > ROW_LIMIT_S or turn_s > TURN_LIMIT_S

    @property
    def active_s(self) -> float:
        """Seconds since the start, without those in which it was stopped for another row."""
        stopped_s = 0.0 if self._stopped_since_s is None else time.monotonic() - self._stopped_since_s
        return time.monotonic() - self._start_s - self._stopped_s - stopped_s

    def stop(self) -> None:
        """Pause every process of the row."""
        self._signal(signal.SIGSTOP)
        self._stopped_since_s = time.monotonic()

    def resume(self) -> None:
        if self._stopped_since_s is not None:
            self._stopped_s += time.monotonic() - self._stopped_since_s
            self._stopped_since_s = None
            self._signal(signal.SIGCONT)

    def go(self) -> None:
        """Give it its turn."""
        self._turn_since_s = time.monotonic()
        (self._folder / turns.GO).touch()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def answer(self, over_limit: bool) -> Answer:
        """The line that the ended process has measured, or the reason why it has none."""
        path, row = self._folder / "answer.json", self.row
        log_text = (self._folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not over_limit else None
        row_s = {"row_s": round(self.active_s, 1)}
        self._temporary.cleanup()
        if found is not None:
            environment = found["environment"]
            about = {key: environment[key] for key in ("tigon_commit", "date", "driver")}
            return row, {**found["line"], **row_s, **about}, environment
        reason = OVER_LIMIT if over_limit else f"exit {self._process.returncode}"
        if "OutOfMemoryError" in log_text:
            reason = OUT_OF_MEMORY
        print(log_text, flush=True)
        last = next((text for text in reversed(log_text.splitlines()) if text.strip()), "")[:LAST_CHARACTERS]
        base = {"task": row.task, "entry": row.entry, "size": row.size}
        return row, {**base, "error": reason, "last_line": last, **row_s}, None

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)


def _environment(row: Row, slot: int, xformers: Path | None) -> dict[str, str]:
    """The variables of a row's process: no network, and xformers only where the row asks for it."""
    found = dict(os.environ)
    found |= {
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "UNSLOTH_DISABLE_STATISTICS"), "1"),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir()) / f"unsloth_compiled_cache_{slot}"),
    }
    if ENTRIES[row.entry].xformers and xformers is not None:
        for name, folder in (("PYTHONPATH", xformers), ("LD_LIBRARY_PATH", xformers / "lib")):
            found[name] = os.pathsep.join(filter(None, [str(folder.resolve()), found.get(name)]))
    return found


def answers(
    rows: Sequence[Row], budget_s: float, tiny: bool = False, xformers: Path | None = None, beside: int = 1
) -> Iterator[Answer]:
    """Measure rows until the budget is over, and yield each when it has ended.

    Args:
        budget_s: seconds from now. A row that it ends is not yielded.
        beside: how many rows run at once. One alone takes its timed steps, and the others are stopped meanwhile.
    """
    waiting, running = list(rows), list[Running]()
    end_s = time.monotonic() + budget_s
    timed: Running | None = None
    try:
        while waiting or running:
            timed = _next_turn(running, timed)
            left_s = end_s - time.monotonic()
            while timed is None and waiting and len(running) < beside and left_s >= LEAST_S[_library(waiting[0])]:
                slot = min({*range(beside)} - {one.slot for one in running})
                running.append(Running(waiting.pop(0), slot, tiny, xformers))
            if left_s <= 0 or not running:
                return
            for one in [*running]:
                over_limit = one.over_limit and not one.ended
                if over_limit:
                    one.kill()
                if one.ended:
                    running.remove(one)
                    yield one.answer(over_limit)
            time.sleep(_POLL_S)
    finally:
        for one in running:
            one.kill()


def _next_turn(running: Sequence[Running], timed: Running | None) -> Running | None:
    """Which row takes its timed steps now. The others are stopped until it has ended its timed steps."""
    if timed is not None and timed.timed:
        timed = None
        for one in running:
            one.resume()
    if timed is None and (timed := next((one for one in running if one.ready and not one.timed), None)) is not None:
        others = [one for one in running if one is not timed]
        for one in others:
            one.stop()
        if others:
            time.sleep(DRAIN_S)
        timed.go()
    return timed


def _library(row: Row) -> str:
    return ENTRIES[row.entry].library
