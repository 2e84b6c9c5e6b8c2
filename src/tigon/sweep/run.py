"""The steps of `tigon sweep`: read the file, expand the grid, probe the machine, measure each point, write the report.

Each point runs in a new process, or in one process per GPU. A point therefore inherits nothing from the one before,
and a crash ends only that point. The planner predicts a point while it is measured.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tigon._quiet import quiet_packages
from tigon.errors import RecipeError, RunFolderError, TigonError, UsageError
from tigon.planner.gpus import find_gpu
from tigon.sweep import definition, failures, points, self_test
from tigon.sweep.definition import Sweep
from tigon.sweep.points import Point
from tigon.sweep.prediction import predict
from tigon.sweep.processes import AHEAD, Workers
from tigon.sweep.report import report
from tigon.sweep.results import folder, import_results, results, schema
from tigon.sweep.results.folder import SweepFolder
from tigon.sweep.results.import_results import EarlierResults, ImportedPoint
from tigon.sweep.self_test import Kind
from tigon.sweep.worker import orders
from tigon.trainer.distributed import signals
from tigon.trainer.guards import preflight
from tigon.units import in_bytes, in_clock

LEAST_LIMIT_BYTES = 1 << 30
PREDICTIONS = "predictions.json"
PROBE_TIMEOUT_S = 600.0
"""Probing the machine and compiling the kernels for the self-test takes a minute. A broken kernel may never end."""
DEFAULT_OUT = Path("runs") / "sweeps"


@dataclass
class Run:
    """The state of a running sweep."""

    sweep: Sweep
    points: list[Point]
    folder: SweepFolder
    environment: Mapping[str, Any]
    limit_bytes: int | None
    command: str
    predictions: dict[str, dict[str, Any]]
    records: dict[str, list[dict[str, Any]]]
    workers: Workers
    imported: dict[str, ImportedPoint]
    """Point id -> its row in earlier results. A measurement in this folder takes precedence."""
    new: bool
    """Whether this call created the folder."""
    earlier: EarlierResults | None = None
    """The results.json named with --from."""
    anew: frozenset[str] = frozenset()
    """Ids of imported points that are measured again."""
    wall_s: list[tuple[str, float]] = field(default_factory=list)
    """(variant, seconds) per measurement: first the earlier ones, then those of this call."""
    self_tests: dict[Kind, dict[str, Any]] = field(default_factory=dict)
    """Result of the kernels' self-test for each kind of point measured in this call."""

    def row(self, point: Point) -> dict[str, Any]:
        return results.row_of(
            point, self.records.get(point.id, ()), self.sweep, self.predictions.get(point.id, {}),
            self.imported.get(point.id),
        )  # fmt: skip

    def has_imported(self, point: Point) -> bool:
        """Whether the imported row has every repeat, so that the point needs no measurement."""
        one = self.imported.get(point.id)
        return one is not None and one.complete(self.sweep) and point.id not in {*self.anew, *self.records}

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(point) for point in self.points]

    def results(self) -> dict[str, Any]:
        return results.collect(
            self.sweep, self.points, self.records, limit_bytes=self.limit_bytes, command=self.command,
            predictions=self.predictions, imported=self.imported,
        )  # fmt: skip


