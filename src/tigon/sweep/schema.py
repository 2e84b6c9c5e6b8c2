"""The forms of what a sweep reads back from its folder, or from another's: JSON that a hand or a full disk may have
changed since.

A form is a type, a tuple of forms of which one fits, a list of the form of every entry, or a mapping of keys to forms:
`key?` may be missing, `*` is every key. None is null.
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
"""Of several records."""
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
"""What a row has beside ROW when its point was measured."""
PREDICTIONS: Mapping[str, Any] = {"*": {
    "key": str, "peak_allocated_bytes?": BYTES, "peak_reserved_bytes?": BYTES, "device_bytes?": BYTES,
    "step_s?": (*NUMBER, None),
}}  # fmt: skip
FIGURES: Mapping[str, Any] = {
    "peak_allocated_bytes": int, "peak_reserved_bytes": BYTES, "step_s": NUMBER, "step_s_low": NUMBER,
    "step_s_high": NUMBER, "tokens_per_s": NUMBER, "last_loss": (*NUMBER, None),
}  # fmt: skip
"""And when it ran to its end."""


def misfit(value: Any, form: Any, name: str = "") -> str | None:
    """Where `value` has not this form, dotted, and what is wrong there; None where it fits."""
    if isinstance(form, tuple):
        found = [misfit(value, one, name) for one in form]
        return None if None in found else found[0]
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            return f"{name or 'it'} is no mapping"
        return first(_misfit_at(value, key, part, f"{name}." if name else "") for key, part in form.items())
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{name or 'it'} is no list"
        return first(misfit(one, form[0], f"{name}.{number}".lstrip(".")) for number, one in enumerate(value))
    if form is None:
        return None if value is None else f"{name} is {_shown(value)}"
    # JSON's true and false are numbers to Python
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
    """`misfit` of a file in points/."""
    found = misfit(value, RECORD)
    if found is not None or value["status"] != failures.OK:
        return found
    return misfit(value, {"measured": MEASURED}) or first(
        f"measured.{name} has {len(value['measured'][name])} steps"
        for name in ("step_s", "updated", "positions")
        if len(value["measured"][name]) != value["recipe"]["train"]["steps"]
    )


def misfit_of_results(value: Any) -> str | None:
    """`misfit` of a results.json."""
    return misfit(value, RESULTS) or first(
        misfit_of_row(row, f"points.{number}") for number, row in enumerate(value["points"])
    )


def misfit_of_row(row: Any, name: str) -> str | None:
    """`misfit` of a point in a results.json."""
    found = misfit(row, ROW, name)
    if found is None and row["status"] in failures.FINISHED:
        found = misfit(row, DONE, name)
    if found is None and row["status"] == failures.OK:
        found = misfit(row, FIGURES, name)
    return found


def first(found: Iterable[str | None]) -> str | None:
    """The first that is something."""
    return next((one for one in found if one is not None), None)


def _shown(value: Any) -> str:
    return failures.line(repr(value), 60)
