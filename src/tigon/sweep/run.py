"""`tigon sweep`, in order: read, expand, look at the machine, measure point after point, write the report.

Every point is a process of its own, or as many as it has GPUs: nothing of one point is left for the next, and what
takes the process down takes only the point. The planner predicts a point while it is measured.
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

from tigon.errors import RecipeError, RunFolderError, TigonError, UsageError
from tigon.planner.gpus import find_gpu
from tigon.sweep import definition, failures, folder, import_results, points, results, schema, self_test, worker
from tigon.sweep.definition import Sweep
from tigon.sweep.folder import SweepFolder
from tigon.sweep.import_results import Earlier, Taken
from tigon.sweep.points import Point
from tigon.sweep.processes import AHEAD, Workers
from tigon.sweep.self_test import Kind
from tigon.techniques.quiet import quiet_packages
from tigon.trainer.distributed import signals
from tigon.trainer.guards import preflight
from tigon.units import in_bytes

LEAST_LIMIT_BYTES = 1 << 30
PREDICTIONS = "predictions.json"
PROBE_TIMEOUT_S = 600.0
"""Looking at the machine and compiling the kernels that are tried takes a minute; a kernel may also never end."""
DEFAULT_OUT = Path("runs") / "sweeps"


@dataclass
class Run:
    """A sweep under way."""

    sweep: Sweep
    points: list[Point]
    folder: SweepFolder
    environment: Mapping[str, Any]
    limit_bytes: int | None
    command: str
    predictions: dict[str, dict[str, Any]]
    records: dict[str, list[dict[str, Any]]]
    workers: Workers
    taken: dict[str, Taken]
    """Point id -> its row in earlier results; what is measured here counts before it."""
    new: bool
    """Whether the folder was made in this call."""
    earlier: Earlier | None = None
    """Results that this call takes rows from."""
    anew: frozenset[str] = frozenset()
    """Ids of points that are measured although they were taken over."""
    wall_s: list[tuple[str, float]] = field(default_factory=list)
    """(variant, seconds) of one measurement each: of what there was before, then of this call's."""
    self_tests: dict[Kind, dict[str, Any]] = field(default_factory=dict)
    """What the kernels' self-test found for each kind of point measured in this call."""

    def row(self, point: Point) -> dict[str, Any]:
        return results.row_of(
            point, self.records.get(point.id, ()), self.sweep, self.predictions.get(point.id, {}),
            self.taken.get(point.id),
        )  # fmt: skip

    def has_taken(self, point: Point) -> bool:
        """Whether there is nothing left to measure of it, as earlier results have it whole."""
        one = self.taken.get(point.id)
        return one is not None and one.complete(self.sweep) and point.id not in {*self.anew, *self.records}

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(point) for point in self.points]

    def results(self) -> dict[str, Any]:
        return results.collect(
            self.sweep, self.points, self.records, limit_bytes=self.limit_bytes, command=self.command,
            predictions=self.predictions, taken=self.taken,
        )  # fmt: skip


