"""Estimates the memory and time of a training run before it runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tigon.errors import UsageError
from tigon.models.loading.presets import PRESETS
from tigon.planner import closed_form
from tigon.planner.engines import deepspeed_host_memory, sharded
from tigon.planner.engines.sharded import Placement
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, check, text_config
from tigon.planner.simulate import roofline
from tigon.planner.simulate.allocator import CachingAllocator
from tigon.planner.simulate.ledger import (
    COMPONENTS,
    GATHERING,
    Gathered,
    Held,
    Ledger,
    Reduced,
    offloaded,
    play,
    play_evaluation,
)
from tigon.planner.simulate.non_allocator_memory import outside_bytes, room_bytes
from tigon.planner.simulate.statics import Statics, managed_bytes, state_tensors, statics, step_tensors, update_work
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import Trace, trace, weight_itemsize
from tigon.techniques import SETTINGS
from tigon.techniques.optimizers import OPTIMIZERS
from tigon.techniques.sharding import fit_whole, weights_are_sharded

PHASES = ("load", "forward", "loss", "backward", "optimizer", "eval", "save")
Method = Literal["trace", "study"]

# The third step is the first that reuses cached blocks of a step with optimizer states.
STEPS = 3
# Host memory bandwidth of DeepSpeed's AdamW on 16 cores, from Llama-3.2-1B's step on one machine with an H200.
HOST_BYTES_S = 74e9
# The host's overflow check on fp16's gradients, which are fp32 there: the extra time over bf16 in the study on an H200.
HOST_OVERFLOW_BYTES_S = 8.4e9
# Bytes per element that the check for finite weights adds before a save: `isfinite` makes |x| and three masks for one
# parameter at a time.
_FINITE_MASKS = 3


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One configuration's memory and time, per GPU."""

    peak_allocated_bytes: int
    """Predicts torch.cuda.max_memory_allocated()."""
    peak_reserved_bytes: int
    """Predicts torch.cuda.max_memory_reserved(): allocated, plus memory that the caching allocator could not reuse."""
    device_bytes: int
    """Predicts nvidia-smi: reserved, plus memory outside the allocator (simulate/non_allocator_memory.py)."""
    host_bytes: int
    """Pinned host memory for data moved off the GPU."""
    nvme_bytes: int
    step_s: float
    """One optimizer step, including all its micro-batches."""
    tokens_per_s: float
    """All GPUs together."""
    phases: Mapping[str, int]
    """The allocated peak of each of PHASES, bytes."""
    peak_phase: str
    components: Mapping[str, int]
    """Bytes of each of COMPONENTS at the peak; they sum to peak_allocated_bytes."""
    notes: tuple[str, ...]


def estimate(request: Request, *, gpu: Gpu, method: Method = "trace", evaluation: bool = True) -> Estimate:
    """The memory and time of `request` on one of its GPUs. Raises UsageError for a request that `check` rejects.

    evaluation: if False and the request does not evaluate, skips that phase: its peak is 0, and a fifth of the time is
    saved.
    """
    check(request)
    return _by_study(request, gpu) if method == "study" else _estimate(request, gpu, evaluation or request.evaluated)


def _estimate(request: Request, gpu: Gpu, evaluation: bool) -> Estimate:
    inner = dataclasses.replace(request, choices=sharded.traced_choices(request.choices))
    model = at_rest(inner)
    place = _placement(request, model)
    room = room_bytes(gpu, request.choices)
    ledger, tapes, host_bytes = _run(inner, gpu, model, place, evaluation, room)
    phase, peak_bytes, components = ledger.peak(but=None if request.evaluated else "eval")
    phases = {name: ledger.phases.get(name, 0) for name in PHASES}
    reserved = ledger.reserved_bytes
    step_s = _step_s(request, gpu, model, place, tapes, host_bytes)
    tokens = request.batch * request.seq * request.choices.accumulate * request.choices.gpus
    return Estimate(
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_bytes(gpu, request.choices),
        host_bytes=host_bytes + place.host,
        nvme_bytes=place.nvme,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        phases=phases,
        peak_phase=phase,
        components={name: components[name] for name in COMPONENTS},
        notes=_notes(request, gpu, model),
    )


