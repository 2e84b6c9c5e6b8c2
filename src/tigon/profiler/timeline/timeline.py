"""The timeline of a run: every allocation and release, each with its category and the call that made it.

Both recorders (the allocator's history on CUDA, PyTorch's profiler on the CPU) give this one format, so that the peak,
the charts and the page are written and tested once. An event is `b` if block b is allocated and `~b` if it is freed.
The live bytes after an event are the sum of the blocks that are allocated and not freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tigon.report.chart import MEMORY_COLOURS

CATEGORIES = tuple(MEMORY_COLOURS)
"""Memory categories in the order in which charts stack them. The planner's components have the same names."""
TITLES = {"logits": "logits and loss"}
"""Titles of categories whose title differs from their name."""
PHASES = ("load", "forward", "loss", "backward", "optimizer")
FORMAT = 1


@dataclass(frozen=True)
class Call:
    """An allocating call: operator, autograd node and Python frames, innermost first. Unknown parts are empty."""

    op: str = ""
    node: str = ""
    frames: tuple[str, ...] = ()
    """`file.py:12 function`, with paths relative to their package."""

    def __str__(self) -> str:
        """One line with the operator or node, and the first Python line outside PyTorch."""
        what = self.op or self.node
        if self.op and self.node:
            what = f"{self.op} ({self.node})"
        where = next((f for f in self.frames if not f.startswith("torch/")), self.frames[0] if self.frames else "")
        return " at ".join(part for part in (what, where) if part) or "not known"


@dataclass(frozen=True)
class Phase:
    """Consecutive events of one part of the run, from `start` to before `end`."""

    name: str
    """One of PHASES. `loss` lasts from the end of the last layer's forward to the start of its backward."""
    step: int
    """Counted from 1; 0 while loading."""
    layer: int | None
    recomputed: bool
    """Whether this is the second forward of a checkpointed layer, which runs inside its backward."""
    start: int
    end: int


@dataclass
class Timeline:
    """A recorded run."""

    label: str
    device: str
    events: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    """Time of each event since the first event."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each block."""
    categories: list[str] = field(default_factory=list)
    """Of each block."""
    calls: list[int] = field(default_factory=list)
    """Index of each block's call in call_table."""
    call_table: list[Call] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    allocator_peak_bytes: int | None = None
    """The peak as the allocator counts it; None if it keeps no peak."""
    notes: list[str] = field(default_factory=list)
    """Notes on memory and times that the recording does not cover."""

    def live_bytes(self) -> Iterator[dict[str, int]]:
        """The live bytes by category after each event. Yields one dict that changes in place."""
        live = dict.fromkeys(CATEGORIES, 0)
        for event in self.events:
            block = event if event >= 0 else ~event
            live[self.categories[block]] += self.sizes[block] if event >= 0 else -self.sizes[block]
            yield live

    def totals(self) -> list[int]:
        """Live bytes after each event."""
        total, totals = 0, []
        for event in self.events:
            total += self.sizes[event] if event >= 0 else -self.sizes[~event]
            totals.append(total)
        return totals

    def places(self) -> list[float]:
        """The horizontal place of each event in a drawing.

        Blocks smaller than a thousandth of the peak take a fiftieth of the width of other blocks. There are thousands
        of them, and they are too small to see.
        """
        least = max(self.totals(), default=0) / 1000
        place, places = 0.0, []
        for event in self.events:
            place += 1.0 if self.sizes[event if event >= 0 else ~event] >= least else 0.02
            places.append(round(place, 2))
        return places

    def phase_at(self, event: int) -> Phase | None:
        """The phase that an event belongs to."""
        return next((phase for phase in self.phases if phase.start <= event < phase.end), None)

    def bands(self) -> list[Phase]:
        """The phases with layers and recomputation merged, without empty phases."""
        joined: list[Phase] = []
        for phase in self.phases:
            if phase.start == phase.end:
                continue
            latest = joined[-1] if joined else None
            if latest is not None and (latest.name, latest.step) == (phase.name, phase.step):
                joined[-1] = Phase(phase.name, phase.step, None, False, latest.start, phase.end)
            else:
                joined.append(Phase(phase.name, phase.step, None, False, phase.start, phase.end))
        return joined

    def as_mapping(self) -> dict[str, Any]:
        """The timeline as JSON values."""
        return {"format": FORMAT, **asdict(self)}


def title(category: str) -> str:
    """What readers see."""
    return TITLES.get(category, category)
