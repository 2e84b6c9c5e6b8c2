"""The run's memory over time: by component, with the peak of each phase, and what the allocator reserves for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tigon.planner.simulate.allocator import Block, CachingAllocator, is_small
from tigon.planner.trace.dispatch_recorder import rounded
from tigon.planner.trace.tape import Tape, Where

GATHERING, REDUCING = 1, 2
"""Streams of an engine's, beside the model's own: whole weights are allocated on the one, copies of gradients on the
other."""

COMPONENTS = ("weights", "gradients", "optimizer", "checkpoints", "activations", "logits", "workspace")


@dataclass
class Held:
    """One allocation."""

    asked: int
    """Bytes of the tensor."""
    nbytes: int
    """Bytes of its block."""
    component: str
    block: Block


@dataclass
class Ledger:
    """Allocations as they come; `phases` and `peaks` are what came of them."""

    phase: str = "load"
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    live_bytes: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """The components at each phase's peak."""
    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    reserved_bytes: int = 0
    """What the allocator had reserved when the caller last looked."""

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._note()

    @property
    def peak_reserved_bytes(self) -> int:
        return self.allocator.peak_reserved_bytes

    def take(self, nbytes: int, component: str, *, stream: int = 0) -> Held | None:
        """Allocate; None for nothing."""
        if nbytes <= 0:
            return None
        block = self.allocator.allocate(rounded(nbytes), stream=stream)
        # memory_allocated() counts whole blocks, and up to 1 MiB of a large one may be more than was asked for.
        self.live[component] += block.size
        self.live_bytes += block.size
        if self.live_bytes > self.phases.get(self.phase, -1):
            self._note()
        return Held(nbytes, block.size, component, block)

    def give(self, held: Held | None) -> None:
        if held is None:
            return
        self.live[held.component] -= held.nbytes
        self.live_bytes -= held.nbytes
        self.allocator.free(held.block, small=is_small(held.nbytes))

    def pass_through(self, *sizes: int, component: str = "workspace", stream: int = 0) -> None:
        """Memory that comes, all of it, and goes."""
        for held in [self.take(nbytes, component, stream=stream) for nbytes in sizes]:
            self.give(held)

    def peak(self, *, but: str | None = None) -> tuple[str, int, dict[str, int]]:
        """(phase, bytes, components) of the whole run, or of all of it but one phase."""
        phase = max((name for name in self.phases if name != but), key=lambda name: self.phases[name])
        return phase, self.phases[phase], self.peaks[phase]

    def _note(self) -> None:
        if self.live_bytes > self.phases.get(self.phase, -1):
            self.phases[self.phase] = self.live_bytes
            self.peaks[self.phase] = dict(self.live)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy that an engine makes of each gradient on its way out."""

    share: float
    """Its bytes, in those of the gradient."""
    most_bytes: float = math.inf
    """Of a part at a time."""
    stays: bool = False
    """Until the gradient is out, beside the copies after it."""


@dataclass
class Reduced:
    """Gradients as a collective leaves them on this GPU, until the step."""

    ledger: Ledger
    nbytes: int = 0
    """All at once, with the first."""
    share: float = 0.0
    """Of each one's bytes; 0: all at once."""
    copies: Sequence[Copy] = ()
    """In the order in which they are made."""
    held: list[Held | None] = field(default_factory=list)

    def add(self, gradient_bytes: int) -> None:
        """One more gradient is reduced."""
        if self.share:
            # Not from where it was gathered in FSDP2's source, but so the reserved peaks of medusa-two-gpus.json are
            # nearer: 18% too high at most, else 25%.
            self.held.append(self.ledger.take(int(gradient_bytes * self.share), "gradients", stream=GATHERING))
        elif self.nbytes and not self.held:
            self.held.append(self.ledger.take(self.nbytes, "gradients"))
        stay = []
        for copy in self.copies:
            nbytes = int(min(copy.share * gradient_bytes, copy.most_bytes))
            made = self.ledger.take(nbytes, "gradients", stream=REDUCING)
            if copy.stays:
                stay.append(made)
            else:
                self.ledger.give(made)
        for made in stay:
            self.ledger.give(made)


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Whole weights that ZeRO-3 has on this GPU while forward and backward run: sizes in bytes, of each weight."""

    outside: Sequence[int]
    """Of no layer."""
    layer: Sequence[int]
    """Of one layer, the largest."""
    layers: int
    most_bytes: int
    """No more is fetched ahead."""
    beyond_bytes: int
    """By so much the last that is fetched ahead may exceed it."""
    last: Sequence[int]
    """Those of no layer that are there when the last gradient comes."""
    head_stays: bool
    """Whether the backward keeps all of `outside`. Else the head's module gives them up, and `last` are fetched again
    when the last layer is through."""

    def fitting(self, most_bytes: int, beside: Sequence[int]) -> int:
        """Layers that are there at most, beside others."""
        return min(self.layers, max(0, most_bytes - sum(beside)) // max(sum(self.layer), 1))


@dataclass
class Gathered:
    """The weights of a Gathering, on a stream of their own.

    The forward fetches one layer after another and keeps those there is room for, the backward gives up each that is
    through.
    """

    ledger: Ledger
    plan: Gathering
    outside: list[Held | None] = field(default_factory=list)
    layers: list[list[Held | None]] = field(default_factory=list)

    def enter(self, where: Where) -> None:
        """A segment begins."""
        plan, number = self.plan, 0 if where.layer is None else where.layer + 1
        if where.phase == "forward" or (where.phase == "backward" and number and plan.head_stays):
            fitting = plan.fitting(plan.most_bytes, plan.outside)
            rest = max(plan.most_bytes - sum(plan.outside) - fitting * sum(plan.layer), 0)
            self._have([*plan.outside, rest], min(number or len(self.layers), fitting))
        elif where.phase == "backward" and number == plan.layers:
            self._have([], plan.fitting(plan.most_bytes, []))
        elif where.phase != "loss":
            most_bytes = plan.most_bytes + plan.beyond_bytes
            self._have(plan.last, min(number, plan.fitting(most_bytes, plan.last)))

    def close(self) -> None:
        """The pass is over."""
        self._have([], 0)

    def _have(self, outside: Sequence[int], layers: int) -> None:
        if len(outside) != len(self.outside):
            self._give(self.outside)
        while len(self.layers) > layers:
            self._give(self.layers.pop())
        while len(self.layers) < layers:
            self.layers.append(self._take(self.plan.layer))
        if len(outside) != len(self.outside):
            self.outside = self._take(outside)

    def _take(self, sizes: Sequence[int]) -> list[Held | None]:
        return [self.ledger.take(nbytes, "weights", stream=GATHERING) for nbytes in sizes]

    def _give(self, held: list[Held | None]) -> None:
        while held:
            self.ledger.give(held.pop())


# Places of a tape -> phases of a run.
_PHASES = {"forward": "forward", "loss": "loss", "backward": "backward", "end": "backward"}


def play(
    ledger: Ledger, tape: Tape, *, keep_gradients: bool, tied: bool = False, backward_bytes: int = 0,
    gathered: Gathered | None = None, reduced: Reduced | None = None, update_bytes: int = 0,
) -> list[Held | None]:  # fmt: skip
    """Run a micro-batch's tape; returns its gradients.

    keep_gradients: False where something takes each gradient as soon as it is there: a layer-wise optimizer's step, a
    reduction into a partition. tied: the head's gradient waits for the embedding's all the same.
    backward_bytes: weights that are on the device while the layers' backward runs. gathered: weights that come and go.
    reduced: where the reduction of the gradients that are not kept goes; None: the partition is there already.
    update_bytes: temporaries of an update that takes a gradient.
    """
    gradients: list[Held | None] = []
    held: dict[int, Held | None] = {}
    weights: Held | None = None
    for segment in tape.segments:
        ledger.enter(_PHASES[segment.where.phase])
        if gathered is not None:
            gathered.enter(segment.where)
        if segment.where.phase == "backward" and weights is None:
            weights = ledger.take(backward_bytes, "weights")
        made = []
        for event in segment.events:
            if event >= 0:
                held[event] = ledger.take(tape.sizes[event], tape.components[event])
                if tape.components[event] == "gradients":
                    made.append(event)
            elif ~event in held:
                ledger.give(held.pop(~event))
        waits = tied and segment.where.phase == "loss"
        for block in made:
            if block in held and keep_gradients:
                gradients.append(held.pop(block))
            elif block in held and not waits:
                ledger.pass_through(update_bytes)
                _let_go(ledger, held.pop(block), reduced)
    for block, left in held.items():
        _let_go(ledger, left, reduced if tape.components[block] == "gradients" else None)
    ledger.give(weights)
    return gradients


def _let_go(ledger: Ledger, held: Held | None, reduced: Reduced | None) -> None:
    if reduced is not None and held is not None:
        reduced.add(held.asked)
    ledger.give(held)


def play_evaluation(ledger: Ledger, tape: Tape) -> None:
    """Run an evaluation's tape, all in its own phase."""
    ledger.enter("eval")
    held: dict[int, Held | None] = {}
    for segment in tape.segments:
        for event in segment.events:
            if event >= 0:
                held[event] = ledger.take(tape.sizes[event], tape.components[event])
            else:
                ledger.give(held.pop(~event))
    for left in held.values():
        ledger.give(left)