# --- traces, cached because a search needs each one several times -----------------------------------------------------

_TRACE_FIELDS = tuple(name for name, setting in SETTINGS.items() if setting.traced)


class _Key:
    """The parts of a request that its trace depends on, hashable."""

    def __init__(self, request: Request) -> None:
        self.request = request
        choices = tuple(getattr(request.choices, name) for name in _TRACE_FIELDS)
        shape = (request.batch, request.seq, request.masked, request.heads)
        self._all = (request.model, request.config.to_json_string(use_diff=False), shape, choices)

    def __hash__(self) -> int:
        return hash(self._all)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Key) and self._all == other._all


_MAX_TRACES = 256
_traces: dict[tuple[_Key, Gpu, bool], Trace] = {}


def _trace(key: _Key, gpu: Gpu, *, accumulating: bool = False, evaluating: bool = False) -> Trace:
    """Cached trace. It depends on the GPU's architecture, not on its memory."""
    gpu = dataclasses.replace(gpu, name="", memory_bytes=0, source="")
    found = _traces.get((key, gpu, accumulating))
    if found is None or (evaluating and not found.eval_tape.segments):
        while len(_traces) >= _MAX_TRACES:
            del _traces[next(iter(_traces))]
        found = trace(key.request, gpu, accumulating=accumulating, evaluating=evaluating)
        _traces[key, gpu, accumulating] = found
    return found


def logits_bytes(request: Request, *, gpu: Gpu) -> int:
    """The most bytes of the component `logits` held at one time, at any point of the trace."""
    inner = dataclasses.replace(request, choices=sharded.traced_choices(request.choices))
    tape = _trace(_Key(inner), gpu).tape
    live = most = 0
    for segment in tape.segments:
        for event in segment.events:
            block = event if event >= 0 else ~event
            if tape.components[block] == "logits":
                live += tape.sizes[block] if event >= 0 else -tape.sizes[block]
                most = max(most, live)
    return most


def at_rest(request: Request) -> Statics:
    """Weights and states of a request, which do not depend on the batch, the kernels or checkpointing."""
    choices = dataclasses.replace(
        request.choices, checkpointing="none", mlp_tile_tokens=0, kernels="none", attention="sdpa"
    )
    return _held(_Key(dataclasses.replace(request, batch=1, seq=1, masked=False, choices=choices)))


@functools.lru_cache(maxsize=64)
def _held(key: _Key) -> Statics:
    itemsize = weight_itemsize(key.request.choices.precision)
    return statics(key.request, itemsize)


# --- the run ---------------------------------------------------------------------------------------------------------


def _placement(request: Request, model: Statics) -> Placement:
    if sharded.is_sharded(request.choices):
        return sharded.placement(request, model)
    states = state_tensors(request, model.weights)
    return Placement(weights=model.weight_bytes, gradients=0, optimizer=sum(states))


