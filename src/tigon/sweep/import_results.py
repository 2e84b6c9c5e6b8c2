"""Points taken over from an earlier results.json: `tigon sweep --from`.

A sweep of hours is measured in several goes, and what is left of one is its results.json. A row of it
that finished, with the settings that its point has here, is a row of this sweep too: its medians, as they are. They are
kept in the folder, so that they are still there when the earlier file is not named again. A point that is measured here
counts for itself; one whose row has fewer repeats than the sweep wants is measured here, and its row counts until then.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tigon._files import read_text
from tigon.errors import RunFolderError, UsageError
from tigon.sweep import failures, folder, schema, worker
from tigon.sweep.definition import Sweep
from tigon.sweep.points import Point, changed_keys
from tigon.units import in_bytes

FILE = "taken.json"
_KEPT: Mapping[str, Any] = {
    "rows": {"*": {"key": str, "warmup": int, "environment": schema.MACHINE, "row": schema.ROW}}
}


@dataclass(frozen=True)
class Taken:
    """A row that was measured elsewhere."""

    row: Mapping[str, Any]
    environment: Mapping[str, Any]
    """As in results.json, with the row's commits and dates, or all of the file's where the row does not say."""
    key: str
    """Of its point."""
    warmup: int
    """No part of a point's key, as records have every step; a row has medians."""

    def fits(self, point: Point, sweep: Sweep) -> bool:
        return self.key == point.key and self.warmup == sweep.warmup

    def complete(self, sweep: Sweep) -> bool:
        """Whether there is nothing left to measure."""
        return self.n_counted(sweep) == sweep.repeats

    def n_counted(self, sweep: Sweep) -> int:
        """Of the repeats that the sweep wants, how many it has; out of memory needs no second time."""
        out = self.row["status"] == failures.OUT_OF_MEMORY
        return sweep.repeats if out else min(int(self.row["repeats"]), sweep.repeats)


@dataclass(frozen=True)
class Earlier:
    """An earlier results.json."""

    path: Path
    results: Mapping[str, Any]

    @property
    def environment(self) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self.results["environment"]
        return found

    def offer(
        self, points: Sequence[Point], sweep: Sweep, limit_bytes: int | None, measured: Collection[str],
        kept: Mapping[str, Taken] = MappingProxyType({}),
    ) -> tuple[dict[str, Taken], dict[str, list[str]]]:  # fmt: skip
        """(point id -> what is taken over, reason -> ids of the finished rows that are not).

        measured: ids of the points that were measured here. kept: point id -> what was taken over before.
        """
        points_by_id = {point.id: point for point in points}
        other = _other_settings(self.results, sweep, limit_bytes)
        taken: dict[str, Taken] = {}
        left: dict[str, list[str]] = {}
        for row in self.results["points"]:
            if row["status"] not in failures.FINISHED:
                continue
            point = points_by_id.get(row["id"])
            why = "measured here already" if row["id"] in measured else other or _why_not(row, point)
            if why or point is None:
                left.setdefault(why, []).append(row["id"])
                continue
            one = self._take(row, point)
            if point.id in kept and kept[point.id].n_counted(sweep) > one.n_counted(sweep):
                left.setdefault("taken over with more repeats before", []).append(point.id)
            else:
                taken[point.id] = one
        return taken, left

    def _take(self, row: Mapping[str, Any], point: Point) -> Taken:
        assert self.environment is not None, "it has measured rows"
        own = {
            name: row.get(name) or self.environment[name] for name in ("tigon_commits", "dates")
        }  # rows did not always say
        said = {name: values for name, values in own.items() if len(values) == 1 or name in row}
        return Taken({**row, **said}, {**self.environment, **own}, point.key, int(self.results["warmup"]))


def _other_settings(results: Mapping[str, Any], sweep: Sweep, limit_bytes: int | None) -> str:
    here = {"steps": sweep.steps, "warmup": sweep.warmup, "rows": sweep.rows, "memory_limit_bytes": limit_bytes}
    return _differences({name: results[name] for name in here}, here)


def _why_not(row: Mapping[str, Any], point: Point | None) -> str:
    """Empty where nothing speaks against it."""
    if point is None:
        return "no such point here"
    if point.recipe is None:
        return "refused here"
    keys = json.loads(json.dumps(changed_keys(point.recipe)))  # as a file has them
    return _differences(row["keys"], keys) if keys != row["keys"] else ""


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removesuffix('_bytes')} {_shown(name, there)} there, {_shown(name, here)} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    )


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(name)
    if name.endswith("_bytes"):
        return "none" if value is None else in_bytes(value)
    return failures.line(json.dumps(value), 60) if name in settings else "the default"


def read(path: Path) -> Earlier:
    """An earlier results.json. Raises UsageError for a file that is none."""
    try:
        results = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"--from {path}: cannot be read: {error.strerror}; give a results.json.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--from {path}: no JSON; give the results.json of an earlier sweep.") from None
    wrong = schema.misfit_of_results(results)
    if wrong is None and results.get("schema") != folder.SCHEMA:
        wrong = f"schema is {results.get('schema')!r}, and this tigon reads {folder.SCHEMA}"
    if wrong is None and results["environment"] is None and _any_finished(results):
        wrong = "environment is null"
    if wrong:
        raise UsageError(f"--from {path}: no results.json of `tigon sweep`: {wrong}; give one of an earlier sweep.")
    return Earlier(path, results)


def _any_finished(results: Mapping[str, Any]) -> bool:
    return any(row["status"] in failures.FINISHED for row in results["points"])


# --- in the folder ---------------------------------------------------------------------------------------------------


def load(own: Path) -> dict[str, Taken]:
    """Point id -> what its folder was given before. Raises RunFolderError for a damaged file, whose rows would else be
    measured again without a word."""
    path = own / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        found = None
    wrong = schema.misfit(found, _KEPT)
    wrong = wrong or schema.first(schema.misfit_of_row(one["row"], name) for name, one in found["rows"].items())
    if wrong:
        raise RunFolderError(f"{path}: damaged ({wrong}); remove it, and name the earlier results with --from again")
    return {name: Taken(**told) for name, told in found["rows"].items()}


def keep(own: Path, taken: Mapping[str, Taken]) -> None:
    """Write what was taken into the folder, whole or not at all."""
    worker.write(
        own / FILE,
        {"schema": folder.SCHEMA, "rows": {name: dataclasses.asdict(one) for name, one in taken.items()}},
    )


def words(earlier: Earlier, taken: Mapping[str, Taken], left: Mapping[str, Sequence[str]], sweep: Sweep) -> list[str]:
    """What was taken over and what was not, and why, in lines."""
    finished = len(taken) + sum(map(len, left.values()))
    some = [name for name, one in taken.items() if not one.complete(sweep)]
    again = f"; {len(some)} of them again, from {some[0]}: fewer than {sweep.repeats} repeats there" if some else ""
    lines = [f"taken    {len(taken)} of {finished} finished points of {earlier.path}, not measured again{again}"]
    for why, ids in left.items():
        lines.append(f"left     {len(ids)} of them, from {ids[0]}: {why}")
    return lines
