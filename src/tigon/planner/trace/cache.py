"""The tapes of one estimate, from a cache, because a search needs the same trace several times.

The cache has two levels: the traces of this process, and files with the traces of earlier processes (`disk_cache`).

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
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tigon.planner.gpus import Gpu
from tigon.planner.remembered_config import real_config
from tigon.planner.request import Request
from tigon.planner.trace import disk_cache
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import Trace, trace
from tigon.techniques import SETTINGS, accumulation

_TRACE_FIELDS = tuple(name for name, setting in SETTINGS.items() if setting.traced)
_MAX_TRACES = 256
# Python's default text of an object holds its address, which another process does not know.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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

    @property
    def text(self) -> str | None:
        """The key as text that is the same in every process.

        None if the model's or the objective's code is neither tigon's nor transformers', whose versions are known.
        """
        request, text = self.request, repr(self._parts)
        kinds = (type(request.objective).__module__, getattr(request.config, "module", type(request.config).__module__))
        known = all(module.split(".")[0] in ("tigon", "transformers") for module in kinds)
        return text if known and not _ADDRESS.search(text) else None


@dataclass(frozen=True)
class StepTapes:
    """The tapes of one optimizer step and of an evaluation batch."""

    micro_batches: tuple[Tape, ...]
    """The first micro-batch and, with gradient accumulation, a later one."""
    evaluation: Tape | None


def step_tapes(request: Request, gpu: Gpu, *, evaluating: bool) -> StepTapes:
    """Trace the micro-batches of one step and, if `evaluating`, an evaluation batch."""
    choices = request.choices
    # With one micro-batch the trace is the same, so it is not made twice.
    choices = dataclasses.replace(choices, accumulation_fusion=accumulation.fuses(choices))
    key = TraceKey(dataclasses.replace(request, choices=choices))
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
        cached = _stored_trace(key, gpu, accumulating=accumulating, evaluating=evaluating)
        _traces[key, gpu, accumulating] = cached
    return cached


def _stored_trace(key: TraceKey, gpu: Gpu, *, accumulating: bool, evaluating: bool) -> Trace:
    """The trace from its file, or else traced and written to the file."""
    question = None
    if key.text is not None:
        question = json.dumps([key.text, dataclasses.asdict(gpu), accumulating, evaluating])
        tapes = disk_cache.read("trace", question)
        try:
            return Trace(*(Tape.of_json(tape) for tape in tapes))
        except (TypeError, ValueError, LookupError):  # none, or another program's
            pass
    request = dataclasses.replace(key.request, config=real_config(key.request.config))
    traced = trace(request, gpu, accumulating=accumulating, evaluating=evaluating)
    if question is not None:
        disk_cache.write("trace", question, [traced.tape.as_json(), traced.eval_tape.as_json()])
    return traced
