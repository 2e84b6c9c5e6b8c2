"""Assembles a timeline from a recording and its journal, and gives every block a category.

The journal tags known tensors: parameters and buffers, `.grad`, optimizer states, inputs of checkpointed layers. Other
blocks get their category from the allocating frames, if these are listed below, and otherwise from the phase:

- forward: activations, also in a recomputation;
- between `lm_head` and loss: logits;
- the rest of backward: workspace.

Blocks at rest: a block from loading that is never freed counts as weights, and a block from an update that outlives the
update counts as optimizer states. Any other block that is never freed is workspace (cuBLAS's).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tigon.profiler.recording.journal import Enter, Journal, Node, Recording, Tag
from tigon.profiler.timeline.timeline import PHASES, Call, Phase, Timeline

# Parts of frames or node names that give a category in any phase. They cover a loss computed outside the head's phase,
# layer inputs that return from the host, and weights that ZeRO-3 has gathered.
_BY_FRAME = (
    ("tigon/ops/head/cross_entropy.py:", "logits"),
    ("tigon/ops/head/divided_cross_entropy.py:", "logits"),
    ("tigon/ops/head/divergence.py:", "logits"),
    ("tigon/ops/head/logprobs.py:", "logits"),
    ("tigon/ops/losses/cross_entropy.py:", "logits"),
    ("tigon/ops/losses/logprobs.py:", "logits"),
    ("transformers/loss/", "logits"),
    ("tigon/techniques/checkpointing/host_offload.py:", "checkpoints"),
    ("zero/partition_parameters.py:", "weights"),
)
_BY_NODE = (("LogSoftmax", "logits"), ("NllLoss", "logits"), ("CrossEntropy", "logits"))


@dataclass
class _Block:
    nbytes: int
    call: Call
    phase: int
    category: str | None = None
    died: int | None = None
    """The phase in which it was freed."""


def assemble(recording: Recording, journal: Journal, label: str) -> Timeline:
    """Assemble the timeline. label: the run's name on the page."""
    return _Assembly(recording, journal).run(label)


@dataclass
class _Assembly:
    recording: Recording
    journal: Journal
    blocks: list[_Block] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """Address -> block."""
    entered: list[tuple[Enter, int]] = field(default_factory=list)
    """Phases, each with its first event."""
    node: str = ""

    def run(self, label: str) -> Timeline:
        raw = self.recording.events
        begin_ns = raw[0].time_ns if raw else 0
        entries = iter(self.journal.entries)
        following = next(entries, None)
        if self.recording.base_bytes:
            self._born(0, self.recording.base_bytes, Call("before the recording"), begin_ns)
        for i in range(len(raw) + 1):
            now_ns = raw[min(i, len(raw) - 1)].time_ns if raw else 0
            while following is not None and self.recording.positions[following.position] <= i:
                self._enter(following, now_ns)
                following = next(entries, None)
            if i < len(raw):
                event = raw[i]
                if event.nbytes > 0:
                    call = event.call
                    if self.node and not call.node:
                        call = Call(call.op, self.node, call.frames)
                    self._born(event.address, event.nbytes, call, event.time_ns)
                elif event.address in self.alive:
                    self._dies(event.address, event.time_ns)
        return self._timeline(label, begin_ns)

    def _enter(self, entry: Enter | Tag | Node, now_ns: int) -> None:
        if isinstance(entry, Enter):
            self.entered.append((entry, len(self.events)))
            if entry.name != "loss" and entry.name != "backward":
                self.node = ""
        elif isinstance(entry, Node):
            self.node = entry.name
        else:
            if entry.address not in self.alive:
                if entry.category not in ("weights", "optimizer"):
                    return  # made before the recording
                # at rest, but not from the allocator: weights in a memory-mapped file
                self._born(entry.address, entry.nbytes, Call("mapped from a file, or made elsewhere"), now_ns)
            block = self.blocks[self.alive[entry.address]]
            block.category = block.category or entry.category

    def _born(self, address: int, nbytes: int, call: Call, time_ns: int) -> None:
        self.alive[address] = len(self.blocks)
        self.events.append(len(self.blocks))
        self.times_ns.append(time_ns)
        self.blocks.append(_Block(nbytes, call, max(0, len(self.entered) - 1)))

    def _dies(self, address: int, time_ns: int) -> None:
        number = self.alive.pop(address)
        self.blocks[number].died = len(self.entered) - 1
        self.events.append(~number)
        self.times_ns.append(time_ns)

    def _timeline(self, label: str, begin_ns: int) -> Timeline:
        numbers: dict[Call, int] = {}
        calls = [numbers.setdefault(block.call, len(numbers)) for block in self.blocks]
        return Timeline(
            label=label,
            device=self.recording.device,
            events=self.events,
            times_ms=[round((time_ns - begin_ns) / 1e6, 4) for time_ns in self.times_ns],
            sizes=[block.nbytes for block in self.blocks],
            categories=[block.category or self._category(block) for block in self.blocks],
            calls=calls,
            call_table=list(numbers),
            phases=self._phases(),
            allocator_peak_bytes=self.recording.allocator_peak_bytes,
            notes=self.recording.notes,
        )

    def _phases(self) -> list[Phase]:
        ends = [start for _, start in self.entered[1:]] + [len(self.events)]
        return [
            Phase(entry.name, entry.step, entry.layer, entry.recomputed, start, end)
            for (entry, start), end in zip(self.entered, ends, strict=True)
        ]

    def _category(self, block: _Block) -> str:
        """The category of a block that no known tensor of the model or the optimizer is in."""
        entry = self.entered[block.phase][0]
        assert entry.name in PHASES, entry.name
        if entry.name == "load":
            return "weights" if block.died is None else "workspace"
        if entry.name == "optimizer":
            return "optimizer" if self._outlives(block) else "workspace"
        for part, category in _BY_FRAME:
            if any(part in frame for frame in block.call.frames):
                return category
        for part, category in _BY_NODE:
            if part in block.call.node:
                return category
        if block.died is None:
            return "workspace"
        if entry.name == "loss":
            return "logits"
        return "activations" if entry.name == "forward" or entry.recomputed else "workspace"

    def _outlives(self, block: _Block) -> bool:
        """Whether the block is alive when its phase ends."""
        return block.died is None or block.died > block.phase
