"""The allocations and frees of a step, in order: recorded from a shallow model, unrolled to the real model's depth.

A `Tape` is a list of segments, each with its events and its cost. A segment is one decoder layer's forward or backward
pass, or the work between layers. Layers repeat, so `unrolled` copies the events of the repeated layers, block by block.
For every free it finds the block of the right copy. The result is exact and keeps the order, on which an allocator's
fragmentation depends. If the shallow trace does not repeat, `NotPeriodic` is raised and the caller traces all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class NotPeriodic(Exception):
    """The layers of a trace do not repeat, so all of them must be traced."""


class Where(NamedTuple):
    """A segment's place: the direction, and the layer; None for work outside the layers."""

    phase: str
    layer: int | None = None


@dataclass
class SegmentCost:
    """The work of a segment: 16-bit, fp32 and FP8 product operations, and bytes of everything else."""

    flops: float = 0.0
    fp32_flops: float = 0.0
    moved_bytes: float = 0.0
    launches: int = 0
    """Kernels."""
    host_calls: int = 0
    """Operators that the CPU runs, including views."""
    fp8_flops: float = 0.0

    def add(self, other: SegmentCost) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def multiply(self, factor: float) -> None:
        for name, value in vars(self).items():
            setattr(self, name, type(value)(value * factor))


@dataclass
class TapeSegment:
    """Consecutive events of one place: block b is allocated (b) or freed (~b)."""

    where: Where
    events: list[int] = field(default_factory=list)
    cost: SegmentCost = field(default_factory=SegmentCost)


@dataclass
class Tape:
    """A recording: segments in order, and for each block its bytes and its component."""

    segments: list[TapeSegment] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    components: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The tape as JSON's types, for `of_json`."""
        segments = [[*one.where, one.events, list(vars(one.cost).values())] for one in self.segments]
        return {"segments": segments, "sizes": self.sizes, "components": self.components}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Tape:
        """The tape that `as_json` gave. Raises TypeError, ValueError or LookupError for anything else."""
        segments = [
            TapeSegment(Where(phase, layer), events, SegmentCost(*cost))
            for phase, layer, events, cost in stored["segments"]
        ]
        return cls(segments, stored["sizes"], stored["components"])

    def fetched_late_bytes(self, least: int) -> int:
        """Bytes of the layers' checkpoints of at least `least` bytes that come back from the host when they are used,
        so that no computation hides the copy."""
        made = (event for one in self.segments if one.where.phase == BACKWARD for event in one.events if event >= 0)
        return sum(self.sizes[b] for b in made if self.components[b] == "checkpoints" and self.sizes[b] >= least)


def unrollable(layers: int, period: int) -> int:
    """How many layers to trace: the first, one period, and the layers after the last period (at least one)."""
    return 2 + period + (layers - 2) % period


def unrolled(tape: Tape, *, period: int, traced: int, layers: int, first: int = 1) -> Tape:
    """The tape of `layers` layers from one of `traced`. The layers [first, first + period) repeat. Raises NotPeriodic.

    Layer `first - 1` is of the same kind as the last layer of the period.
    """
    if traced == layers:
        return tape
    return _Unroller(tape, first, period, traced, layers).run()


class _Unroller:
    """Copies the layers [first, first + period), the pattern, between the layers before it and the last layers."""

    def __init__(self, tape: Tape, first: int, period: int, traced: int, layers: int) -> None:
        self.tape, self.period, self.shift = tape, period, layers - traced
        self.first, self.last = first, first + period
        self.copies = 1 + self.shift // period
        self.out = Tape()
        self.births: dict[Where, list[int]] = {}
        self.born: dict[int, tuple[Where, int]] = {}
        for segment in tape.segments:
            born = self.births.setdefault(segment.where, [])
            for event in segment.events:
                if event >= 0:
                    self.born[event] = (segment.where, len(born))
                    born.append(event)
        self.placed: dict[tuple[int, int], int] = {}

    def run(self) -> Tape:
        for group, copies in self._groups():
            for copy in copies:
                for segment in group:
                    self._place(segment, copy)
        return self.out

    def _groups(self) -> list[tuple[list[TapeSegment], Sequence[int | None]]]:
        """Groups of consecutive segments with the copies to make of each, in the order of a deep model."""
        groups: list[tuple[list[TapeSegment], Sequence[int | None]]] = []
        for segment in self.tape.segments:
            repeated = self._repeats(segment.where.layer)
            latest = groups[-1][0][-1].where if groups else Where("")
            if repeated and self._repeats(latest.layer) and latest.phase == segment.where.phase:
                groups[-1][0].append(segment)
                continue
            # Backward runs from the last copy to the first.
            order = range(self.copies) if segment.where.phase == FORWARD else range(self.copies - 1, -1, -1)
            groups.append(([segment], order if repeated else (None,)))
        return groups

    def _repeats(self, layer: int | None) -> bool:
        return layer is not None and self.first <= layer < self.last

    def _place(self, segment: TapeSegment, copy: int | None) -> None:
        where = segment.where
        if where.layer is not None and (copy is not None or where.layer >= self.last):
            moved = self.shift if copy is None else copy * self.period
            where = Where(where.phase, where.layer + moved)
        placed = TapeSegment(where, cost=segment.cost)
        for event in segment.events:
            block = event if event >= 0 else ~event
            if event >= 0:
                placed.events.append(self._new(block, copy))
            elif copy is None and self._repeats(self.born[block][0].layer):
                placed.events += [~self.placed[block, c] for c in self._seen_from(segment.where, block)]
            elif copy is None:
                placed.events.append(~self.placed[block, 0])
            elif self.born[block][0].layer is None:
                # The last layer that uses a shared tensor, such as a rotary table, frees it.
                if copy == (self.copies - 1 if where.phase == FORWARD else 0):
                    placed.events.append(~self.placed[block, 0])
            else:
                placed.events.append(~self._relative(block, copy))
        self.out.segments.append(placed)

    def _new(self, block: int, copy: int | None) -> int:
        number = len(self.out.sizes)
        self.out.sizes.append(self.tape.sizes[block])
        self.out.components.append(self.tape.components[block])
        self.placed[block, copy or 0] = number
        return number

    def _seen_from(self, where: Where, block: int) -> Sequence[int]:
        """The copies of a repeated layer's block that a segment outside the repeated layers frees."""
        if where.layer is None:
            return range(self.copies)  # of every layer: autocast's casts of the weights, at the end of the forward
        return (0,) if where.layer < self.first else (self.copies - 1,)

    def _relative(self, block: int, copy: int) -> int:
        """The block that `copy` of the pattern frees where the recorded pattern frees `block`."""
        where, index = self.born[block]
        assert where.layer is not None, "only blocks of a layer have copies"
        target = copy
        if not self._repeats(where.layer):
            # The block belongs to a neighbouring layer, which is another copy of the pattern except for the outermost.
            before = where.layer < self.first
            inner = copy > 0 if before else copy < self.copies - 1
            if not inner:
                return self.placed[block, 0]
            target = copy - 1 if before else copy + 1
            twin = where.layer + (self.period if before else -self.period)
            twins = self.births.get(Where(where.phase, twin), [])
            if not self._repeats(twin) or index >= len(twins):
                raise NotPeriodic(f"{where.phase}: layer {twin} lacks block {index}, which layer {where.layer} has")
            if self.tape.sizes[twins[index]] != self.tape.sizes[block]:
                raise NotPeriodic(f"{where.phase}: layers {twin} and {where.layer} allocate differently")
            block = twins[index]
        return self.placed[block, target]