def sweep(
    path: Path, assignments: Sequence[str] = (), *, memory_limit: str | None = None, time_limit: str | None = None,
    out: Path | None = None, only: str | None = None, retry: bool = False, draw: bool = False,
    earlier: Path | None = None,
) -> Path:  # fmt: skip
    """Carry out the sweep file, or what of it is not in its folder yet; returns the folder.

    draw: measure nothing, only make the report of what is there. retry: failed points again. earlier: a results.json
    whose finished points are taken over. Raises RecipeError and UsageError before anything is measured or written.
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
            # results of a GPU are drawn anywhere: what the recipes say `on_gpu` holds for them there too
            gpu_present=lambda: preflight.gpu_present() or (before is not None and before["memory_bytes"] is not None),
        )  # fmt: skip
    wanted = _chosen(every, only, path)
    new = chosen.make()
    with chosen.alone():
        folder.find(chosen.path, read.name)  # another sweep may have begun in it meanwhile
        run = Run(
            sweep=read, points=every, folder=chosen, environment=before or {}, limit_bytes=limit_bytes,
            command=_command(path, assignments, memory_limit), predictions=_read_predictions(chosen, every),
            records=chosen.records(every), workers=Workers(chosen), taken=import_results.load(chosen.path), new=new,
        )  # fmt: skip
        with _reported(run):
            _check_settings(run)
            if offered is not None:
                _take_over(run, offered, wanted if only is not None else ())
            if draw:
                _draw(run)
            else:
                _measure(run, wanted, time_limit_s=time_limit_s, retry=retry)
    return chosen.path


@contextlib.contextmanager
def _reported(run: Run) -> Iterator[None]:
    """Results and report at the end, also after an interruption; a folder refused is left as it was."""
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
            _say(run, "interrupted; what was measured is kept, and the same command goes on")
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
    """Seconds of `500`, `500s` or `9m`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", (text or "").strip())
    if text is None:
        return None
    if not found:
        raise UsageError(f"--time-limit {text}: give seconds, minutes or hours, e.g. 500s, 9m or 1h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def _command(path: Path, assignments: Sequence[str], memory_limit: str | None) -> str:
    words = ["tigon", "sweep", str(path)]
    words += [word for text in assignments for word in ("--set", text)]
    return shlex.join(words + (["--memory-limit", memory_limit] if memory_limit else []))


def _chosen(every: Sequence[Point], only: str | None, path: Path) -> list[Point]:
    if only is None:
        return list(every)
    try:
        found = [point for point in every if re.search(only, point.id)]
    except re.error as error:
        raise UsageError(f"--only {only}: not a regular expression: {error}.") from None
    if not found:
        raise UsageError(f"--only {only} finds no point of {path}; the first is called {every[0].id!r}.")
    return found


# --- what is there already -------------------------------------------------------------------------------------------


def _machine(chosen: SweepFolder, offered: Earlier | None) -> Mapping[str, Any] | None:
    """The environment of anything that was measured before; None where nothing was."""
    kept = next((one.environment for one in import_results.load(chosen.path).values()), None)
    return chosen.machine() or kept or (None if offered is None else offered.environment)


def _check_settings(run: Run) -> None:
    """Refuse what would leave measurements out of the results; say which files are no measurements."""
    others = run.folder.of_other_settings(run.points)
    others += sum(not run.taken[point.id].fits(point, run.sweep) for point in run.points if point.id in run.taken)
    if others:
        raise RunFolderError(
            f"{run.folder.path}: {others} of its measurements have other settings and would be lost; choose another "
            "folder with --out"
        )
    for file, why in run.folder.damaged().items():
        _say(run, f"damaged  {file}: no record of a point: {why}; it counts as not measured")


def _take_over(run: Run, offered: Earlier, anew: Sequence[Point]) -> None:
    """Add what earlier results have of these points. anew: points that are measured all the same."""
    here = run.folder.machine() or next((one.environment for one in run.taken.values()), None)
    if here is not None:
        _check_offer(offered, here)
    found, left = offered.offer(run.points, run.sweep, run.limit_bytes, run.records, run.taken)
    run.earlier, run.taken = offered, {**run.taken, **found}
    run.anew = frozenset(point.id for point in anew if point.id in run.taken and point.id not in run.records)
    for line in import_results.words(offered, found, left, run.sweep):
        _say(run, line)
    if run.anew:
        _say(run, f"anew     {len(run.anew)} points that --only finds, though they were taken over")


def _check_offer(offered: Earlier, here: Mapping[str, Any]) -> None:
    if offered.environment is not None:
        folder.check_machine([offered.environment], here, offered.path, "leave out --from")


def _check_machine(run: Run) -> None:
    """Refuse to measure beside what was measured on another machine."""
    if run.earlier is not None:
        _check_offer(run.earlier, run.environment)
    there = [record["environment"] for own in run.records.values() for record in own]
    there += [one.environment for one in run.taken.values()]
    way = "--draw shows what is there, --out begins another"
    folder.check_machine(there, run.environment, run.folder.path, way)


def _keep_taken(run: Run) -> None:
    """Once nothing speaks against this machine any more."""
    if run.earlier is not None:
        import_results.keep(run.folder.path, run.taken)


def _draw(run: Run) -> None:
    _keep_taken(run)
    for point in run.points:
        if not run.has_taken(point):
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
    _keep_taken(run)
    if todo:
        _say(run, f"device   {run.environment['device']}{_limit_words(run)}")
        for said in self_test.words(run.environment["wrong_ops"]):
            _say(run, f"warning  wrong results here: {said}; the model's own code is used, see `tigon doctor`")
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
    """Empty for a point that is measured. failed: ids of those that have just not ended well."""
    if point.id in failed:
        return "as another repeat has not ended well"
    why = results.skipped_after(run.row(point), run.rows(), run.sweep.stop_after_oom)
    return f"after {why} ran out of memory" if why else ""


def _finished(row: Mapping[str, Any]) -> bool:
    return row["status"] in failures.FINISHED


def _prepare(run: Run, ahead: Sequence[tuple[Point, int]]) -> None:
    """Have processes import for the next points, where there is a GPU and too few are ready for the first of them."""
    gpus = [point.recipe.sharding.gpus for point, _ in ahead if point.recipe is not None]
    if run.environment["memory_bytes"] and run.workers.n_ready < gpus[0]:
        run.workers.prepare(max(gpus[0], min(AHEAD, sum(gpus))) - run.workers.n_ready)


def _todo(run: Run, chosen: Sequence[Point], *, retry: bool) -> list[tuple[Point, int]]:
    """What is not measured yet: a first time for all, then a second. A failed point is not measured further."""
    todo = []
    for repeat in range(run.sweep.repeats):
        for point in chosen:
            own = run.records.get(point.id, [])
            done = {record["repeat"] for record in own if not retry or record["status"] in failures.FINISHED}
            failed = any(record["status"] != failures.OK for record in own if record["repeat"] in done)
            if not point.refused and not failed and repeat not in done and not run.has_taken(point):
                todo.append((point, repeat))
    return todo


def _remember(run: Run, point: Point, record: dict[str, Any]) -> None:
    others = [one for one in run.records.get(point.id, []) if one["repeat"] != record["repeat"]]
    run.records[point.id] = sorted([*others, record], key=lambda one: int(one["repeat"]))
    run.wall_s.append((point.variant, record["wall_s"]))


def _expected_s(run: Run, point: Point) -> float:
    """How long a point may take, by the longest of the last ones: of its own variant, if there was one."""
    own = [seconds for variant, seconds in run.wall_s if variant == point.variant]
    return max((own or [seconds for _, seconds in run.wall_s])[-3:], default=0.0)


def _eta(run: Run, ahead: Sequence[tuple[Point, int]]) -> str:
    rest = sum(_expected_s(run, point) for point, _ in ahead)
    return f"({run.wall_s[-1][1]:.0f} s; ETA {results.clock(rest)})" if ahead else f"({run.wall_s[-1][1]:.0f} s)"


# --- one point -------------------------------------------------------------------------------------------------------


def _measure_one(run: Run, point: Point, repeat: int) -> dict[str, Any]:
    """Carry out one repeat of a point in its own processes: a record, whatever became of them."""
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
    # what techniques write can be as large as the model: not into the results
    with tempfile.TemporaryDirectory(prefix="tigon-sweep-") as room:
        code = _run(run, {**order, "folder": room}, point, log)
    wall_s = time.perf_counter() - began_s
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(scratch.glob("result.*"))]
    _empty(scratch)
    status, detail, measured = _judge(found, code, point, log, kills, run.sweep.timeout_s)
    return {
        "schema": folder.SCHEMA, "id": point.id, "key": point.key, "variant": point.variant, "axes": dict(point.axes),
        "repeat": repeat, "status": status, "detail": detail, "measured": measured, "wall_s": wall_s,
        "environment": run.environment, "command": run.command, "memory_limit_bytes": run.limit_bytes,
        "recipe": point.recipe.as_mapping(), "wrong_ops": tried["wrong_ops"],
    }  # fmt: skip


