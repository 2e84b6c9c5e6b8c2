"""The results folder of a sweep. Each measurement is one file, written atomically, so that a kill loses none of them.

- points/ID.N.json: one measurement, repeat N of a point.
- logs/ID.N.log: the output of its processes.
- predictions.json: the planner's estimates.
- results.json: every point, with card, versions, commits, dates and the command. Each call writes it again.
- results.csv: the points as a table.
- report.html, report.md, charts/
"""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.errors import RunFolderError
from tigon.sweep.points import Point
from tigon.sweep.results import schema
from tigon.sweep.worker import orders
from tigon.trainer.folder import folder_lock

SCHEMA = 1
RESULTS, TABLE, PREDICTIONS, POINTS, LOGS = "results.json", "results.csv", "predictions.json", "points", "logs"
LOCK = ".lock"
_SAME = ("device", "driver", "versions")


@dataclass(frozen=True)
class SweepFolder:
    """A folder that belongs to this sweep or can be used for it."""

    path: Path

    def make(self) -> None:
        """Create the folder and its subfolders. Raises RunFolderError if the file system refuses."""
        try:
            for part in (POINTS, LOGS):
                (self.path / part).mkdir(parents=True, exist_ok=True)
            (self.path / LOCK).touch()
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be used: {error.strerror}; choose another with --out") from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock this folder. Raises RunFolderError if another sweep holds the lock."""
        with folder_lock.locked(self.path, LOCK, "measuring into this sweep folder"):
            yield

    def machine(self) -> dict[str, Any] | None:
        """The environment of any measurement in this folder, or None if there is no measurement yet."""
        records = (_read(file)[0] for file in self._files())
        return next((dict(record["environment"]) for record in records if record is not None), None)

    def damaged(self) -> dict[Path, str]:
        """Files in points/ that are not valid records, and why. Their points count as not measured."""
        return {file: why for file in self._files() if (why := _read(file)[1])}

    def _files(self) -> list[Path]:
        return sorted((self.path / POINTS).glob("*.json"))

    def log(self, name: str, repeat: int | None = None) -> Path:
        return self.path / LOGS / (f"{name}.log" if repeat is None else f"{name}.{repeat}.log")

    def predictions(self, points: Sequence[Point]) -> dict[str, dict[str, Any]]:
        """Earlier predictions of the points whose settings have not changed."""
        try:
            stored: dict[str, dict[str, Any]] = json.loads((self.path / PREDICTIONS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if schema.misfit(stored, schema.Predictions):
            return {}
        keys = {point.id: point.key for point in points}
        return {name: predicted for name, predicted in stored.items() if predicted.get("key") == keys.get(name)}

    def records(self, points: Sequence[Point]) -> dict[str, list[dict[str, Any]]]:
        """Point id -> its measurements by repeat, without those of other settings."""
        records_by_point: dict[str, list[dict[str, Any]]] = {}
        for point in points:
            own = [record for record in self._of(point) if record["key"] == point.key]
            if own:
                records_by_point[point.id] = sorted(own, key=lambda record: int(record["repeat"]))
        return records_by_point

    def of_other_settings(self, points: Sequence[Point]) -> int:
        """How many records have the name of one of these points but were measured with other settings."""
        return sum(record["key"] != point.key for point in points for record in self._of(point))

    def _of(self, point: Point) -> Iterator[dict[str, Any]]:
        """Every record that has this point's name."""
        for file in (self.path / POINTS).glob(f"{glob.escape(point.file)}.*.json"):
            record, _ = _read(file)
            if record is not None and record["id"] == point.id:
                yield record

    def keep(self, point: Point, record: Mapping[str, Any]) -> None:
        orders.write(self.path / POINTS / f"{point.file}.{record['repeat']}.json", record)

    def write_results(self, results: Mapping[str, Any], predictions: Mapping[str, Any]) -> None:
        if predictions:
            orders.write(self.path / PREDICTIONS, predictions)
        orders.write(self.path / RESULTS, results)
        write_text(self.path / TABLE, as_csv(results))


def _read(file: Path) -> tuple[dict[str, Any] | None, str]:
    """(record, "") for a valid record, else (None, what is wrong)."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return None, str(error.strerror)
    except ValueError:
        return None, "not JSON"
    if wrong := schema.misfit_of_record(record):
        return None, wrong
    return (record, "") if record.get("schema") == SCHEMA else (None, f"schema is {record.get('schema')!r}")


def find(path: Path, name: str) -> SweepFolder:
    """The sweep's folder, which need not exist yet; creates nothing.

    Raises RunFolderError if the folder holds another sweep or other files.
    """
    try:
        if path.exists() and any(path.iterdir()) and not (path / POINTS).is_dir():
            raise RunFolderError(f"{path}: not a folder of `tigon sweep`; choose another with --out")
        before = json.loads((path / RESULTS).read_text(encoding="utf-8"))["name"]
        if before != name:
            raise RunFolderError(f"{path}: holds the sweep {before}, this one is {name}; choose another with --out")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be used: {error.strerror}; choose another with --out") from None
    except (ValueError, KeyError, TypeError):
        pass  # results.json is damaged; this call writes it again
    return SweepFolder(path)


def check_machine(environments: Iterable[Mapping[str, Any]], here: Mapping[str, Any], path: Path, way: str) -> None:
    """Refuse to mix points of two machines in one table.

    path: the folder or file that the environments come from. way: the message's next step. Raises RunFolderError if an
    environment has another device, driver or versions.
    """
    for environment in environments:
        for name in _SAME:
            if environment[name] != here[name]:
                was, now = _difference(environment[name], here[name])
                raise RunFolderError(f"{path}: its points were measured with {name} {was}, and here it is {now}; {way}")


def _difference(was: Any, now: Any) -> tuple[str, str]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return tuple(", ".join(f"{name} {of.get(name)}" for name in names) for of in (was, now))  # type: ignore[return-value]
    return str(was), str(now)


COLUMNS = (
    "variant", "status", "detail", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "step_s",
    "step_s_low", "step_s_high", "tokens_per_s", "last_loss", "predicted_allocated_bytes", "predicted_reserved_bytes",
    "predicted_step_s", "repeats", "wall_s",
)  # fmt: skip


def as_csv(results: Mapping[str, Any]) -> str:
    """One line per point, with one column per axis of the grid."""
    axes = results["axes"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["id", *axes, *COLUMNS])
    for point in results["points"]:
        cells = [point["id"], *(point["axes"].get(axis, "") for axis in axes), *(point.get(name) for name in COLUMNS)]
        table.writerow(["" if cell is None else _plain(cell) for cell in cells])
    return text.getvalue()


def _plain(cell: Any) -> Any:
    """Quote text that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell


def write_text(path: Path, text: str) -> None:
    """Write the file atomically: a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
