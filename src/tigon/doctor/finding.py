"""`Finding`: one result of `tigon doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["problem", "warning", "note"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. Level "problem" means wrong results, a crash or kernels that do not run, and sets the exit code."""

    level: Level
    id: str
    what: str
    fix: str
    source: str
    """The source of the claim: an issue, a document, or the doctor's own measurement."""