def _run(
    request: Request, gpu: Gpu, model: Statics, place: Placement, evaluation: bool, room: int
) -> tuple[Ledger, list[Tape], int]:
    """Simulates STEPS optimizer steps, a save and, if wanted, an evaluation.

    Returns (ledger, the micro-batches' tapes, host bytes). room: bytes available to the allocator."""
    choices = request.choices
    key = _Key(request)
    first = _trace(key, gpu, evaluating=evaluation)
    tapes = [first.tape] + ([_trace(key, gpu, accumulating=True).tape] if choices.accumulate > 1 else [])
    host_bytes = 0 if choices.zero else managed_bytes(request, model.weights)  # ZeRO's slice: in `place.host`
    if choices.checkpointing == "offload":
        host_bytes += sum(
            deepspeed_host_memory.pinned(nbytes)
            for nbytes, component in zip(first.tape.sizes, first.tape.components, strict=True)
            if component == "checkpoints"
        )
        tapes = [offloaded(tape, leaving=LEAVING) for tape in tapes]
    ledger = Ledger(allocator=CachingAllocator(room))
    _load(ledger, request, model, place)
    ledger.take(place.buffers, "workspace")
    if place.born == "start":
        ledger.take(place.gradients, "gradients")
    for step in range(STEPS):
        ledger.enter("forward")
        if step == 0 and place.gathering is not None:
            # To register a hook on its gradient, stage 3 gathers each weight once: its partition and the whole weight.
            largest = max(weight.nbytes for weight in model.weights)
            ledger.pass_through(largest // choices.gpus, largest, component="weights")
        if step == 0:
            # Two cuBLAS handles: one for the thread that runs the forward pass and one for autograd's.
            for _ in range(2):
                ledger.take(gpu.cublas_workspace_bytes, "workspace")
        gradients = _micro_batches(ledger, request, model, place, tapes)
        ledger.enter("optimizer")
        if step == 0:
            _states(ledger, request, model, place)
        partitioned = choices.zero > 0 or choices.fsdp
        passing = [place.step] if partitioned else step_tensors(request, model.weights)
        if OPTIMIZERS[choices.optimizer].in_backward and _is_tied(request):
            # A tied weight's hook runs while the second gradient, already added to the first, is still held.
            passing = [*passing, sum(weight.grad_bytes for weight in model.weights if weight.embedding)]
        _give(ledger, [[ledger.take(nbytes, "workspace") for nbytes in passing], gradients])
    _save(ledger, choices.gpus, model, place)
    ledger.reserved_bytes = ledger.peak_reserved_bytes
    if evaluation:
        play_evaluation(ledger, first.eval_tape)
    if request.evaluated:
        ledger.reserved_bytes = ledger.peak_reserved_bytes
    return ledger, tapes, host_bytes


def _micro_batches(
    ledger: Ledger, request: Request, model: Statics, place: Placement, tapes: list[Tape]
) -> list[Held | None]:
    """The micro-batches of one step; the third and later ones repeat the second. Returns the gradients they leave."""
    choices = request.choices
    # FSDP2 reduces only in the last micro-batch (accelerate's no_sync), so whole gradients stay until then.
    waits_whole = choices.fsdp and choices.accumulate > 1
    keeps = waits_whole or (place.keeps_gradients and choices.optimizer != "galore-layerwise")
    ledger.pass_through(place.gathered_beside, component="weights", stream=GATHERING)
    moving = [ledger.take(place.gathered, "weights"), ledger.take(place.buckets, "workspace")]
    gathered = Gathered(ledger, place.gathering) if place.gathering is not None else None
    reduced = _reduced(ledger, place, tapes[0])
    update_bytes = sum(step_tensors(request, model.weights)) if OPTIMIZERS[choices.optimizer].in_backward else 0
    gradients: list[Held | None] = []
    for number in range(min(choices.accumulate, 2)):
        gradients += play(
            ledger, tapes[min(number, len(tapes) - 1)], keep_gradients=keeps, tied=_is_tied(request),
            backward_bytes=place.gathered_again, gathered=gathered,
            reduced=reduced if number == 0 else None, update_bytes=update_bytes,
        )  # fmt: skip
    if gathered is not None:
        gathered.close()
    if waits_whole and reduced is not None:
        for held in gradients:
            reduced.add(held.asked if held is not None else 0)
        _give(ledger, [gradients])
        gradients = []
    _give(ledger, [moving])
    return gradients + (reduced.held if reduced is not None else [])


def _save(ledger: Ledger, gpus: int, model: Statics, place: Placement) -> None:
    """The check for finite weights before a save, one weight at a time. The largest weight, or this GPU's shard of it,
    sets the peak."""
    ledger.enter("save")
    largest = max(model.weights, key=lambda weight: weight.numel)
    if largest.nbytes <= place.weights:
        numel = -(-largest.numel // gpus) if place.shard_itemsize else largest.numel
        checked = [numel * (place.shard_itemsize or largest.itemsize), *(numel,) * _FINITE_MASKS]
        _give(ledger, [[ledger.take(nbytes, "workspace") for nbytes in checked]])


LEAVING = 2
"""techniques/host_offload.py: layer inputs that are being copied to the host at one time and still occupy the GPU."""


def _reduced(ledger: Ledger, place: Placement, tape: Tape) -> Reduced | None:
    """Tracks the gradients that reductions leave on this GPU in one step; None if they leave none."""
    if place.born == "start" or not place.gradients:
        return Reduced(ledger, copies=place.copies) if place.copies else None
    made = sum(size for size, component in zip(tape.sizes, tape.components, strict=True) if component == "gradients")
    share = place.gradients / made if place.born == "each" else 0.0
    return Reduced(ledger, place.gradients, share=share, copies=place.copies)


def _load(ledger: Ledger, request: Request, model: Statics, place: Placement) -> None:
    choices, itemsize = request.choices, model.weights[0].itemsize
    divided = weights_are_sharded(choices)
    wider = max(place.loaded_itemsize // itemsize, 1)
    waits_here = fit_whole((wider * weight.nbytes for weight in model.weights), ledger.allocator.limit_bytes)
    if divided and not (place.loaded_itemsize and waits_here):
        if choices.fsdp:
            # Upper bound: one unit comes from the host to be sharded.
            ledger.pass_through(place.gathered, component="weights")
        elif place.loaded_itemsize:
            # DeepSpeed moves all weights before it partitions any.
            ledger.pass_through(*(weight.nbytes for weight in model.weights), component="weights")
        ledger.take(place.weights, "weights")
        return
    loaded = [[ledger.take(wider * nbytes, "weights") for nbytes in weight.tensors] for weight in model.weights]
    ledger.take(model.buffer_bytes, "weights")
    on_host = divided and choices.offload != "none"
    if sharded.is_drawn(request) and _is_tied(request) and not on_host:
        # A model built on the device has a separate lm_head weight until transformers ties it (post_init), and the
        # allocator keeps that block. A model read from files is built without memory.
        ledger.pass_through(math.prod(model.head_shape) * wider * itemsize)
    if choices.fsdp:
        if place.shard_itemsize:  # accelerate's fsdp2_prepare_model holds the whole weights until all are sharded
            for weight in model.weights:
                ledger.take(-(-wider * weight.nbytes // choices.gpus), "weights")
        _give(ledger, loaded)
    elif choices.zero:
        if wider > 1:
            _cast(ledger, model, loaded)
        if divided:
            _give(ledger, loaded)
            ledger.take(place.weights, "weights")
        else:
            _flatten(ledger, model, loaded)


def _cast(ledger: Ledger, model: Statics, loaded: list[list[Held | None]]) -> None:
    """Casts weights to 16 bits one by one if they are wider (DeepSpeed's engine)."""
    for number, weight in enumerate(model.weights):
        before, loaded[number] = loaded[number], [ledger.take(weight.nbytes, "weights")]
        _give(ledger, [before])


def _flatten(ledger: Ledger, model: Statics, loaded: list[list[Held | None]]) -> None:
    """ZeRO 1 and 2: one flat tensor of weights per parameter group of the optimizer (stage_1_and_2.py)."""
    for decays in (True, False):
        group = [number for number, weight in enumerate(model.weights) if (len(weight.shape) >= 2) == decays]
        ledger.allocator.release()
        ledger.take(sum(model.weights[number].nbytes for number in group), "weights")
        _give(ledger, [loaded[number] for number in group])
    ledger.allocator.release()


def _give(ledger: Ledger, groups: Iterable[Iterable[Held | None]]) -> None:
    for group in groups:
        for held in group:
            ledger.give(held)


def _is_tied(request: Request) -> bool:
    return bool(getattr(text_config(request.config), "tie_word_embeddings", False))


def _states(ledger: Ledger, request: Request, model: Statics, place: Placement) -> None:
    tensors = state_tensors(request, model.weights)
    if place.optimizer != sum(tensors):
        tensors = [place.optimizer]
    for nbytes in tensors:
        ledger.take(nbytes, "optimizer")


def _step_s(request: Request, gpu: Gpu, model: Statics, place: Placement, tapes: list[Tape], host_bytes: int) -> float:
    choices = request.choices
    micro_s = roofline.micro_s(tapes[-1], gpu, copied_bytes=place.copied, host_calls=place.host_calls)
    if choices.checkpointing == "offload":
        # Copies overlap with computation, so they cost time only if they take longer.
        micro_s = max(micro_s, 2 * host_bytes / gpu.link_bytes_s)
    grads = sum(weight.grad_bytes for weight in model.trained)
    # Clipping reads the gradients for the norm, then reads and writes them.
    clipping = 3 * grads if request.clipped else 0
    if sharded.is_sharded(choices):
        weights = sum(weight.nbytes for weight in model.trained)
        moved, calls = 2 * (weights // choices.gpus + place.optimizer) + grads, 0
        sm_s = place.step_sm_s
    else:
        moved, calls, sm_s = update_work(request, model.weights)
    waits = OPTIMIZERS[choices.optimizer].step_waits
    update_s = roofline.update_s(moved + clipping, calls, sm_s, gpu, waits=waits)
    link_s = place.link / gpu.link_bytes_s
    # Up to half of the micro-batch hides collectives, except for the embeddings' gradient, which comes last.
    peers_s = max(place.peers_last / gpu.peer_bytes_s, place.peers / gpu.peer_bytes_s - 0.5 * micro_s)
    if choices.offload != "none":
        # The CPU's AdamW moves 7 fp32 values per parameter through host memory.
        numel = sum(weight.numel for weight in model.trained) / choices.gpus
        link_s += 28 * numel / HOST_BYTES_S
        if choices.precision == "amp-fp16":
            link_s += 4 * numel / HOST_OVERFLOW_BYTES_S
    return micro_s * choices.accumulate + update_s + link_s + peers_s


def _notes(request: Request, gpu: Gpu, model: Statics) -> tuple[str, ...]:
    choices = request.choices
    notes = []
    if choices.kernels == "liger":
        notes.append("Liger Kernel 0.8.5: allocations follow its source code; ops inside layers use tigon's timings.")
    if sharded.is_sharded(choices):
        notes.append("Partitions and buckets are computed by formula; only part of their fragmentation is simulated.")
    if choices.fsdp and request.model not in PRESETS:
        whole_gib = choices.gpus * weight_itemsize(choices.precision) * sum(w.numel for w in model.weights) / 2**30
        notes.append(
            f"Each of {choices.gpus} processes reads the whole model to the host before FSDP2 shards it: "
            f"{whole_gib:.0f} GiB of host memory during loading."
        )
    if gpu.source.startswith(("data sheet", "rates of")):
        notes.append(f"Times on {gpu.name} are not measured: {gpu.source}.")
    if choices.offload == "nvme":
        notes.append("The step time does not include the disk: NVMe files are read and written in every step.")
    if choices.quantized:
        notes.append("Weights are stored in NF4, half a byte each, and copied to 16 bits while they are multiplied.")
    return tuple(notes)


def _by_study(request: Request, gpu: Gpu) -> Estimate:
    model = at_rest(request)
    components = closed_form.components(request, model)
    peak_bytes = sum(components.values())
    states = components["weights"] + components["gradients"] + components["optimizer"]
    held = states + components["checkpoints"]
    phases = dict.fromkeys(PHASES, states) | {
        "load": components["weights"],
        "forward": held,
        "loss": peak_bytes,
        "backward": held,
    }
    try:
        traced = _estimate(request, gpu, evaluation=False)
        differences = closed_form.differences(request, dict(traced.components), components)
        host_bytes, nvme_bytes, step_s = traced.host_bytes, traced.nvme_bytes, traced.step_s
    except UsageError as error:  # the model cannot be traced
        differences, host_bytes, nvme_bytes = (str(error),), 0, 0
        step_s = closed_form.step_flops(request, model) / gpu.matmul_flops
    tokens = request.batch * request.seq * request.choices.accumulate * request.choices.gpus
    return Estimate(
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_bytes,
        device_bytes=peak_bytes + outside_bytes(gpu, request.choices),
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        phases=phases,
        peak_phase="loss",
        components=components,
        notes=("The study's formulas omit phases, kernels, fragmentation and temporaries.", *differences),
    )
