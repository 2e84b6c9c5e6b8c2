"""The tapes of one estimate, from a cache, because a search needs the same trace several times.

Two traces share an entry of the cache if all of these are equal:

- the model's name and config, the batch, the sequence length, the block mask and the objective;
- the choices whose setting says `traced`, such as precision, kernels and checkpointing (`TraceKey`);
- the GPU, apart from its name, its memory and the source of its numbers. A trace reads its architecture and its number
  of multiprocessors;
- whether gradients of an earlier micro-batch exist.

Optimizer, sharding, offload, number of GPUs and micro-batches are not in the key, because a trace does not depend on
them. A trace with an evaluation replaces the entry that has none.
"""

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


class TraceKey:
    """The key of a trace: the parts of a request that its trace depends on. Requests with equal keys share a trace."""

    def __init__(self, request: Request) -> None:
        self.request = request
        choices = tuple(getattr(request.choices, name) for name in _TRACE_FIELDS)
        shape = (request.batch, request.seq, request.masked, request.objective)
        self._parts: Hashable = (request.model, request.config.to_json_string(use_diff=False), shape, choices)

    def __hash__(self) -> int:
        return hash(self._parts)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, TraceKey) and self._parts == other._parts


@dataclass(frozen=True)
class StepTapes:
    """The tapes of one optimizer step and of an evaluation batch."""

    micro_batches: tuple[Tape, ...]
    """The first micro-batch and, with gradient accumulation, a later one."""
    evaluation: Tape | None


def step_tapes(request: Request, gpu: Gpu, *, evaluating: bool) -> StepTapes:
    """Trace the micro-batches of one step and, if `evaluating`, an evaluation batch."""
    key = TraceKey(request)
    first = _cached_trace(key, gpu, evaluating=evaluating)
    later = (_cached_trace(key, gpu, accumulating=True).tape,) if request.choices.accumulate > 1 else ()
    return StepTapes((first.tape, *later), first.eval_tape if evaluating else None)


_traces: dict[tuple[TraceKey, Gpu, bool], Trace] = {}


def _cached_trace(key: TraceKey, gpu: Gpu, *, accumulating: bool = False, evaluating: bool = False) -> Trace:
    gpu = dataclasses.replace(gpu, name="", memory_bytes=0, source="")  # a trace does not depend on these three
    cached = _traces.get((key, gpu, accumulating))
    if cached is None or (evaluating and not cached.eval_tape.segments):
        while len(_traces) >= _MAX_TRACES:
            del _traces[next(iter(_traces))]
        cached = trace(key.request, gpu, accumulating=accumulating, evaluating=evaluating)
        _traces[key, gpu, accumulating] = cached
    return cached
