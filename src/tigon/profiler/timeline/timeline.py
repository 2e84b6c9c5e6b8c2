"""What was alive when: every allocation and release of a run, each with its category and the call that made it.

One format whatever was recorded (an allocator's history on CUDA, PyTorch's profiler on the CPU), so that all that
follows (the peak, the charts, the page) is written and tested once. An event is a block that is born, `b`, or dies,
`~b`; the bytes alive after it are the sum of the blocks born and not dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tigon.errors import UsageError

# What memory is for, in the order in which charts stack it, with its colour on light and on dark paper. At rest in
# blues, what grows with the rows warm. The planner's components have the same names.
CATEGORIES: Mapping[str, tuple[str, str]] = {
    "weights": ("#1e3a8a", "#5b7fe0"),
    "gradients": ("#3b82f6", "#3b82f6"),
    "optimizer": ("#93c5fd", "#a5d0fe"),
    "checkpoints": ("#0f766e", "#14a89b"),
    "activations": ("#f59e0b", "#f5b13b"),
    "logits": ("#c2410c", "#ea6a2d"),
    "workspace": ("#9ca3af", "#8a93a1"),
}
TITLES = {"logits": "logits and loss"}
"""Of a category that is not called by its name."""
PHASES = ("load", "forward", "loss", "backward", "optimizer")
FORMAT = 1


@dataclass(frozen=True)
class Call:
    """What allocated: operator, autograd node, and Python frames, innermost first; what is not known is empty."""

    op: str = ""
    node: str = ""
    frames: tuple[str, ...] = ()
    """`file.py:12 function`, files named from their package on."""

    def __str__(self) -> str:
        """On one line: the operator or node, and the first line of Python outside PyTorch."""
        what = self.op or self.node
        if self.op and self.node:
            what = f"{self.op} ({self.node})"
        where = next((f for f in self.frames if not f.startswith("torch/")), self.frames[0] if self.frames else "")
        return " at ".join(part for part in (what, where) if part) or "not known"


@dataclass(frozen=True)
class Phase:
    """Consecutive events of one part of the run: those from `start` to before `end`."""

    name: str
    """One of PHASES. `loss` is what lies between the last layer's forward and its backward."""
    step: int
    """Counted from 1; 0 while loading."""
    layer: int | None
    recomputed: bool
    """Whether it is a checkpointed layer's second forward, which runs inside its backward."""
    start: int
    end: int


@dataclass
class Timeline:
    """A recorded run."""

    label: str
    device: str
    events: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    """Of each event, since the first."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each block."""
    categories: list[str] = field(default_factory=list)
    """Of each block."""
    calls: list[int] = field(default_factory=list)
    """Of each block, into call_table."""
    call_table: list[Call] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    allocator_peak_bytes: int | None = None
    """What the allocator itself says the peak was; None where it says nothing."""
    notes: list[str] = field(default_factory=list)
    """What the recording leaves out."""

    def live_bytes(self) -> Iterator[dict[str, int]]:
        """After each event, the bytes alive by category: one dict, changed in place."""
        live = dict.fromkeys(CATEGORIES, 0)
        for event in self.events:
            block = event if event >= 0 else ~event
            live[self.categories[block]] += self.sizes[block] if event >= 0 else -self.sizes[block]
            yield live

    def totals(self) -> list[int]:
        """Bytes alive after each event."""
        total, found = 0, []
        for event in self.events:
            total += self.sizes[event] if event >= 0 else -self.sizes[~event]
            found.append(total)
        return found

    def places(self) -> list[float]:
        """Where along a drawing each event is. Blocks smaller than a thousandth of the peak take a fiftieth of the
        width of others: thousands of them come and go where nothing can be seen of it."""
        least = max(self.totals(), default=0) / 1000
        place, found = 0.0, []
        for event in self.events:
            place += 1.0 if self.sizes[event if event >= 0 else ~event] >= least else 0.02
            found.append(round(place, 2))
        return found

    def phase_at(self, event: int) -> Phase | None:
        """The phase that an event belongs to."""
        return next((phase for phase in self.phases if phase.start <= event < phase.end), None)

    def bands(self) -> list[Phase]:
        """The phases with layers and recomputation joined, and empty ones left out."""
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
        """For JSON; `from_mapping` reads it."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Timeline:
        """Raises UsageError for what `as_mapping` did not write."""
        values = dict(mapping)
        if values.pop("format", None) != FORMAT:
            raise UsageError(f"not a profile of this version (format {mapping.get('format')}, {FORMAT} is read)")
        values["call_table"] = [Call(c["op"], c["node"], tuple(c["frames"])) for c in values["call_table"]]
        values["phases"] = [Phase(**phase) for phase in values["phases"]]
        return cls(**values)


def title(category: str) -> str:
    """What readers see."""
    return TITLES.get(category, category)
