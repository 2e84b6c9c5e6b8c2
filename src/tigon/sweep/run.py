"""`tigon sweep`: read the file, expand the grid, probe the machine, measure each point in a new process, report.

A point inherits nothing from the one before, and a crash ends only that point. The planner predicts a point while it
is measured.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tigon._quiet import quiet_packages
from tigon.errors import RunFolderError, TigonError, UsageError
from tigon.planner.gpus import find_gpu
from tigon.sweep import definition, failures, folder, points, report, results, self_test
from tigon.sweep.definition import Sweep
from tigon.sweep.folder import SweepFolder
from tigon.sweep.one_point import Measuring, predict
from tigon.sweep.points import Point
from tigon.sweep.processes import AHEAD, Workers
from tigon.trainer.distributed import signals
from tigon.trainer.guards import preflight
from tigon.units import in_bytes, in_clock

LEAST_LIMIT_BYTES = 1 << 30
DEFAULT_OUT = Path("runs") / "sweeps"


def sweep(
    path: Path,
    assignments: Sequence[str] = (),
    *,
    memory_limit: str | None = None,
    time_limit: str | None = None,
    out: Path | None = None,
    only: str | None = None,
    retry: bool = False,
    draw: bool = False,
) -> Path:
    """Measure every point of the sweep file that its folder does not have yet, and return the folder.

    Args:
        path: the sweep file.
        assignments: `section.key=value` changes to every recipe.
        memory_limit: limit per process, a size or a GPU's name.
        time_limit: start no point that would probably end later than this, e.g. "9m".
        out: the results folder; runs/sweeps/NAME if left out.
        only: regular expression; measure only the points whose id it matches.
        retry: measure failed points again.
        draw: measure nothing, only write the report.

    Raises:
        RecipeError, UsageError: a bad sweep file or option, before anything is measured or written.
        RunFolderError: the folder belongs to another sweep, another machine or other settings.
    """
    preflight.check_packages()
    preflight.check_process()
    quiet_packages()
    time_limit_s = _time_limit(time_limit)
    read = definition.load(path)
    limit_bytes = _limit(memory_limit or (None if read.memory_limit is None else str(read.memory_limit)))
    own = folder.find(out or DEFAULT_OUT / read.name, read.name)
    machine = own.contents().machine
    # results of a GPU can be drawn on a machine without one: `on_gpu` in the recipes must still apply
    measured_on_gpu = machine.get("memory_bytes") is not None
    with tempfile.TemporaryDirectory(prefix="tigon-sweep-") as scratch:
        every = points.expand(
            read,
            assignments,
            memory_limit_bytes=limit_bytes,
            gpu_present=lambda: preflight.gpu_present() or measured_on_gpu,
            scratch=Path(scratch),
        )
    wanted = _chosen(every, only, path)
    command = _command(path, assignments, memory_limit)
    measuring = Measuring(read, own, Workers(own.path / folder.LOGS), limit_bytes, command, machine)
    own.make()
    with own.alone():
        folder.find(own.path, read.name)  # again, because another sweep may have started in it meanwhile
        contents = own.contents()
        run = Run(read, every, own, measuring, own.predictions(every), contents.by_point(every))
        with _reported(run):
            if others := contents.of_other_settings(every):
                raise RunFolderError(
                    f"{own.path}: {others} of its measurements have other settings and would be lost; choose another "
                    "folder with --out"
                )
            for file, why in contents.damaged.items():
                _say(f"damaged  {file}: not a record of a point: {why}; the point counts as not measured")
            if draw:
                for point in run.points:
                    run.predict(point)
            else:
                _measure(run, _todo(run, wanted, retry=retry), time_limit_s)
    return own.path


# --- the options -----------------------------------------------------------------------------------------------------


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    limit_bytes = find_gpu(text).memory_bytes
    if limit_bytes < LEAST_LIMIT_BYTES:
        raise UsageError(f"--memory-limit {text} is less than 1 GiB; give a size such as 24GiB, or a GPU's name.")
    if not preflight.gpu_present() and not sys.platform.startswith("linux"):
        raise UsageError("--memory-limit needs a GPU, or Linux for a limit of the process on the CPU; leave it out.")
    return limit_bytes


def _time_limit(text: str | None) -> float | None:
    """Parse `500`, `500s`, `9m` or `1h` into seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", text.strip())
    if not match:
        raise UsageError(f"--time-limit {text}: give seconds, minutes or hours, e.g. 500s, 9m or 1h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"]


