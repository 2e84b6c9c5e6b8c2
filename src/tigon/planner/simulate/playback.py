"""Plays a tape into a ledger: each recorded allocation and free, and what an engine does between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tigon.planner.simulate.collectives import GatheredWeights, ReducedGradients
from tigon.planner.simulate.ledger import Allocation, Ledger
from tigon.planner.trace.tape import Tape, TapeSegment, Where
from tigon.techniques.checkpointing.host_offload import LARGE_BYTES

GRAPH_CALLS = 15
"""A layer's pass as a CUDA graph takes about as much CPU time as this many operators: an autograd function and copies.
Assumed, not fitted: 4 x 1024 tokens of Llama-3.2-1B in graphs are bound by an H100, which any smaller number gives."""

# The phase of a tape's segment -> the phase of the run.
_PHASES = {"forward": "forward", "loss": "loss", "backward": "backward", "end": "backward"}


@dataclass(frozen=True, kw_only=True)
class GradientRules:
    """What happens to each gradient of a micro-batch when it is computed."""

    keep: bool
    """True: every gradient stays until the step. False: a layer-wise optimizer's update or a reduction frees each."""
    tied: bool = False
    """The head's gradient waits for the embedding's gradient, even if gradients are not kept."""
    reduced: ReducedGradients | None = None
    """Receives the gradients that are not kept; None: their partition is already allocated."""
    update_bytes: int = 0
    """Temporaries of an update that uses up one gradient."""


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """The gathered weights that the GPU holds in each stage of a micro-batch, as `GatheredSizes` describes them."""

    forward: int = 0
    loss: int = 0
    loss_backward: int = 0
    backward: int = 0
    first_layer: int = 0
    last: int = 0
    entering: int = 0


class _Stages:
    """Holds the gathered weights of the stage that a segment belongs to."""

    def __init__(self, ledger: Ledger, tape: Tape, sizes: StageBytes) -> None:
        self._ledger, self._sizes = ledger, sizes
        losses = [number for number, segment in enumerate(tape.segments) if segment.where.phase == "loss"]
        self._differentiated = losses[-1] if losses else -1
        """The last segment of the loss begins with its backward pass."""
        self._passed_layers = False
        self.stage = "forward"
        self._weights = ledger.alloc(sizes.forward, "weights")

    def enter(self, number: int, where: Where) -> None:
        stage = self._stage_of(number, where)
        if stage != self.stage:
            self.free()
            self.stage, self._weights = stage, self._ledger.alloc(getattr(self._sizes, stage), "weights")
        if (stage == "forward" and where.layer is not None) or stage == "loss":
            self._ledger.alloc_briefly(self._sizes.entering, component="weights")

    def _stage_of(self, number: int, where: Where) -> str:
        if self.stage in ("forward", "loss", "loss_backward") and where.phase != "backward":
            if where.phase == "end":
                return self.stage
            return "loss_backward" if number == self._differentiated else where.phase
        if self.stage == "last" or (self._passed_layers and where.layer is None):
            return "last"
        self._passed_layers = self._passed_layers or where.layer is not None
        return "first_layer" if where.layer == 0 else "backward"

    def free(self) -> None:
        self._ledger.free(self._weights)
        self._weights = None


def replay(
    ledger: Ledger,
    tape: Tape,
    rules: GradientRules,
    *,
    gathered: GatheredWeights | None = None,
    gathered_bytes: StageBytes = StageBytes(),
) -> list[Allocation | None]:
    """Simulates one micro-batch and returns the gradients that it leaves.

    gathered: weights that are gathered and freed layer by layer. gathered_bytes: those that the GPU holds in each
    stage.
    """
    left: list[Allocation | None] = []
    live: dict[int, Allocation | None] = {}
    stages = _Stages(ledger, tape, gathered_bytes)
    for number, segment in enumerate(tape.segments):
        ledger.enter(_PHASES[segment.where.phase])
        if gathered is not None:
            gathered.enter(segment.where)
        stages.enter(number, segment.where)
        gradients = _play_segment(ledger, tape, segment, live)
        waits = rules.tied and segment.where.phase == "loss"
        for block in gradients:
            if rules.keep:
                left.append(live.pop(block))
            elif not waits:
                ledger.alloc_briefly(rules.update_bytes)
                if stages.stage == "last":
                    stages.free()  # the last reduction waits for the one before, and its weights are no longer needed
                _reduce_and_free(ledger, live.pop(block), rules.reduced)
    for block, allocation in live.items():
        _reduce_and_free(ledger, allocation, rules.reduced if tape.components[block] == "gradients" else None)
    stages.free()
    return left


def _play_segment(ledger: Ledger, tape: Tape, segment: TapeSegment, live: dict[int, Allocation | None]) -> list[int]:
    """Updates `live` (block -> its allocation); returns the blocks of gradients that the segment leaves."""
    gradients = []
    for event in segment.events:
        if event >= 0:
            live[event] = ledger.alloc(tape.sizes[event], tape.components[event])
            if tape.components[event] == "gradients":
                gradients.append(event)
        elif ~event in live:
            ledger.free(live.pop(~event))
    return [block for block in gradients if block in live]


def _reduce_and_free(ledger: Ledger, gradient: Allocation | None, reduced: ReducedGradients | None) -> None:
    if reduced is not None and gradient is not None:
        reduced.add(gradient.tensor_bytes)
    ledger.free(gradient)


