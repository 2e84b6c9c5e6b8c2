"""Checks the JSON that a sweep reads from its folder, which an edit or a full disk may have damaged.

Each `TypedDict` names the keys that this tigon reads; files may have others. pydantic checks them strictly: it converts
nothing, and does not take true for a number.
"""

from __future__ import annotations

import functools
from typing import Any

# Python 3.10 and 3.11: pydantic cannot read typing's
from typing_extensions import NotRequired, TypedDict

from tigon.sweep import failures

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


class MeasuredRecord(TypedDict):
    measured: Measured


class Prediction(TypedDict):
    key: str
    peak_allocated_bytes: NotRequired[int | None]
    peak_reserved_bytes: NotRequired[int | None]
    device_bytes: NotRequired[int | None]
    step_s: NotRequired[float | None]


Predictions = dict[str, Prediction]
_WORDS = {"missing": "is missing", "dict_type": "is not a mapping", "list_type": "is not a list"}


@functools.cache
def _adapter(form: Any) -> Any:
    from pydantic import TypeAdapter  # takes as long to import as the rest of a sweep's command

    return TypeAdapter(form)


def misfit(value: Any, form: Any) -> str | None:
    """None if `value` has this form, else the dotted place of the first error and what is wrong there."""
    from pydantic import ValidationError

    try:
        _adapter(form).validate_python(value, strict=True)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        words = _WORDS.get(error["type"]) or f"is {failures.line(repr(error['input']), 60)}"
        return f"{'.'.join(map(str, error['loc'])) or 'it'} {words}"
    return None


def misfit_of_record(value: Any) -> str | None:
    """`misfit` for a file in points/."""
    problem = misfit(value, Record)
    if problem is not None or value["status"] != failures.OK:
        return problem
    if problem := misfit(value, MeasuredRecord):
        return problem
    measured, steps = value["measured"], value["recipe"]["train"]["steps"]
    return next(
        (
            f"measured.{name} has {len(measured[name])} steps"
            for name in ("step_s", "updated", "positions")
            if len(measured[name]) != steps
        ),
        None,
    )
