"""Memory of a run over time: bytes by component, the peak of each phase, and the allocator's reserved bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tigon.planner.simulate.allocator import Block, CachingAllocator, is_small

COMPONENTS = ("weights", "gradients", "optimizer", "checkpoints", "activations", "logits", "workspace")


@dataclass(eq=False, slots=True)
class Allocation:
    """A tensor in the simulated memory."""

    tensor_bytes: int
    block_bytes: int
    component: str
    block: Block


@dataclass
class Ledger:
    """Counts allocations and frees, and keeps the peak of each phase in `phases` and `peaks`."""

    phase: str = "load"
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    live_bytes: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    """The most bytes of each phase."""
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """The components at each phase's peak."""
    allocator: CachingAllocator = field(default_factory=CachingAllocator)

    def enter(self, phase: str) -> None:
        """Start a phase."""
        self.phase = phase
        self._note_peak()

    def alloc(self, nbytes: int, component: str, *, stream: int = 0) -> Allocation | None:
        """Allocate a tensor. Returns None for 0 bytes."""
        if nbytes <= 0:
            return None
        block = self.allocator.allocate(nbytes, stream=stream)
        # memory_allocated() counts whole blocks. A large block may be up to 1 MiB larger than the request.
        self.live[component] += block.size
        self.live_bytes += block.size
        if self.live_bytes > self.phases.get(self.phase, -1):
            self._note_peak()
        return Allocation(nbytes, block.size, component, block)

    def free(self, allocation: Allocation | None) -> None:
        """Free a tensor; None is ignored."""
        if allocation is None:
            return
        self.live[allocation.component] -= allocation.block_bytes
        self.live_bytes -= allocation.block_bytes
        self.allocator.free(allocation.block, small=is_small(allocation.block_bytes))

    def free_all(self, allocations: Iterable[Allocation | None]) -> None:
        """Free several tensors in order."""
        for allocation in allocations:
            self.free(allocation)

    def alloc_briefly(self, *sizes: int, component: str = "workspace", stream: int = 0) -> None:
        """Allocate tensors of these sizes at the same time, then free them all."""
        self.free_all([self.alloc(nbytes, component, stream=stream) for nbytes in sizes])

    def peak(self, *, except_phase: str | None = None) -> tuple[str, int, dict[str, int]]:
        """Returns (phase, bytes, components) at the peak of the run. `except_phase` does not count."""
        phase = max((name for name in self.phases if name != except_phase), key=lambda name: self.phases[name])
        return phase, self.phases[phase], self.peaks[phase]

    def _note_peak(self) -> None:
        if self.live_bytes > self.phases.get(self.phase, -1):
            self.phases[self.phase] = self.live_bytes
            self.peaks[self.phase] = dict(self.live)
