"""The tapes of one estimate, from a cache: a search estimates the same trace several times."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import Trace, trace
from tigon.techniques import SETTINGS

_TRACE_FIELDS = tuple(name for name, setting in SETTINGS.items() if setting.traced)
_MAX_TRACES = 256


class TracedParts:
    """The parts of a request that its trace depends on. Hashable; equal for requests with the same trace."""

    def __init__(self, request: Request) -> None:
        self.request = request
        choices = tuple(getattr(request.choices, name) for name in _TRACE_FIELDS)
        shape = (request.batch, request.seq, request.masked, request.objective)
        self._parts: Hashable = (request.model, request.config.to_json_string(use_diff=False), shape, choices)

    def __hash__(self) -> int:
        return hash(self._parts)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, TracedParts) and self._parts == other._parts


@dataclass(frozen=True)
class StepTapes:
    """The tapes of one optimizer step and of an evaluation batch."""

    micro_batches: tuple[Tape, ...]
    """The first micro-batch and, with gradient accumulation, a later one."""
    evaluation: Tape | None


def step_tapes(request: Request, gpu: Gpu, *, evaluating: bool) -> StepTapes:
    """Trace the micro-batches of one step and, if `evaluating`, an evaluation batch."""
    parts = TracedParts(request)
    first = _cached_trace(parts, gpu, evaluating=evaluating)
    later = (_cached_trace(parts, gpu, accumulating=True).tape,) if request.choices.accumulate > 1 else ()
    return StepTapes((first.tape, *later), first.eval_tape if evaluating else None)


_traces: dict[tuple[TracedParts, Gpu, bool], Trace] = {}


def _cached_trace(parts: TracedParts, gpu: Gpu, *, accumulating: bool = False, evaluating: bool = False) -> Trace:
    gpu = dataclasses.replace(gpu, name="", memory_bytes=0, source="")  # only the architecture matters to a trace
    cached = _traces.get((parts, gpu, accumulating))
    if cached is None or (evaluating and not cached.eval_tape.segments):
        while len(_traces) >= _MAX_TRACES:
            del _traces[next(iter(_traces))]
        cached = trace(parts.request, gpu, accumulating=accumulating, evaluating=evaluating)
        _traces[parts, gpu, accumulating] = cached
    return cached
