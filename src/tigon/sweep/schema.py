"""Checks the JSON that a sweep reads from results folders, which an edit or a full disk may have damaged.

A form is one of these:

- a type, or None for null;
- a tuple of forms, of which one must fit;
- a list with one form, which every entry must have;
- a mapping of keys to forms, in which `key?` may be missing and `*` stands for every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tigon.sweep import failures

NUMBER = (int, float)
BYTES = (int, None)
_ANYTHING: Mapping[str, Any] = {}
_WRONG: Mapping[str, Any] = {"*": str}
"""op -> why"""
ENVIRONMENT: Mapping[str, Any] = {
    "device": str, "driver": (str, None), "versions": {"*": (str, None)}, "memory_bytes": BYTES,
    "threads": (int, None), "wrong_ops?": {"*": _WRONG},
}  # fmt: skip
MACHINE: Mapping[str, Any] = {**ENVIRONMENT, "tigon_commits": [str], "dates": [str]}
"""The environment of several records."""
RECORD: Mapping[str, Any] = {
    "id": str, "key": str, "repeat": int, "status": str, "detail": str, "wall_s": NUMBER, "wrong_ops?": _WRONG,
    "recipe": {"train": {"steps": int}}, "environment": {**ENVIRONMENT, "tigon_commit": (str, None), "date": str},
}  # fmt: skip
MEASURED: Mapping[str, Any] = {
    "peak_allocated_bytes": int, "peak_reserved_bytes": BYTES, "peak_resident_bytes": BYTES, "outside_bytes": BYTES,
    "phases": {"*": int}, "step_s": [NUMBER], "updated": [bool], "positions": [int], "losses": [NUMBER],
    "parameters": int, "precision": str, "processes": int,
}  # fmt: skip
RESULTS: Mapping[str, Any] = {
    "name": str, "steps": int, "warmup": int, "rows": str, "memory_limit_bytes": BYTES, "points": [_ANYTHING],
    "environment": (MACHINE, None),
}  # fmt: skip
ROW: Mapping[str, Any] = {
    "id": str, "variant": str, "axes": _ANYTHING, "unchecked": bool, "keys": _ANYTHING, "status": str, "detail": str,
    "wrong_ops?": _WRONG, "tigon_commits?": [str], "dates?": [str],
}  # fmt: skip
DONE: Mapping[str, Any] = {
    "repeats": int, "wall_s": NUMBER, "predicted_allocated_bytes": BYTES, "predicted_step_s": (*NUMBER, None),
}  # fmt: skip
"""Further keys of a row whose point was measured."""
PREDICTIONS: Mapping[str, Any] = {"*": {
    "key": str, "peak_allocated_bytes?": BYTES, "peak_reserved_bytes?": BYTES, "device_bytes?": BYTES,
    "step_s?": (*NUMBER, None),
}}  # fmt: skip
FIGURES: Mapping[str, Any] = {
    "peak_allocated_bytes": int, "peak_reserved_bytes": BYTES, "step_s": NUMBER, "step_s_low": NUMBER,
    "step_s_high": NUMBER, "tokens_per_s": NUMBER, "last_loss": (*NUMBER, None),
}  # fmt: skip
"""Further keys of a row whose point finished all steps."""


def misfit(value: Any, form: Any, name: str = "") -> str | None:
    """None if `value` has this form, else the dotted place of the first error and what is wrong there."""
    if isinstance(form, tuple):
        problems = [misfit(value, one, name) for one in form]
        return None if None in problems else problems[0]
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            return f"{name or 'it'} is not a mapping"
        return first(_misfit_at(value, key, part, f"{name}." if name else "") for key, part in form.items())
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{name or 'it'} is not a list"
        return first(misfit(one, form[0], f"{name}.{number}".lstrip(".")) for number, one in enumerate(value))
    if form is None:
        return None if value is None else f"{name} is {_shown(value)}"
    # Python counts JSON's true and false as numbers
    fits = isinstance(value, form) and (form is bool or not isinstance(value, bool))
    return None if fits else f"{name or 'it'} is {_shown(value)}"


def _misfit_at(value: Mapping[str, Any], key: str, form: Any, before: str) -> str | None:
    if key == "*":
        return first(misfit(part, form, before + str(own)) for own, part in value.items())
    own = key.removesuffix("?")
    if own not in value:
        return None if own != key else f"{before}{own} is missing"
    return misfit(value[own], form, before + own)


def misfit_of_record(value: Any) -> str | None:
    """`misfit` for a file in points/."""
    problem = misfit(value, RECORD)
    if problem is not None or value["status"] != failures.OK:
        return problem
    return misfit(value, {"measured": MEASURED}) or first(
        f"measured.{name} has {len(value['measured'][name])} steps"
        for name in ("step_s", "updated", "positions")
        if len(value["measured"][name]) != value["recipe"]["train"]["steps"]
    )


def misfit_of_results(value: Any) -> str | None:
    """`misfit` for a results.json."""
    return misfit(value, RESULTS) or first(
        misfit_of_row(row, f"points.{number}") for number, row in enumerate(value["points"])
    )


def misfit_of_row(row: Any, name: str) -> str | None:
    """`misfit` for a point in a results.json."""
    problem = misfit(row, ROW, name)
    if problem is None and row["status"] in failures.FINISHED:
        problem = misfit(row, DONE, name)
    if problem is None and row["status"] == failures.OK:
        problem = misfit(row, FIGURES, name)
    return problem


def first(problems: Iterable[str | None]) -> str | None:
    """The first problem that is not None."""
    return next((one for one in problems if one is not None), None)


def _shown(value: Any) -> str:
    return failures.line(repr(value), 60)
