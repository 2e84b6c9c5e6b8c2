"""The tapes of one estimate, from a cache, because a search needs the same trace several times.

The cache has two levels: the traces of this process, and files with the traces of earlier processes (`disk_cache`).
Below it, traces that repeat the same few layers share the recording of these layers.

Two traces share an entry of the cache if all of these are equal:

- the model's name and config, the batch, the sequence length, the block mask and the objective;
- the recipe keys that say `traced`, such as precision, kernels and checkpointing (`TraceKey`);
- the GPU, apart from its name, its memory and the source of its numbers. A trace reads its architecture and its number
  of multiprocessors;
- whether gradients of an earlier micro-batch exist.

Optimizer, sharding, offload, number of GPUs and micro-batches are not in the key, because a trace does not depend on
them. A trace with an evaluation replaces the entry that has none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable
from dataclasses import dataclass

from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.planner.trace.cache import disk_cache
from tigon.planner.trace.cache.trace_key import TraceKey
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import Trace, recorded, trace
from tigon.techniques.accumulation import accumulation
from tigon.techniques.checkpointing import layer_checkpointing

_MAX_TRACES = 256


@dataclass(frozen=True)
class StepTapes:
    """The tapes of one optimizer step and of an evaluation batch."""

    micro_batches: tuple[Tape, ...]
    """The first micro-batch and, with gradient accumulation, a later one."""
    evaluation: Tape | None


def step_tapes(request: Request, gpu: Gpu, *, evaluating: bool) -> StepTapes:
    """Trace the micro-batches of one step and, if `evaluating`, an evaluation batch."""
    settings = request.settings
    # With one micro-batch the trace is the same, so it is not made twice.
    settings = settings.having({"train.gradient_accumulation_fusion": accumulation.fuses(settings)})
    key = TraceKey(dataclasses.replace(request, settings=settings))
    first = _cached_trace(key, gpu, evaluating=evaluating)
    later = (_cached_trace(key, gpu, accumulating=True).tape,) if request.micro_batches > 1 else ()
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
    if key.portable_text is not None:
        question = json.dumps([key.portable_text, dataclasses.asdict(gpu), accumulating, evaluating])
        tapes = disk_cache.read("trace", question)
        try:
            return Trace(*(Tape.of_json(tape) for tape in tapes))
        except (TypeError, ValueError, LookupError):  # none, or another program's
            pass
    traced = trace(key.request, gpu, accumulating=accumulating, evaluating=evaluating, record=_shared)
    if question is not None:
        disk_cache.write("trace", question, [traced.tape.as_json(), traced.eval_tape.as_json()])
    return traced


_tapes: dict[Hashable, Tape] = {}


def _shared(request: Request, gpu: Gpu, layers: int, accumulating: bool, evaluating: bool) -> Trace:
    """The tapes of a few layers, each recorded once in this process.

    Models of other depths, and other counts of layers per kind of checkpointing, repeat the same few layers. An
    evaluation depends neither on gradients of an earlier micro-batch nor on checkpointing. Checkpointing by layer is an
    exception with adapters: it replaces the forward of modules, so adapters that share an input run one by one.
    """
    kind, adapted = request.settings.train.checkpointing, request.settings.lora.used
    unchecked = kind if adapted and layer_checkpointing.is_by_layer(kind) else "none"
    step: Hashable = (TraceKey(request), gpu, layers, accumulating)
    evaluation: Hashable = (TraceKey(request, checkpointing=unchecked), gpu, layers)
    missing = [key for key in (step, evaluation) if key not in _tapes and (evaluating or key is step)]
    if missing:
        while len(_tapes) + 2 > 2 * _MAX_TRACES:
            del _tapes[next(iter(_tapes))]
        made = recorded(request, gpu, layers, accumulating, evaluation in missing, training=step in missing)
        _tapes.update((key, made.tape if key is step else made.eval_tape) for key in missing)
    return Trace(_tapes[step], _tapes[evaluation] if evaluating else Tape())