def _command(path: Path, assignments: Sequence[str], memory_limit: str | None) -> str:
    words = ["tigon", "sweep", str(path)]
    words += [word for text in assignments for word in ("--set", text)]
    return shlex.join(words + (["--memory-limit", memory_limit] if memory_limit else []))


def _chosen(every: Sequence[Point], only: str | None, path: Path) -> list[Point]:
    if only is None:
        return list(every)
    try:
        matching = [point for point in every if re.search(only, point.id)]
    except re.error as error:
        raise UsageError(f"--only {only}: not a regular expression: {error}.") from None
    if not matching:
        raise UsageError(f"--only {only} finds no point of {path}; the first is called {every[0].id!r}.")
    return matching


# --- the loop --------------------------------------------------------------------------------------------------------

Todo = Sequence[tuple[Point, int]]
"""(point, number of the repeat)"""


@dataclass
class Run:
    """The state of a running sweep."""

    sweep: Sweep
    points: list[Point]
    folder: SweepFolder
    measuring: Measuring
    predictions: dict[str, dict[str, Any]]
    records: dict[str, list[dict[str, Any]]]
    wall_s: list[tuple[str, float]] = field(default_factory=list)
    """(variant, seconds) per measurement: first the earlier ones, then those of this call."""

    def row(self, point: Point) -> dict[str, Any]:
        return results.row_of(point, self.records.get(point.id, ()), self.sweep, self.predictions.get(point.id, {}))

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(point) for point in self.points]

    def keep(self, point: Point, record: dict[str, Any]) -> None:
        self.folder.keep(point, record)
        others = [one for one in self.records.get(point.id, []) if one["repeat"] != record["repeat"]]
        self.records[point.id] = sorted([*others, record], key=lambda one: int(one["repeat"]))
        self.wall_s.append((point.variant, record["wall_s"]))

    def expected_s(self, point: Point) -> float:
        """The longest of the last three measurements, of the same variant if it was measured before."""
        own = [seconds for variant, seconds in self.wall_s if variant == point.variant]
        return max((own or [seconds for _, seconds in self.wall_s])[-3:], default=0.0)

    def predict(self, point: Point) -> None:
        """Predict a point once. The planner predicts GPUs only; if it refuses a point, its reason is stored instead."""
        total_bytes = self.measuring.environment.get("memory_bytes")
        if total_bytes is None or point.id in self.predictions or point.recipe is None:
            return
        memory_bytes = min(total_bytes, self.measuring.limit_bytes or total_bytes)
        try:
            predicted = predict(point.recipe, self.measuring.environment["device"], memory_bytes)
        except TigonError as error:
            predicted = {"reason": failures.line(error)}
        self.predictions[point.id] = {**predicted, "key": point.key}


def _todo(run: Run, chosen: Sequence[Point], *, retry: bool) -> Todo:
    """Missing measurements: the first repeat of every point, then the second. Failed points get no more repeats."""
    todo = []
    for repeat in range(run.sweep.repeats):
        for point in chosen:
            own = run.records.get(point.id, [])
            done = {record["repeat"] for record in own if not retry or record["status"] in failures.FINISHED}
            failed = any(record["status"] != failures.OK for record in own if record["repeat"] in done)
            if not point.refused and not failed and repeat not in done:
                todo.append((point, repeat))
    return todo


def _measure(run: Run, todo: Todo, time_limit_s: float | None) -> None:
    began_s, total = time.perf_counter(), len(todo)
    _say(f"sweep    {run.sweep.path}: {len(run.points)} points, {total} measurements to do, in {run.folder.path}")
    for point in run.points:
        if point.refused:
            _say(f"refused  {point.id}: {point.refused}")
    if todo:
        _probe(run, todo)
    run.wall_s = [(row["variant"], row["wall_s"] / row["repeats"]) for row in run.rows() if _finished(row)]
    failed: set[str] = set()
    for number, (point, repeat) in enumerate(todo):
        title = f"[{number + 1}/{total}] {point.id}"
        if why := _why_skipped(run, point, failed):
            _say(f"{title}: skipped, {why}")
            continue
        passed_s = time.perf_counter() - began_s
        if time_limit_s is not None and passed_s + run.expected_s(point) > time_limit_s:
            left = f"{total - number} not started, from {point.id}"
            _say(f"time limit: {left}; the same command measures what is left")
            break
        _start_ahead(run, todo[number:])
        record = run.measuring.measure(point, repeat, functools.partial(run.predict, point))
        run.keep(point, record)
        if record["status"] != failures.OK:
            failed.add(point.id)
        _say(f"{title}: {_result_words(run, point, record)}  ({_time_words(run, todo[number + 1 :])})")


def _probe(run: Run, todo: Todo) -> None:
    """Have a worker describe the machine and test the kernels, and refuse to add to points of another machine."""
    measuring = run.measuring
    measuring.probe(list(dict.fromkeys(self_test.kind_of(point.recipe) for point, _ in todo if point.recipe)))
    machine = measuring.environment
    there = [record["environment"] for own in run.records.values() for record in own]
    folder.check_machine(there, machine, run.folder.path)
    limited = ""
    if measuring.limit_bytes is not None:
        how = "CUDA context and NCCL included" if machine["memory_bytes"] else "of the process's data segment"
        limited = f", limited to {measuring.limit_bytes / 2**30:.1f} GiB, {how}"
    _say(f"device   {machine['device']}{limited}")
    for wrong_op in self_test.words(machine["wrong_ops"]):
        _say(f"warning  wrong results on this device: {wrong_op}; the model's own code is used (tigon doctor)")


def _why_skipped(run: Run, point: Point, failed: set[str]) -> str:
    """Why a point is skipped; empty if it is measured. failed: ids of the points that failed in this call."""
    if point.id in failed:
        return "because another repeat failed"
    why = results.skipped_after(run.row(point), run.rows(), run.sweep.stop_after_oom)
    return f"after {why} ran out of memory" if why else ""


def _finished(row: Mapping[str, Any]) -> bool:
    return row["status"] in failures.FINISHED


def _start_ahead(run: Run, ahead: Todo) -> None:
    """On a GPU, start processes for the next points if fewer are ready than the next point needs."""
    gpus = [point.recipe.sharding.gpus for point, _ in ahead if point.recipe is not None]
    workers = run.measuring.workers
    if run.measuring.environment["memory_bytes"] and workers.n_ready < gpus[0]:
        workers.prepare(max(gpus[0], min(AHEAD, sum(gpus))) - workers.n_ready)


# --- output ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reported(run: Run) -> Iterator[None]:
    """Write results and report at the end, also after an interruption. A refused folder is left unchanged."""
    refused = False
    with signals.sigterm_interrupts():
        try:
            yield
        except RunFolderError:
            refused = True
            raise
        except KeyboardInterrupt:
            _say("interrupted; the finished measurements are kept, run the same command to continue")
            raise
        finally:
            run.measuring.workers.close()
            if not refused:
                _finish(run)


def _finish(run: Run) -> None:
    written = results.collect(
        run.sweep,
        run.points,
        run.records,
        limit_bytes=run.measuring.limit_bytes,
        command=run.measuring.command,
        predictions=run.predictions,
    )
    # before the report, which takes seconds: the sweep may be killed meanwhile
    run.folder.write_results(written, run.predictions)
    report.write(written, run.folder.path)
    done = sum(map(_finished, written["points"]))
    _say(f"results  {done} of {len(written['points'])} points measured, {run.folder.path / folder.RESULTS}")
    _say(f"report   {run.folder.path / 'report.html'}")


def _say(text: str) -> None:
    print(text, flush=True)


def _result_words(run: Run, point: Point, record: Mapping[str, Any]) -> str:
    if record["status"] != failures.OK:
        return f"{record['status']}. {record['detail']}"
    row = results.row_of(point, [record], run.sweep, {})
    peak, speed = in_bytes(row["peak_allocated_bytes"]), f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"peak {peak}, {speed}, {1e3 * row['step_s']:,.0f} ms per step"


def _time_words(run: Run, ahead: Todo) -> str:
    took = f"{run.wall_s[-1][1]:.0f} s"
    return f"{took}; ETA {in_clock(sum(run.expected_s(point) for point, _ in ahead))}" if ahead else took
