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
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tigon.bench.record import other_machine
from tigon.errors import RunFolderError
from tigon.sweep.points import Point
from tigon.sweep.schema import read_predictions, read_record
from tigon.sweep.worker import orders
from tigon.trainer.folder import folder_lock

RESULTS, TABLE, PREDICTIONS, POINTS, LOGS = "results.json", "results.csv", "predictions.json", "points", "logs"
LOCK = ".lock"
COLUMNS = (
    *("variant", "status", "detail", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "step_s"),
    *("step_s_low", "step_s_high", "tokens_per_s", "last_loss", "predicted_allocated_bytes"),
    *("predicted_reserved_bytes", "predicted_step_s", "repeats", "wall_s"),
)


@dataclass(frozen=True)
class Contents:
    """The measurements in a folder."""

    records: list[dict[str, Any]] = field(default_factory=list)
    damaged: dict[Path, str] = field(default_factory=dict)
    """Files in points/ that are not valid records, and why. Their points count as not measured."""

    @property
    def machine(self) -> dict[str, Any]:
        """The environment of any measurement; empty if there is no measurement yet."""
        return dict(self.records[0]["environment"]) if self.records else {}

    def by_point(self, points: Sequence[Point]) -> dict[str, list[dict[str, Any]]]:
        """Point id -> its measurements by repeat, without those of other settings."""
        keys = {point.id: point.key for point in points}
        own: dict[str, list[dict[str, Any]]] = {}
        for record in sorted(self.records, key=lambda record: int(record["repeat"])):
            if keys.get(record["id"]) == record["key"]:
                own.setdefault(record["id"], []).append(record)
        return own

    def of_other_settings(self, points: Sequence[Point]) -> int:
        """How many records have the name of one of these points but were measured with other settings."""
        keys = {point.id: point.key for point in points}
        return sum(keys.get(record["id"], record["key"]) != record["key"] for record in self.records)


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

    def contents(self) -> Contents:
        """Read every file in points/."""
        contents = Contents()
        for file in sorted((self.path / POINTS).glob("*.json")):
            record, why = read_record(file)
            if record is None:
                contents.damaged[file] = why
            else:
                contents.records.append(record)
        return contents

    def log(self, name: str, repeat: int | None = None) -> Path:
        return self.path / LOGS / (f"{name}.log" if repeat is None else f"{name}.{repeat}.log")

    def predictions(self, points: Sequence[Point]) -> dict[str, dict[str, Any]]:
        """Earlier predictions of the points whose settings have not changed."""
        stored, keys = read_predictions(self.path / PREDICTIONS), {point.id: point.key for point in points}
        return {name: predicted for name, predicted in stored.items() if predicted.get("key") == keys.get(name)}

    def keep(self, point: Point, record: Mapping[str, Any]) -> None:
        orders.write(self.path / POINTS / f"{point.file}.{record['repeat']}.json", record)

    def write_results(self, results: Mapping[str, Any], predictions: Mapping[str, Any]) -> None:
        if predictions:
            orders.write(self.path / PREDICTIONS, predictions)
        orders.write(self.path / RESULTS, results)
        orders.write_text(self.path / TABLE, as_csv(results))


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


def check_machine(environments: Iterable[Mapping[str, Any]], here: Mapping[str, Any], path: Path) -> None:
    """Refuse to mix points of two machines in one table.

    path: the folder that the environments come from. Raises RunFolderError if an environment has another device,
    driver, number of threads, or versions.
    """
    for environment in environments:
        if other := other_machine(environment, here):
            name, was, now = other
            raise RunFolderError(
                f"{path}: its points were measured with {name} {was}, and here it is {now}; draw the existing results "
                "with --draw, or choose another folder with --out"
            )


def as_csv(results: Mapping[str, Any]) -> str:
    """One line per point, with one column per axis of the grid."""
    axes = results["axes"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["id", *axes, *COLUMNS])
    for point in results["points"]:
        cells = [point["id"], *(point["axes"].get(axis) for axis in axes), *(point.get(name) for name in COLUMNS)]
        table.writerow(["" if cell is None else _plain(cell) for cell in cells])
    return text.getvalue()


def _plain(cell: object) -> object:
    """Quote text that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell
