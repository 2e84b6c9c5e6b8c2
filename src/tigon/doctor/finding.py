"""One thing the doctor has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["problem", "warning", "note"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem means wrong results, a crash or kernels that do not run; only problems set the exit code."""

    level: Level
    id: str
    what: str
    fix: str
    source: str
    """Who says so: an issue, a document, or the doctor's own measurement."""
