"""Imports points from an earlier results.json: `tigon sweep --from`.

A sweep of several hours is measured in several calls, and often only the results.json of a call is kept. A finished row
of that file becomes a row of this sweep, with its medians unchanged, if its point has the same settings here. Imported
rows are stored in the folder, so that later calls need not name the earlier file. A measurement in this folder replaces
the imported row. A row with fewer repeats than the sweep asks for counts until its point is measured here.
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
from tigon.sweep import failures
from tigon.sweep.definition import Sweep
from tigon.sweep.points import Point, changed_keys
from tigon.sweep.results import folder, schema
from tigon.sweep.worker import orders
from tigon.units import in_bytes

FILE = "taken.json"


@dataclass(frozen=True)
class ImportedPoint:
    """A row imported from an earlier results.json."""

    row: Mapping[str, Any]
    environment: Mapping[str, Any]
    """As in results.json, with the commits and dates of the row, or those of the whole file if the row has none."""
    key: str
    """The key of its point."""
    warmup: int
    """A point's key leaves the warmup out, because records have every step. A row has medians, so it must match."""

    def fits(self, point: Point, sweep: Sweep) -> bool:
        return self.key == point.key and self.warmup == sweep.warmup

    def complete(self, sweep: Sweep) -> bool:
        """Whether the row has every repeat that the sweep asks for."""
        return self.n_counted(sweep) == sweep.repeats

    def n_counted(self, sweep: Sweep) -> int:
        """How many of the sweep's repeats the row covers. One out-of-memory result covers all of them."""
        ran_out = self.row["status"] == failures.OUT_OF_MEMORY
        return sweep.repeats if ran_out else min(int(self.row["repeats"]), sweep.repeats)


@dataclass(frozen=True)
class EarlierResults:
    """An earlier results.json."""

    path: Path
    results: Mapping[str, Any]

    @property
    def environment(self) -> Mapping[str, Any] | None:
        environment: Mapping[str, Any] | None = self.results["environment"]
        return environment

    def importable(
        self, points: Sequence[Point], sweep: Sweep, limit_bytes: int | None, measured: Collection[str],
        kept: Mapping[str, ImportedPoint] = MappingProxyType({}),
    ) -> tuple[dict[str, ImportedPoint], dict[str, list[str]]]:  # fmt: skip
        """(point id -> imported row, reason -> ids of the finished rows that are not imported).

        measured: ids of the points that were measured here. kept: point id -> row imported by an earlier call.
        """
        points_by_id = {point.id: point for point in points}
        other = _other_settings(self.results, sweep, limit_bytes)
        imported: dict[str, ImportedPoint] = {}
        left: dict[str, list[str]] = {}
        for row in self.results["points"]:
            if row["status"] not in failures.FINISHED:
                continue
            point = points_by_id.get(row["id"])
            why = "measured here already" if row["id"] in measured else other or _why_not(row, point)
            if why or point is None:
                left.setdefault(why, []).append(row["id"])
                continue
            one = self._import_row(row, point)
            if point.id in kept and kept[point.id].n_counted(sweep) > one.n_counted(sweep):
                left.setdefault("imported earlier with more repeats", []).append(point.id)
            else:
                imported[point.id] = one
        return imported, left

    def _import_row(self, row: Mapping[str, Any], point: Point) -> ImportedPoint:
        assert self.environment is not None, "it has measured rows"
        own = {
            name: row.get(name) or self.environment[name] for name in ("tigon_commits", "dates")
        }  # rows of older files have neither
        known = {name: values for name, values in own.items() if len(values) == 1 or name in row}
        return ImportedPoint({**row, **known}, {**self.environment, **own}, point.key, int(self.results["warmup"]))


def _other_settings(results: Mapping[str, Any], sweep: Sweep, limit_bytes: int | None) -> str:
    here = {"steps": sweep.steps, "warmup": sweep.warmup, "rows": sweep.rows, "memory_limit_bytes": limit_bytes}
    return _differences({name: results[name] for name in here}, here)


def _why_not(row: Mapping[str, Any], point: Point | None) -> str:
    """Why the row cannot be imported; empty if it can."""
    if point is None:
        return "no such point here"
    if point.recipe is None:
        return "refused here"
    keys = json.loads(json.dumps(changed_keys(point.recipe)))  # JSON's types, as in the file
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


def read(path: Path) -> EarlierResults:
    """Read an earlier results.json. Raises UsageError if the file cannot be read or is not a valid results.json."""
    try:
        results = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"--from {path}: cannot be read: {error.strerror}; give a results.json.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--from {path}: not JSON; give the results.json of an earlier sweep.") from None
    wrong = schema.misfit_of_results(results)
    if wrong is None and results.get("schema") != folder.SCHEMA:
        wrong = f"schema is {results.get('schema')!r}, but this tigon reads {folder.SCHEMA}"
    if wrong is None and results["environment"] is None and _any_finished(results):
        wrong = "environment is null"
    if wrong:
        raise UsageError(f"--from {path}: not a results.json of `tigon sweep`: {wrong}; give one of an earlier sweep.")
    return EarlierResults(path, results)


def _any_finished(results: Mapping[str, Any]) -> bool:
    return any(row["status"] in failures.FINISHED for row in results["points"])


# --- in the folder ---------------------------------------------------------------------------------------------------


def load(own: Path) -> dict[str, ImportedPoint]:
    """Point id -> row that earlier calls imported into this folder.

    Raises RunFolderError for a damaged file, because its points would otherwise be measured again without a warning.
    """
    path = own / FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        stored = None
    wrong = schema.misfit(stored, schema.Imported)
    wrong = wrong or schema.first(schema.misfit_of_row(one["row"], name) for name, one in stored["rows"].items())
    if wrong:
        raise RunFolderError(f"{path}: damaged ({wrong}); remove it, and name the earlier results with --from again")
    return {name: ImportedPoint(**fields) for name, fields in stored["rows"].items()}


def keep(own: Path, imported: Mapping[str, ImportedPoint]) -> None:
    """Write the imported rows into the folder, atomically."""
    orders.write(
        own / FILE,
        {"schema": folder.SCHEMA, "rows": {name: dataclasses.asdict(one) for name, one in imported.items()}},
    )


def words(
    earlier: EarlierResults, imported: Mapping[str, ImportedPoint], left: Mapping[str, Sequence[str]], sweep: Sweep
) -> list[str]:
    """Lines that say which points were imported, and which were not and why."""
    finished = len(imported) + sum(map(len, left.values()))
    some = [name for name, one in imported.items() if not one.complete(sweep)]
    fewer = f"fewer than {sweep.repeats} repeats there"
    again = f"; {len(some)} of them are measured again, from {some[0]}: {fewer}" if some else ", not measured again"
    lines = [f"imported {len(imported)} of {finished} finished points of {earlier.path}{again}"]
    for why, ids in left.items():
        lines.append(f"left out {len(ids)} of them, from {ids[0]}: {why}")
    return lines
