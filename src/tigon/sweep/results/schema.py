"""Checks the JSON that a sweep reads from results folders, which an edit or a full disk may have damaged.

Each `TypedDict` names the keys that this tigon reads; files may have others. pydantic checks them strictly: it converts
nothing, and does not take true for a number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
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


class Machine(Environment):
    """The environment of several records."""

    tigon_commits: list[str]
    dates: list[str]


class RecordEnvironment(Environment):
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
    environment: RecordEnvironment


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


class Results(TypedDict):
    """A results.json. Its points are rows."""

    name: str
    steps: int
    warmup: int
    rows: str
    memory_limit_bytes: int | None
    points: list[dict[str, Any]]
    environment: Machine | None


class Row(TypedDict):
    id: str
    variant: str
    axes: dict[str, Any]
    unchecked: bool
    keys: dict[str, Any]
    status: str
    detail: str
    wrong_ops: NotRequired[WrongOps]
    tigon_commits: NotRequired[list[str]]
    dates: NotRequired[list[str]]


class Done(TypedDict):
    """Further keys of a row whose point was measured."""

    repeats: int
    wall_s: float
    predicted_allocated_bytes: int | None
    predicted_step_s: float | None


class Figures(TypedDict):
    """Further keys of a row whose point finished all steps."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    step_s: float
    step_s_low: float
    step_s_high: float
    tokens_per_s: float
    last_loss: float | None


class ImportedRow(TypedDict):
    key: str
    warmup: int
    environment: Machine
    row: Row


class Imported(TypedDict):
    """The file of imported rows."""

    rows: dict[str, ImportedRow]


class Prediction(TypedDict):
    key: str
    peak_allocated_bytes: NotRequired[int | None]
    peak_reserved_bytes: NotRequired[int | None]
    device_bytes: NotRequired[int | None]
    step_s: NotRequired[float | None]


Predictions = dict[str, Prediction]
_WORDS: Mapping[str, str] = {"missing": "is missing", "dict_type": "is not a mapping", "list_type": "is not a list"}


@functools.cache
def _adapter(form: Any) -> Any:
    from pydantic import TypeAdapter  # takes as long to import as the rest of a sweep's command

    return TypeAdapter(form)


def misfit(value: Any, form: Any, name: str = "") -> str | None:
    """None if `value` has this form, else the dotted place of the first error and what is wrong there."""
    from pydantic import ValidationError

    try:
        _adapter(form).validate_python(value, strict=True)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        place = ".".join([*([name] if name else []), *map(str, error["loc"])])
        words = _WORDS.get(error["type"]) or f"is {failures.line(repr(error['input']), 60)}"
        return f"{place or 'it'} {words}"
    return None


def misfit_of_record(value: Any) -> str | None:
    """`misfit` for a file in points/."""
    problem = misfit(value, Record)
    if problem is not None or value["status"] != failures.OK:
        return problem
    return misfit(value, MeasuredRecord) or first(
        f"measured.{name} has {len(value['measured'][name])} steps"
        for name in ("step_s", "updated", "positions")
        if len(value["measured"][name]) != value["recipe"]["train"]["steps"]
    )


def misfit_of_results(value: Any) -> str | None:
    """`misfit` for a results.json."""
    return misfit(value, Results) or first(
        misfit_of_row(row, f"points.{number}") for number, row in enumerate(value["points"])
    )


def misfit_of_row(row: Any, name: str) -> str | None:
    """`misfit` for a point in a results.json."""
    problem = misfit(row, Row, name)
    if problem is None and row["status"] in failures.FINISHED:
        problem = misfit(row, Done, name)
    if problem is None and row["status"] == failures.OK:
        problem = misfit(row, Figures, name)
    return problem


def first(problems: Iterable[str | None]) -> str | None:
    """The first problem that is not None."""
    return next((one for one in problems if one is not None), None)
