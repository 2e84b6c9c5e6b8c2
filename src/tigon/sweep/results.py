"""Combines the measurements of a sweep: one row per point, with medians over the timed steps of its repeats."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tigon.sweep import failures, self_test
from tigon.sweep.definition import Sweep
from tigon.sweep.points import Point, changed_keys
from tigon.sweep.schema import SCHEMA

_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "outside_bytes")
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def collect(
    sweep: Sweep,
    points: Sequence[Point],
    records: Records,
    *,
    limit_bytes: int | None,
    command: str,
    predictions: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """results.json: the settings, the machine, and every point, measured or not."""
    rows = [row_of(point, records.get(point.id, ()), sweep, predictions.get(point.id, {})) for point in points]
    return {
        "schema": SCHEMA,
        "name": sweep.name,
        "title": sweep.title,
        "about": sweep.about,
        "command": command,
        "axes": list(sweep.axes),
        "variants": [variant.name for variant in sweep.variants],
        "baseline": sweep.baseline,
        "rows": sweep.rows,
        "steps": sweep.steps,
        "warmup": sweep.warmup,
        "repeats": sweep.repeats,
        "memory_limit_bytes": limit_bytes,
        "environment": _environment([record for own in records.values() for record in own]),
        "points": with_skipped(rows, sweep),
    }


def _environment(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The common machine, with the commits, dates and wrong ops of every measurement."""
    if not records:
        return None
    parts = [record["environment"] for record in records]
    machine = {name: value for name, value in parts[0].items() if name not in ("tigon_commit", "date")}
    # records of older sweeps have no wrong_ops, because those sweeps did not test the kernels
    wrong = self_test.merged(part.get("wrong_ops", {}) for part in parts)
    return {**machine, **_origin(records), "wrong_ops": wrong}


def _origin(records: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The commits and dates of measurements."""
    names = {"tigon_commits": "tigon_commit", "dates": "date"}
    return {plural: sorted({str(one["environment"][name]) for one in records}) for plural, name in names.items()}


def row_of(
    point: Point, own: Sequence[Mapping[str, Any]], sweep: Sweep, predicted: Mapping[str, Any]
) -> dict[str, Any]:
    """A point of results.json, from its measurements."""
    row: dict[str, Any] = {
        "id": point.id,
        "variant": point.variant,
        "axes": dict(point.axes),
        "unchecked": point.unchecked,
        "keys": changed_keys(point.recipe) if point.recipe else {},
        "status": failures.NOT_MEASURED,
        "detail": "",
        "predicted_allocated_bytes": predicted.get("peak_allocated_bytes"),
        "predicted_reserved_bytes": predicted.get("peak_reserved_bytes"),
        "predicted_device_bytes": predicted.get("device_bytes"),
        "predicted_step_s": predicted.get("step_s"),
        "predicted_components": predicted.get("components"),
    }
    if point.refused:
        return row | {"status": failures.REFUSED, "detail": point.refused}
    if not own:
        return row
    row |= {"repeats": len(own), "wall_s": sum(record["wall_s"] for record in own)}
    row |= _origin(own)
    row["wrong_ops"] = {op: why for record in own for op, why in record.get("wrong_ops", {}).items()}
    bad = next((record for record in own if record["status"] != failures.OK), None)
    if bad is not None:
        some = f"repeat {bad['repeat'] + 1} of {sweep.repeats}: " if len(own) > 1 else ""
        return row | {"status": bad["status"], "detail": some + bad["detail"]}
    return row | {"status": failures.OK} | _figures([record["measured"] for record in own], sweep.warmup)


def _figures(measured: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, Any]:
    """The highest peaks of all repeats, and the median, lowest and highest time of all timed steps."""
    timed = [step_s for one in measured for step_s in timed_steps(one, warmup)]
    first, step_s = measured[0], statistics.median(timed)
    tokens_per_step = statistics.median(first["positions"][warmup:]) * first["processes"]
    return {
        **{name: _most(one[name] for one in measured) for name in _PEAKS},
        "phases": {name: max(one["phases"].get(name, 0) for one in measured) for name in first["phases"]},
        "step_s": step_s,
        "step_s_low": min(timed),
        "step_s_high": max(timed),
        "n_timed": len(timed),
        "tokens_per_step": tokens_per_step,
        "tokens_per_s": tokens_per_step / step_s,
        "last_loss": first["losses"][-1] if first["losses"] else None,
        "losses": first["losses"],
        "skipped_updates": sum(not done for one in measured for done in one["updated"]),
        "parameters": first["parameters"],
        "precision": first["precision"],
    }


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def timed_steps(measured: Mapping[str, Any], warmup: int) -> list[float]:
    """Seconds of the steps after the warm-up that updated the weights, or of all of them if no step did.

    fp16 loss scaling skips the first few updates, and steps without an update are faster.
    """
    steps = list(zip(measured["step_s"], measured["updated"], strict=True))[warmup:]
    return [step_s for step_s, updated in steps if updated] or [step_s for step_s, _ in steps]


def with_skipped(rows: Sequence[dict[str, Any]], sweep: Sweep) -> list[dict[str, Any]]:
    """Mark the rows that were skipped because a smaller one ran out of memory."""
    return [
        row | {"status": failures.SKIPPED, "detail": f"after {why} ran out of memory"}
        if row["status"] == failures.NOT_MEASURED and (why := skipped_after(row, rows, sweep.stop_after_oom))
        else row
        for row in rows
    ]


def skipped_after(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], axis: str | None) -> str | None:
    """The id of a row that differs only by a smaller value of `axis` and ran out of memory."""
    if axis is None or axis not in row["axes"]:
        return None
    for other in rows:
        if other["status"] != failures.OUT_OF_MEMORY or other["variant"] != row["variant"]:
            continue
        if axis not in other["axes"] or other["axes"][axis] >= row["axes"][axis]:
            continue
        if all(other["axes"].get(name) == value for name, value in row["axes"].items() if name != axis):
            return str(other["id"])
    return None


def in_processes(results: Mapping[str, Any]) -> str:
    """How often each point was measured, and the points with fewer repeats so far. Empty for one repeat."""
    wanted = results["repeats"]
    if wanted == 1:
        return ""
    fewer = [row["id"] for row in results["points"] if row["status"] == failures.OK and row["repeats"] < wanted]
    return f", in each of {wanted} processes" + (f" (in fewer so far: {'; '.join(fewer)})" if fewer else "")
