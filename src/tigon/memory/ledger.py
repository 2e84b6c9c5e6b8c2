"""The run's memory over time: by component, with the peak of each phase, and what the allocator reserves for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tigon.memory.allocator import CachingAllocator, is_small
from tigon.memory.recorder import rounded
from tigon.memory.tape import Tape, Where

COMPONENTS = ("weights", "gradients", "optimizer", "checkpoints", "activations", "logits", "workspace")


@dataclass
class Held:
    """One allocation."""

    nbytes: int
    component: str
    block: object


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

    def take(self, nbytes: int, component: str, *, beside: bool = False) -> Held | None:
        """Allocate; None for nothing. beside: on a collective's stream."""
        if nbytes <= 0:
            return None
        size = rounded(nbytes)
        self.live[component] += size
        self.live_bytes += size
        if self.live_bytes > self.phases.get(self.phase, -1):
            self._note()
        return Held(size, component, self.allocator.allocate(size, aside=beside))

    def give(self, held: Held | None) -> None:
        if held is None:
            return
        self.live[held.component] -= held.nbytes
        self.live_bytes -= held.nbytes
        self.allocator.free(held.block, small=is_small(held.nbytes))  # type: ignore[arg-type]

    def pass_through(self, nbytes: int, component: str = "workspace", *, beside: bool = False) -> None:
        """Memory that comes and goes."""
        self.give(self.take(nbytes, component, beside=beside))

    def cache_beside(self, sizes: Sequence[int]) -> None:
        """Reserve blocks on a collective's stream, allocated by nobody."""
        sizes = [rounded(nbytes) for nbytes in sizes if nbytes > 0]
        blocks = [self.allocator.allocate(size, aside=True) for size in sizes]
        for size, block in zip(sizes, blocks, strict=True):
            self.allocator.free(block, small=is_small(size))

    def peak(self, *, but: str | None = None) -> tuple[str, int, dict[str, int]]:
        """(phase, bytes, components) of the whole run, or of all of it but one phase."""
        phase = max((name for name in self.phases if name != but), key=lambda name: self.phases[name])
        return phase, self.phases[phase], self.peaks[phase]

    def _note(self) -> None:
        if self.live_bytes > self.phases.get(self.phase, -1):
            self.phases[self.phase] = self.live_bytes
            self.peaks[self.phase] = dict(self.live)


@dataclass
class Reduced:
    """Gradients as a collective leaves them on this GPU, until the step."""

    ledger: Ledger
    nbytes: int
    """All at once, with the first."""
    share: float = 0.0
    """Of each one's bytes; 0: all at once."""
    held: list[Held | None] = field(default_factory=list)

    def add(self, gradient_bytes: int) -> None:
        """One more gradient is reduced."""
        if self.share:
            self.held.append(self.ledger.take(int(gradient_bytes * self.share), "gradients", beside=True))
        elif not self.held:
            self.held.append(self.ledger.take(self.nbytes, "gradients"))


# Places of a tape -> phases of a run.
_PHASES = {"forward": "forward", "loss": "loss", "backward": "backward", "end": "backward"}


def play(
    ledger: Ledger, tape: Tape, *, keep_gradients: bool, tied: bool = False, backward_bytes: int = 0,
    reduced: Reduced | None = None, update_bytes: int = 0,
) -> list[Held | None]:  # fmt: skip
    """Run a micro-batch's tape; returns its gradients.

    keep_gradients: False where something takes each gradient as soon as it is there: a layer-wise optimizer's step, a
    reduction into a partition. tied: the head's gradient waits for the embedding's all the same.
    backward_bytes: weights that are on the device while the layers' backward runs. reduced: where the reduction of the
    gradients that are not kept goes; None: the partition is there already. update_bytes: temporaries of an update that
    takes a gradient.
    """
    gradients: list[Held | None] = []
    held: dict[int, Held | None] = {}
    weights: Held | None = None
    for segment in tape.segments:
        ledger.enter(_PHASES[segment.where.phase])
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
                ledger.pass_through(update_bytes, "workspace")
                _let_go(ledger, held.pop(block), reduced)
    for block, left in held.items():
        _let_go(ledger, left, reduced if tape.components[block] == "gradients" else None)
    ledger.give(weights)
    return gradients


def _let_go(ledger: Ledger, held: Held | None, reduced: Reduced | None) -> None:
    if reduced is not None and held is not None:
        reduced.add(held.nbytes)
    ledger.give(held)


def play_evaluation(ledger: Ledger, tape: Tape) -> None:
    """Run an evaluation's tape, all in its own phase."""
    ledger.enter("eval")
    held: dict[int, Held | None] = {}
    for segment in tape.segments:
        for event in segment.events:
            if event >= 0:
                component = "logits" if segment.where.phase == "loss" else tape.components[event]
                held[event] = ledger.take(tape.sizes[event], component)
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