def _run(run: Run, order: Mapping[str, Any], point: Point, log: Path) -> int | None:
    """The exit code of the point's processes, or None when they took too long; the planner works meanwhile."""
    assert point.recipe is not None
    with run.workers.carry_out(order, log, processes=point.recipe.sharding.gpus) as group:
        began_s = time.perf_counter()
        _predict(run, point)
        return group.wait(max(1.0, run.sweep.timeout_s - (time.perf_counter() - began_s)))


def _probe(run: Run, todo: Sequence[tuple[Point, int]]) -> None:
    """Have a worker look at the machine, and try the kernels that the points to come use. Raises RecipeError when no
    worker can run."""
    own = run.folder
    kinds = list(dict.fromkeys(self_test.kind_of(point.recipe) for point, _ in todo if point.recipe))
    answer, log = own.scratch / "probe.json", own.path / folder.LOGS / "probe.log"
    kills = failures.kernel_kills()
    with run.workers.carry_out({"probe": str(answer), "kinds": kinds}, log) as group:
        code = group.wait(PROBE_TIMEOUT_S)
    if not answer.exists():
        slow = f"looking at the machine and trying its kernels took longer than {PROBE_TIMEOUT_S:g} s"
        detail = slow if code is None else failures.of_exit(code, log, kills)[1]
        raise RecipeError(f"a point cannot be started: {detail}; {log} has all of it")
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    _empty(own.scratch)
    run.self_tests = dict(zip(kinds, found["self_tests"], strict=True))
    wrong = self_test.merged({one["dtype"]: one["wrong_ops"]} for one in found["self_tests"] if one["wrong_ops"])
    run.environment = {**found["environment"], "wrong_ops": wrong}


