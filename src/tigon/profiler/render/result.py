"""One profiled run, as stored in profile.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tigon._files import read_text
from tigon.errors import UsageError
from tigon.profiler.render.op_table import OpRow
from tigon.profiler.render.peak_report import PeakReport, peak_of
from tigon.profiler.timeline.timeline import FORMAT, Timeline

FILE = "profile.json"


@dataclass(frozen=True)
class Predicted:
    """Predicted memory of the run."""

    source: str
    """Who predicted it, and for which device."""
    phases: Mapping[str, int]
    """The peak of each of timeline.PHASES, bytes."""
    components: Mapping[str, int]
    """Bytes of each of timeline.CATEGORIES at the overall peak."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class Profile:
    """Memory, operators, prediction and facts of a run. `ops` is empty if the run stopped before the timed step."""

    timeline: Timeline
    ops: tuple[OpRow, ...]
    predicted: Predicted | None
    details: Mapping[str, str]
    """Facts shown to the reader: model, batch, device, versions."""

    @functools.cached_property
    def peak(self) -> PeakReport:
        peak = peak_of(self.timeline)
        if peak is None:
            raise UsageError(f"{self.timeline.label}: nothing was allocated while it was recorded")
        return peak

    def as_mapping(self) -> dict[str, Any]:
        return {
            "timeline": self.timeline.as_mapping(),
            "ops": [row.as_mapping() for row in self.ops],
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "facts": dict(self.details),
            "peak": asdict(self.peak),
        }


def read(path: Path) -> Profile:
    """Read the output of `as_mapping`. Raises UsageError if the file cannot be read or is not a profile."""
    try:
        mapping = json.loads(read_text(path))
        if (own := mapping["timeline"]["format"]) != FORMAT:
            raise UsageError(f"{path}: not a profile of this version (format {own}, {FORMAT} is read)")
        return TypeAdapter(Profile).validate_python({**mapping, "details": mapping["facts"]})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: not a profile ({' '.join(str(error).split())[:120]})") from None
