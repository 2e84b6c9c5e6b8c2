"""Merge points that were measured again into the record of a sweep.

    tigon sweep recipes/study/batch.yaml --only 'tigon .*batch_size=64'
    python -m benchmarks merge-sweeps runs/sweeps/batch/results.json \\
        --json benchmarks/results/nvidia-h200/study/batch.json

A finished point of the first file replaces the same point of the record. The record also gets the points that it lacks.
Both files must have the same settings, card, driver and versions. A point in both must have the same recipe keys.
Each point names the commits and dates of its measurements.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Case
from tigon.bench.record import save
from tigon.sweep import failures

SETTINGS = ("schema", "name", "axes", "rows", "steps", "warmup", "memory_limit_bytes")
MACHINE = ("device", "driver", "versions")
ORIGIN = ("tigon_commits", "dates")


def differences(record: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why the files cannot be merged."""
    pairs = [(name, record[name], new[name]) for name in SETTINGS]
    pairs += [(name, record["environment"][name], new["environment"][name]) for name in MACHINE]
    return [f"{name} is {was} in the record and {now} now" for name, was, now in pairs if was != now]


def with_origin(row: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """The row with its commits and dates; those of the whole file in older files, which have one of each."""
    known = {name: environment[name] for name in ORIGIN if len(environment[name]) == 1}
    return {**known, **row} if row["status"] in failures.FINISHED else row


def merged(record: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The record with the finished points of `new`. Raises ValueError if the files do not fit."""
    if wrong := differences(record, new):
        raise ValueError("; ".join(wrong))
    rows = {row["id"]: with_origin(row, record["environment"]) for row in record["points"]}
    for row in new["points"]:
        before = rows.get(row["id"])
        if before is not None and before["keys"] != row["keys"] and before["keys"]:
            raise ValueError(f"{row['id']} has other recipe keys in the record")
        if before is None or row["status"] in failures.FINISHED:
            rows[row["id"]] = with_origin(row, new["environment"])
    both = (record["environment"], new["environment"])
    origin = {name: sorted({one for environment in both for one in environment[name]}) for name in ORIGIN}
    environment = {**new["environment"], **origin}
    return {**record, "command": new["command"], "environment": environment, "points": list(rows.values())}


def measure(bench: Bench) -> None:
    if bench.given.json is None:
        bench.refuse("--json RECORD is required")
    record, new = (json.loads(path.read_text(encoding="utf-8")) for path in (bench.given.json, bench.given.results))
    try:
        save(merged(record, new), bench.given.json)
    except ValueError as error:
        bench.refuse(str(error))
    print(f"{sum(row['status'] in failures.FINISHED for row in new['points'])} points are now those of today")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="of the sweep that measured anew")


CASE = Case(measure=measure, options=options, needs_gpu=False)