def sweep(
    path: Path, assignments: Sequence[str] = (), *, memory_limit: str | None = None, time_limit: str | None = None,
    out: Path | None = None, only: str | None = None, retry: bool = False, draw: bool = False,
    earlier: Path | None = None,
) -> Path:  # fmt: skip
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
        earlier: a results.json whose finished points are imported.

    Raises:
        RecipeError, UsageError: a bad sweep file or option, before anything is measured or written.
        RunFolderError: the folder belongs to another sweep, another machine or other settings.
    """
    preflight.check_packages()
    preflight.check_process()
    quiet_packages()
    time_limit_s = _time_limit(time_limit)
    read = definition.load(path)
    limit_bytes = _limit(memory_limit or read.memory_limit)
    chosen = folder.find(out or DEFAULT_OUT / read.name, read.name)
    offered = None if earlier is None else import_results.read(earlier)
    before = _machine(chosen, offered)
    with tempfile.TemporaryDirectory(prefix="tigon-sweep-") as scratch:
        every = points.expand(
            read, assignments, memory_limit_bytes=limit_bytes, scratch=Path(scratch),
            # results of a GPU can be drawn on a machine without one: `on_gpu` in the recipes must still apply
            gpu_present=lambda: preflight.gpu_present() or (before is not None and before["memory_bytes"] is not None),
        )  # fmt: skip
    wanted = _chosen(every, only, path)
    new = chosen.make()
    with chosen.alone():
        folder.find(chosen.path, read.name)  # again, because another sweep may have started in it meanwhile
        run = Run(
            sweep=read, points=every, folder=chosen, environment=before or {}, limit_bytes=limit_bytes,
            command=_command(path, assignments, memory_limit), predictions=_read_predictions(chosen, every),
            records=chosen.records(every), workers=Workers(chosen), imported=import_results.load(chosen.path), new=new,
        )  # fmt: skip
        with _reported(run):
            _check_settings(run)
            if offered is not None:
                _import_points(run, offered, wanted if only is not None else ())
            if draw:
                _draw(run)
            else:
                _measure(run, wanted, time_limit_s=time_limit_s, retry=retry)
    return chosen.path


@contextlib.contextmanager
def _reported(run: Run) -> Iterator[None]:
    """Write results and report at the end, also after an interruption. A refused folder is left unchanged."""
    refused = False
    with signals.sigterm_interrupts():
        try:
            yield
        except RunFolderError:
            refused = True
            if run.new:
                run.folder.remove_if_empty()
            raise
        except KeyboardInterrupt:
            _say(run, "interrupted; the finished measurements are kept, run the same command to continue")
            raise
        finally:
            run.workers.close()
            if not refused:
                _finish(run)


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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", (text or "").strip())
    if text is None:
        return None
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


# --- earlier measurements --------------------------------------------------------------------------------------------


def _machine(chosen: SweepFolder, offered: EarlierResults | None) -> Mapping[str, Any] | None:
    """The environment of the earlier measurements, or None if there are none yet."""
    kept = next((one.environment for one in import_results.load(chosen.path).values()), None)
    return chosen.machine() or kept or (None if offered is None else offered.environment)


def _check_settings(run: Run) -> None:
    """Refuse a folder that has measurements of other settings, which the results would omit. List damaged files."""
    others = run.folder.of_other_settings(run.points)
    others += sum(not run.imported[point.id].fits(point, run.sweep) for point in run.points if point.id in run.imported)
    if others:
        raise RunFolderError(
            f"{run.folder.path}: {others} of its measurements have other settings and would be lost; choose another "
            "folder with --out"
        )
    for file, why in run.folder.damaged().items():
        _say(run, f"damaged  {file}: not a record of a point: {why}; the point counts as not measured")


def _import_points(run: Run, offered: EarlierResults, anew: Sequence[Point]) -> None:
    """Import these points from earlier results. anew: points that are measured even if they are imported."""
    here = run.folder.machine() or next((one.environment for one in run.imported.values()), None)
    if here is not None:
        _check_offer(offered, here)
    imported, left = offered.importable(run.points, run.sweep, run.limit_bytes, run.records, run.imported)
    run.earlier, run.imported = offered, {**run.imported, **imported}
    run.anew = frozenset(point.id for point in anew if point.id in run.imported and point.id not in run.records)
    for line in import_results.words(offered, imported, left, run.sweep):
        _say(run, line)
    if run.anew:
        _say(run, f"again    {len(run.anew)} imported points are measured again, because --only finds them")


def _check_offer(offered: EarlierResults, here: Mapping[str, Any]) -> None:
    if offered.environment is not None:
        folder.check_machine([offered.environment], here, offered.path, "leave out --from")


def _check_machine(run: Run) -> None:
    """Refuse to add measurements to those of another machine."""
    if run.earlier is not None:
        _check_offer(run.earlier, run.environment)
    there = [record["environment"] for own in run.records.values() for record in own]
    there += [one.environment for one in run.imported.values()]
    way = "draw the existing results with --draw, or choose another folder with --out"
    folder.check_machine(there, run.environment, run.folder.path, way)


def _save_imported(run: Run) -> None:
    """Write imported points into the folder. Called after the check of the machine, which may refuse them."""
    if run.earlier is not None:
        import_results.keep(run.folder.path, run.imported)


def _draw(run: Run) -> None:
    _save_imported(run)
    for point in run.points:
        if not run.has_imported(point):
            _predict(run, point)


# --- the loop --------------------------------------------------------------------------------------------------------


def _measure(run: Run, chosen: Sequence[Point], *, time_limit_s: float | None, retry: bool) -> None:
    began_s = time.perf_counter()
    todo = _todo(run, chosen, retry=retry)
    _say(
        run,
        f"sweep    {run.sweep.path}: {len(run.points)} points, {len(todo)} measurements to do, in {run.folder.path}",
    )
    for point in run.points:
        if point.refused:
            _say(run, f"refused  {point.id}: {point.refused}")
    if todo:
        _probe(run, todo)
        _check_machine(run)
    _save_imported(run)
    if todo:
        _say(run, f"device   {run.environment['device']}{_limit_words(run)}")
        for wrong_op in self_test.words(run.environment["wrong_ops"]):
            _say(run, f"warning  wrong results on this device: {wrong_op}; the model's own code is used (tigon doctor)")
        _measure_all(run, todo, began_s, time_limit_s)


def _measure_all(run: Run, todo: Sequence[tuple[Point, int]], began_s: float, time_limit_s: float | None) -> None:
    run.wall_s = [(row["variant"], row["wall_s"] / row["repeats"]) for row in run.rows() if _finished(row)]
    failed: set[str] = set()
    for number, (point, repeat) in enumerate(todo, 1):
        ahead = len(todo) - number + 1
        if why := _why_skipped(run, point, failed):
            _say(run, f"[{number}/{len(todo)}] {point.id}: skipped, {why}")
            continue
        passed_s = time.perf_counter() - began_s
        if time_limit_s is not None and passed_s + _expected_s(run, point) > time_limit_s:
            _say(run, f"time limit: {ahead} not started, from {point.id}; the same command measures what is left")
            break
        _prepare(run, todo[number - 1 :])
        record = _measure_one(run, point, repeat)
        run.folder.keep(point, repeat, record)
        _remember(run, point, record)
        if record["status"] != failures.OK:
            failed.add(point.id)
        _say(run, f"[{number}/{len(todo)}] {point.id}: {_result_words(run, point, record)}  {_eta(run, todo[number:])}")


def _why_skipped(run: Run, point: Point, failed: set[str]) -> str:
    """Why a point is skipped; empty if it is measured. failed: ids of the points that failed in this call."""
    if point.id in failed:
        return "because another repeat failed"
    why = results.skipped_after(run.row(point), run.rows(), run.sweep.stop_after_oom)
    return f"after {why} ran out of memory" if why else ""


def _finished(row: Mapping[str, Any]) -> bool:
    return row["status"] in failures.FINISHED


def _prepare(run: Run, ahead: Sequence[tuple[Point, int]]) -> None:
    """On a GPU, start processes for the next points if fewer are ready than the next point needs."""
    gpus = [point.recipe.sharding.gpus for point, _ in ahead if point.recipe is not None]
    if run.environment["memory_bytes"] and run.workers.n_ready < gpus[0]:
        run.workers.prepare(max(gpus[0], min(AHEAD, sum(gpus))) - run.workers.n_ready)


def _todo(run: Run, chosen: Sequence[Point], *, retry: bool) -> list[tuple[Point, int]]:
    """Missing measurements: the first repeat of every point, then the second. Failed points get no more repeats."""
    todo = []
    for repeat in range(run.sweep.repeats):
        for point in chosen:
            own = run.records.get(point.id, [])
            done = {record["repeat"] for record in own if not retry or record["status"] in failures.FINISHED}
            failed = any(record["status"] != failures.OK for record in own if record["repeat"] in done)
            if not point.refused and not failed and repeat not in done and not run.has_imported(point):
                todo.append((point, repeat))
    return todo


def _remember(run: Run, point: Point, record: dict[str, Any]) -> None:
    others = [one for one in run.records.get(point.id, []) if one["repeat"] != record["repeat"]]
    run.records[point.id] = sorted([*others, record], key=lambda one: int(one["repeat"]))
    run.wall_s.append((point.variant, record["wall_s"]))


def _expected_s(run: Run, point: Point) -> float:
    """Expected seconds of a point: the longest of the last three, of the same variant if it was measured before."""
    own = [seconds for variant, seconds in run.wall_s if variant == point.variant]
    return max((own or [seconds for _, seconds in run.wall_s])[-3:], default=0.0)


def _eta(run: Run, ahead: Sequence[tuple[Point, int]]) -> str:
    rest = sum(_expected_s(run, point) for point, _ in ahead)
    return f"({run.wall_s[-1][1]:.0f} s; ETA {in_clock(rest)})" if ahead else f"({run.wall_s[-1][1]:.0f} s)"


# --- one point -------------------------------------------------------------------------------------------------------


def _measure_one(run: Run, point: Point, repeat: int) -> dict[str, Any]:
    """Run one repeat of a point in new processes and return its record, also if they fail."""
    import yaml

    assert point.recipe is not None, "refused points are not measured"
    scratch, log = run.folder.scratch, run.folder.log(point, repeat)
    recipe_file, result = scratch / "recipe.yaml", scratch / "result"
    tried = run.self_tests[self_test.kind_of(point.recipe)]
    recipe_file.write_text(yaml.safe_dump(point.recipe.as_mapping(), allow_unicode=True), encoding="utf-8")
    order = {
        "recipe": str(recipe_file), "rows": run.sweep.rows, "unchecked": point.unchecked,
        "limit_bytes": run.limit_bytes, "result": str(result), "self_test": tried,
    }  # fmt: skip
    kills = failures.kernel_kills()
    began_s = time.perf_counter()
    # techniques may write files as large as the model, which do not belong into the results folder
    with tempfile.TemporaryDirectory(prefix="tigon-sweep-") as room:
        code = _run(run, {**order, "folder": room}, point, log)
    wall_s = time.perf_counter() - began_s
    outputs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(scratch.glob("result.*"))]
    _empty(scratch)
    status, detail, measured = _judge(outputs, code, point, log, kills, run.sweep.timeout_s)
    return {
        "schema": folder.SCHEMA, "id": point.id, "key": point.key, "variant": point.variant, "axes": dict(point.axes),
        "repeat": repeat, "status": status, "detail": detail, "measured": measured, "wall_s": wall_s,
        "environment": run.environment, "command": run.command, "memory_limit_bytes": run.limit_bytes,
        "recipe": point.recipe.as_mapping(), "wrong_ops": tried["wrong_ops"],
    }  # fmt: skip


def _run(run: Run, order: Mapping[str, Any], point: Point, log: Path) -> int | None:
    """The exit code of the point's processes, or None after the timeout. The planner predicts the point meanwhile."""
    assert point.recipe is not None
    with run.workers.carry_out(order, log, processes=point.recipe.sharding.gpus) as group:
        began_s = time.perf_counter()
        _predict(run, point)
        return group.wait(max(1.0, run.sweep.timeout_s - (time.perf_counter() - began_s)))


