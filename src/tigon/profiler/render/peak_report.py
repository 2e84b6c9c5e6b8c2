"""Finds the memory peak: its categories, and the calls that made its largest pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tigon.profiler.timeline.timeline import CATEGORIES, PHASES, Phase, Timeline


@dataclass(frozen=True)
class Piece:
    """Blocks of one category that one call allocated and that are alive at the peak."""

    category: str
    call: int
    phase: str
    """The phase in which they were allocated."""
    nbytes: int
    count: int


@dataclass(frozen=True)
class PeakReport:
    """The most bytes alive at once."""

    event: int
    nbytes: int
    time_ms: float
    phase: Phase | None
    components: Mapping[str, int]
    """Bytes of each category; they sum to nbytes."""
    pieces: tuple[Piece, ...]
    """Largest first. They also sum to nbytes."""
    reached_by: Piece
    """The last allocation before the peak that is at least a hundredth of it."""


def peak_of(timeline: Timeline) -> PeakReport | None:
    """The peak of all events; None without events."""
    totals = timeline.totals()
    if not totals:
        return None
    event = max(range(len(totals)), key=lambda i: totals[i])
    alive: set[int] = set()
    for e in timeline.events[: event + 1]:
        if e >= 0:
            alive.add(e)
        else:
            alive.discard(~e)
    births = _births(timeline)
    components = dict.fromkeys(CATEGORIES, 0)
    groups: dict[tuple[str, int, str], list[int]] = {}
    for block in alive:
        components[timeline.categories[block]] += timeline.sizes[block]
        key = (timeline.categories[block], timeline.calls[block], births[block])
        groups.setdefault(key, []).append(timeline.sizes[block])
    pieces = [Piece(*key, sum(sizes), len(sizes)) for key, sizes in groups.items()]
    pieces.sort(key=lambda piece: (-piece.nbytes, piece.category, piece.call))
    last = max((b for b in alive if 100 * timeline.sizes[b] >= totals[event]), default=max(alive, default=0))
    size = timeline.sizes[last]
    return PeakReport(
        event,
        totals[event],
        timeline.times_ms[event],
        timeline.phase_at(event),
        components,
        tuple(pieces),
        Piece(timeline.categories[last], timeline.calls[last], births[last], size, 1),
    )


def phase_peaks(timeline: Timeline) -> dict[str, int]:
    """The most bytes alive at once in each of PHASES, over all steps."""
    totals = timeline.totals()
    peaks = dict.fromkeys(PHASES, 0)
    for phase in timeline.phases:
        # memory alive at the phase's start counts too, as in the planner's phases
        window = totals[max(0, phase.start - 1) : phase.end] if phase.start < phase.end else []
        peaks[phase.name] = max([peaks[phase.name], *window])
    return peaks


def _births(timeline: Timeline) -> list[str]:
    """The phase in which each block was allocated."""
    phases = [""] * len(timeline.sizes)
    for phase in timeline.phases:
        name = f"{phase.name}, recomputed" if phase.recomputed else phase.name
        for event in timeline.events[phase.start : phase.end]:
            if event >= 0:
                phases[event] = name
    return phases