def _empty(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(exist_ok=True)


def _judge(
    found: Sequence[Mapping[str, Any]], code: int | None, point: Point, log: Path, kills: int | None, timeout_s: float
) -> tuple[str, str, dict[str, Any] | None]:
    """(status, reason, figures) from what the processes wrote, or from how they ended."""
    assert point.recipe is not None

    def told(*statuses: str) -> tuple[str, str] | None:
        return next(((s, str(one["detail"])) for s in statuses for one in found if one["status"] == s), None)

    ended = None
    if len(found) < point.recipe.sharding.gpus:
        if code is None:
            ended = told(failures.FAILED) or (failures.TIMED_OUT, f"longer than {timeout_s:g} s")
        else:  # a kill first: the others fail as well then, for their connection to the one that is gone
            ended = failures.of_kill(code, kills) or told(failures.FAILED) or failures.of_exit(code, log, kills)
    bad = told(failures.OUT_OF_MEMORY, failures.REFUSED) or ended or told(failures.FAILED)
    return (*bad, None) if bad else (failures.OK, "", _together(found))


def _together(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of figures for all processes: the first one's, with the highest peaks of any."""
    measured = {name: value for name, value in found[0].items() if name not in ("status", "detail")}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes"):
        values = [one[name] for one in found if one[name] is not None]
        measured[name] = max(values, default=None)
    return measured | {"processes": len(found)}


# --- predictions -----------------------------------------------------------------------------------------------------


def _predict(run: Run, point: Point) -> None:
    """Ask the planner about a point once; a point that it cannot predict has no prediction. It predicts GPUs only."""
    total_bytes = run.environment.get("memory_bytes")
    if total_bytes is None or point.id in run.predictions or point.recipe is None:
        return
    from tigon.sweep.prediction import predict

    try:
        found = predict(point.recipe, run.environment["device"], min(total_bytes, run.limit_bytes or total_bytes))
    except TigonError as error:
        found = {"reason": failures.line(error)}
    run.predictions[point.id] = {**found, "key": point.key}


def _read_predictions(own: SweepFolder, every: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """What was predicted before of points that are still the same."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((own.path / PREDICTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if schema.misfit(found, schema.PREDICTIONS):
        return {}
    keys = {point.id: point.key for point in every}
    return {name: told for name, told in found.items() if told.get("key") == keys.get(name)}


# --- words -----------------------------------------------------------------------------------------------------------


def _finish(run: Run) -> None:
    """Results and report of what is there, also after an interruption."""
    if run.predictions:
        worker.write(run.folder.path / PREDICTIONS, run.predictions)
    found = run.results()
    run.folder.write_results(found)  # before all that takes seconds: whoever ends a sweep may not wait
    from tigon.sweep import report  # matplotlib

    report.write(found, run.folder.path)
    done = sum(map(_finished, found["points"]))
    _say(run, f"results  {done} of {len(found['points'])} points measured, {run.folder.path / folder.RESULTS}")
    _say(run, f"report   {run.folder.path / 'report.html'}")


def _say(run: Run, text: str) -> None:
    print(text, flush=True)


def _limit_words(run: Run) -> str:
    if run.limit_bytes is None:
        return ""
    how = "CUDA context and NCCL counted" if run.environment["memory_bytes"] else "of the process's data segment"
    return f", limited to {run.limit_bytes / 2**30:.1f} GiB, {how}"


def _result_words(run: Run, point: Point, record: Mapping[str, Any]) -> str:
    if record["status"] != failures.OK:
        return f"{record['status']}. {record['detail']}"
    row = results.row_of(point, [record], run.sweep, {})
    return (
        f"peak {in_bytes(row['peak_allocated_bytes'])}, {row['tokens_per_s']:,.0f} tokens/s, "
        f"{1e3 * row['step_s']:,.0f} ms a step"
    )