def _probe(run: Run, todo: Sequence[tuple[Point, int]]) -> None:
    """Have a worker describe the machine and test the kernels that the remaining points use.

    Raises RecipeError if no worker can run.
    """
    own = run.folder
    kinds = list(dict.fromkeys(self_test.kind_of(point.recipe) for point, _ in todo if point.recipe))
    answer, log = own.scratch / "probe.json", own.path / folder.LOGS / "probe.log"
    kills = failures.kernel_kills()
    with run.workers.carry_out({"probe": str(answer), "kinds": kinds}, log) as group:
        code = group.wait(PROBE_TIMEOUT_S)
    if not answer.exists():
        slow = f"the probe of the machine and its kernels took longer than {PROBE_TIMEOUT_S:g} s"
        detail = slow if code is None else failures.status_of_exit(code, log, kills)[1]
        raise RecipeError(f"a point cannot be started: {detail}; the full output is in {log}")
    probe: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    _empty(own.scratch)
    run.self_tests = dict(zip(kinds, probe["self_tests"], strict=True))
    wrong = self_test.merged({one["dtype"]: one["wrong_ops"]} for one in probe["self_tests"] if one["wrong_ops"])
    run.environment = {**probe["environment"], "wrong_ops": wrong}


def _empty(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(exist_ok=True)


def _judge(
    outputs: Sequence[Mapping[str, Any]], code: int | None, point: Point, log: Path, kills: int | None, timeout_s: float
) -> tuple[str, str, dict[str, Any] | None]:
    """(status, reason, figures) from the processes' result files, or from their exit code if one is missing."""
    assert point.recipe is not None

    def reported(*statuses: str) -> tuple[str, str] | None:
        return next(((s, str(one["detail"])) for s in statuses for one in outputs if one["status"] == s), None)

    ended = None
    if len(outputs) < point.recipe.sharding.gpus:
        if code is None:
            ended = reported(failures.FAILED) or (failures.TIMED_OUT, f"longer than {timeout_s:g} s")
        else:  # a kill first: the other processes then fail too, because they lose the connection to the killed one
            ended = (
                failures.status_of_kill(code, kills)
                or reported(failures.FAILED)
                or failures.status_of_exit(code, log, kills)
            )
    bad = reported(failures.OUT_OF_MEMORY, failures.REFUSED) or ended or reported(failures.FAILED)
    return (*bad, None) if bad else (failures.OK, "", _combined(outputs))


def _combined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of figures for all processes: those of the first, with the highest peak of any process."""
    measured = {name: value for name, value in outputs[0].items() if name not in ("status", "detail")}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes"):
        values = [one[name] for one in outputs if one[name] is not None]
        measured[name] = max(values, default=None)
    return measured | {"processes": len(outputs)}


# --- predictions -----------------------------------------------------------------------------------------------------


def _predict(run: Run, point: Point) -> None:
    """Predict a point once. The planner predicts GPUs only; if it refuses a point, its reason is stored instead."""
    total_bytes = run.environment.get("memory_bytes")
    if total_bytes is None or point.id in run.predictions or point.recipe is None:
        return

    try:
        predicted = predict(point.recipe, run.environment["device"], min(total_bytes, run.limit_bytes or total_bytes))
    except TigonError as error:
        predicted = {"reason": failures.line(error)}
    run.predictions[point.id] = {**predicted, "key": point.key}


def _read_predictions(own: SweepFolder, every: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Earlier predictions of the points whose settings have not changed."""
    try:
        stored: dict[str, dict[str, Any]] = json.loads((own.path / PREDICTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if schema.misfit(stored, schema.Predictions):
        return {}
    keys = {point.id: point.key for point in every}
    return {name: predicted for name, predicted in stored.items() if predicted.get("key") == keys.get(name)}


# --- output ----------------------------------------------------------------------------------------------------------


def _finish(run: Run) -> None:
    """Write results and report, also after an interruption."""
    if run.predictions:
        orders.write(run.folder.path / PREDICTIONS, run.predictions)
    written = run.results()
    run.folder.write_results(written)  # before the report, which takes seconds: the sweep may be killed meanwhile
    report.write(written, run.folder.path)
    done = sum(map(_finished, written["points"]))
    _say(run, f"results  {done} of {len(written['points'])} points measured, {run.folder.path / folder.RESULTS}")
    _say(run, f"report   {run.folder.path / 'report.html'}")


def _say(run: Run, text: str) -> None:
    print(text, flush=True)


def _limit_words(run: Run) -> str:
    if run.limit_bytes is None:
        return ""
    how = "CUDA context and NCCL included" if run.environment["memory_bytes"] else "of the process's data segment"
    return f", limited to {run.limit_bytes / 2**30:.1f} GiB, {how}"


def _result_words(run: Run, point: Point, record: Mapping[str, Any]) -> str:
    if record["status"] != failures.OK:
        return f"{record['status']}. {record['detail']}"
    row = results.row_of(point, [record], run.sweep, {})
    return (
        f"peak {in_bytes(row['peak_allocated_bytes'])}, {row['tokens_per_s']:,.0f} tokens/s, "
        f"{1e3 * row['step_s']:,.0f} ms per step"
    )
