"""The records of a sweep, and the check of the JSON that it reads, which an edit or a full disk may have damaged.

Each `TypedDict` names the keys that this tigon reads; files may have others. pydantic checks them strictly: it converts
nothing, and does not take true for a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

# Python 3.10 and 3.11: pydantic cannot read typing's
from typing_extensions import NotRequired, TypedDict

from tigon.sweep import failures

SCHEMA = 1
WrongOps = dict[str, str]
"""op -> why"""


class Environment(TypedDict):
    device: str
    driver: str | None
    versions: dict[str, str | None]
    memory_bytes: int | None
    threads: int | None
    wrong_ops: NotRequired[dict[str, WrongOps]]
    tigon_commit: str | None
    date: str


class RecordTrain(TypedDict):
    steps: int


class RecordRecipe(TypedDict):
    train: RecordTrain


class Measured(TypedDict):
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_resident_bytes: int | None
    outside_bytes: int | None
    phases: dict[str, int]
    step_s: list[float]
    updated: list[bool]
    positions: list[int]
    losses: list[float]
    parameters: int
    precision: str
    processes: int


class Record(TypedDict):
    """A file in points/."""

    id: str
    key: str
    repeat: int
    status: str
    detail: str
    wall_s: float
    wrong_ops: NotRequired[WrongOps]
    recipe: RecordRecipe
    environment: Environment
    measured: Measured | None
    """None unless the status is "ok"."""


class Prediction(TypedDict):
    key: str
    peak_allocated_bytes: NotRequired[int | None]
    peak_reserved_bytes: NotRequired[int | None]
    device_bytes: NotRequired[int | None]
    step_s: NotRequired[float | None]


_RECORD, _PREDICTIONS = TypeAdapter(Record), TypeAdapter(dict[str, Prediction])
_WORDS = {"missing": "is missing", "dict_type": "is not a mapping", "list_type": "is not a list"}


def read_record(file: Path) -> tuple[dict[str, Any] | None, str]:
    """(record, "") for a valid file in points/, else (None, what is wrong)."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return None, str(error.strerror)
    except ValueError:
        return None, "not JSON"
    if wrong := _misfit(record, _RECORD) or _short_of_steps(record):
        return None, wrong
    return (record, "") if record.get("schema") == SCHEMA else (None, f"schema is {record.get('schema')!r}")


def read_predictions(file: Path) -> dict[str, dict[str, Any]]:
    """Point id -> its prediction; empty if the file is missing or damaged."""
    try:
        stored: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {} if _misfit(stored, _PREDICTIONS) else stored


def _misfit(value: object, form: TypeAdapter[Any]) -> str:
    """The dotted place of the first value of another form, and what is wrong there; empty if there is none."""
    try:
        form.validate_python(value, strict=True)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        words = _WORDS.get(error["type"]) or f"is {failures.line(repr(error['input']), 60)}"
        return f"{'.'.join(map(str, error['loc'])) or 'it'} {words}"
    return ""


def _short_of_steps(record: Mapping[str, Any]) -> str:
    """What an "ok" record lacks of its steps."""
    if record["status"] != failures.OK:
        return ""
    measured, steps = record["measured"], record["recipe"]["train"]["steps"]
    if measured is None:
        return "measured is not a mapping"
    short = (name for name in ("step_s", "updated", "positions") if len(measured[name]) != steps)
    return next((f"measured.{name} has {len(measured[name])} steps" for name in short), "")