def replay_evaluation(ledger: Ledger, tape: Tape) -> None:
    """Simulates an evaluation batch, all of it in the phase `eval`."""
    ledger.enter("eval")
    live: dict[int, Allocation | None] = {}
    for segment in tape.segments:
        _play_segment(ledger, tape, segment, live)
    ledger.free_all(live.values())


def offloaded(tape: Tape, *, leaving: int, first_stays: bool) -> Tape:
    """The tape with each layer's input on the host between its two uses (techniques/checkpointing/host_offload.py).

    An input leaves the GPU when `leaving` later inputs are being copied out. It returns one layer ahead of its backward
    pass, or with it from `LARGE_BYTES` on.

    first_stays: With frozen embeddings the input of the first layer is a leaf of autograd's graph, which holds it.
    """
    out = Tape(sizes=list(tape.sizes), components=list(tape.components))
    inputs = [block for block, component in enumerate(tape.components) if component == "checkpoints"]
    stays = set(inputs[:1]) if first_stays else set()
    returned: dict[int, int] = {block: block for block in stays}  # an input's block -> the block it returns to
    for segment in tape.segments:
        where, events = segment.where, list(segment.events)
        if where.layer is not None and where.phase == "forward":
            gone = where.layer - leaving
            if 0 <= gone < len(inputs) - leaving and inputs[gone] not in stays:
                events.insert(0, ~inputs[gone])
        if where.phase == "backward":
            early = [] if where.layer is None else _returns(out, inputs, returned, where.layer, leaving)
            events = early + [~returned[~e] if e < 0 and ~e in returned else e for e in events]
        out.segments.append(TapeSegment(Where(*where), events, segment.cost))
    return out


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """The bytes that CUDA graphs of the layers hold between steps (techniques/cuda_graphs/layer_graphs.py)."""

    gradients: int
    activations: int
    """The activations of layers that are not recomputed."""
    buffers: int
    """The input of the first layer or of all layers, its copy, and the gradient of the output."""
    pool: int
    """Memory that the graphs share. PyTorch counts it as reserved and not as allocated."""


def in_graphs(tape: Tape, *, recomputes: bool) -> tuple[Tape, GraphMemory]:
    """The tape without what the layers' graphs hold, and what they hold.

    A block that only one layer uses is in its graphs. The others, such as the layers' inputs, stay in the tape. The CPU
    launches a layer's pass as one graph.
    """
    places = [_Uses() for _ in tape.sizes]
    for segment in tape.segments:
        for event in segment.events:
            uses = places[event if event >= 0 else ~event]
            uses.layers.add(segment.where.layer)
            uses.phases.add(segment.where.phase)
    moved, kept_bytes, gradient_bytes = set(), 0, 0
    for block, (uses, nbytes, component) in enumerate(zip(places, tape.sizes, tape.components, strict=True)):
        of_layer = None not in uses.layers and len(uses.layers) == 1
        if component == "gradients" and None not in uses.layers:
            moved.add(block)
            gradient_bytes += nbytes
        elif of_layer and component != "checkpoints":
            moved.add(block)
            kept_bytes += nbytes if len(uses.phases) == 2 else 0
    inputs = (size for size, kind in zip(tape.sizes, tape.components, strict=True) if kind == "checkpoints")
    hidden_bytes = max(inputs, default=_hidden_bytes(tape, places))
    out = Tape(sizes=list(tape.sizes), components=list(tape.components))
    pool = live = 0
    for segment in tape.segments:
        for event in segment.events:
            block = event if event >= 0 else ~event
            if block in moved and len(places[block].phases) == 1:
                live += tape.sizes[block] if event >= 0 else -tape.sizes[block]
                pool = max(pool, live)
        events = [event for event in segment.events if (event if event >= 0 else ~event) not in moved]
        cost = segment.cost if segment.where.layer is None else replace(segment.cost, host_calls=GRAPH_CALLS)
        out.segments.append(TapeSegment(Where(*segment.where), events, cost))
        live = 0
    activations = 0 if recomputes else kept_bytes
    return out, GraphMemory(gradients=gradient_bytes, activations=activations, buffers=3 * hidden_bytes, pool=pool)


class _Uses:
    """The places in which a block is allocated and freed."""

    def __init__(self) -> None:
        self.layers: set[int | None] = set()
        self.phases: set[str] = set()


def _hidden_bytes(tape: Tape, places: list[_Uses]) -> int:
    """The bytes of a layer's input in a tape without checkpoints: the largest block that passes from layer to layer."""
    passed = (size for size, uses in zip(tape.sizes, places, strict=True) if len(uses.layers - {None}) == 2)
    return max(passed, default=0)


def _returns(out: Tape, inputs: list[int], returned: dict[int, int], layer: int, leaving: int) -> list[int]:
    """Events at the start of a layer's backward pass: inputs that still leave, and inputs that return for this layer
    and the next one. Adds the new blocks to `out` and `returned`."""
    waiting = [block for block in inputs[-leaving:] if block not in returned]
    events = [~block for block in waiting] if layer == len(inputs) - 1 else []
    ahead = (layer, layer - 1) if out.sizes[inputs[0]] < LARGE_BYTES else (layer,)
    for number in ahead:
        if 0 <= number < len(inputs) and inputs[number] not in returned:
            returned[inputs[number]] = len(out.sizes)
            events.append(len(out.sizes))
            out.sizes.append(out.sizes[inputs[number]])
            out.components.append("checkpoints")
    return events