def offloaded(tape: Tape, *, leaving: int) -> Tape:
    """The tape with each layer's input on the host between its two uses: gone once `leaving` later ones are on their
    way out, and back one layer ahead of its backward (techniques/host_offload.py)."""
    out = Tape(sizes=list(tape.sizes), components=list(tape.components))
    inputs = [block for block, component in enumerate(tape.components) if component == "checkpoints"]
    back: dict[int, int] = {}
    for segment in tape.segments:
        where, events = segment.where, list(segment.events)
        if where.layer is not None and where.phase == "forward":
            gone = where.layer - leaving
            if 0 <= gone < len(inputs) - leaving:
                events.insert(0, ~inputs[gone])
        if where.layer is not None and where.phase == "backward":
            early = []
            if where.layer == len(inputs) - 1:
                early += [~block for block in inputs[-leaving:]]
            for layer in (where.layer, where.layer - 1):
                if 0 <= layer < len(inputs) and inputs[layer] not in back:
                    back[inputs[layer]] = len(out.sizes)
                    out.sizes.append(tape.sizes[inputs[layer]])
                    out.components.append("checkpoints")
                    early.append(back[inputs[layer]])
            events = early + [~back[~e] if e < 0 and ~e in back else e for e in events]
        elif where.phase == "backward":
            events = [~back[~e] if e < 0 and ~e in back else e for e in events]
        placed = type(segment)(Where(*where), events, segment.cost)
        out.segments.append(placed)
    return out
