"""The record of `tigon bench train`: JSON with the machine, the versions, the ceilings and one entry per case.

Times are in milliseconds and memory in bytes. `null` means "not measured", and the entry says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tigon.bench.record import Record
from tigon.bench.timing import Spread

OVER = "over the limit"
MOST_OF_A_STEP = 1.05
"""The kernels of a profiled step may take this much of a step without the profiler. Steps differ by 1 or 2 %."""


@dataclass(kw_only=True)
class StepMeasurement:
    """One variant of a case."""

    variant: str
    code: str
    status: str = "ok"
    """ok, over the limit (measured, but its peak exceeds the case's memory limit), not installed, not supported, out of
    memory, does not fit (no micro-batch fits the limit), or failed."""
    detail: str = ""
    recomputed: str | None = None
    """The backward pass recomputes this: the variant's own value, or the choice of `auto`."""
    micro_batch: int | None = None
    step_ms: Spread | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    """The most that PyTorch's allocator had allocated in the timed steps, weights and optimizer included."""
    products_share: float | None = None
    """The rate of the step's FLOPs, without recomputation, over the rate of a large matrix product."""
    kinds_ms: dict[str, float | None] | None = None
    """Time of one profiled step by kind; see time_by_kind.py."""
    predicted: dict[str, float] | None = None
    """The planner's `peak_bytes` and `step_ms`."""
    losses: list[list[float]] = field(default_factory=list)
    """The loss of each step, for each turn. All turns start from the same weights."""
    prepare_s: float = 0.0
    """Seconds before timing: planning, patching, compilation, and the search for a micro-batch."""

    @property
    def split_ms(self) -> dict[str, float | None] | None:
        """`kinds_ms`, or None if it exceeds the step, because the profiler then counted a wait as a kernel."""
        if self.kinds_ms is None or self.step_ms is None or self.kinds_ms.get("idle") is None:
            return self.kinds_ms  # not measured, or operators on a CPU, which the profiler prolongs
        whole_ms = sum(time_ms or 0.0 for time_ms in self.kinds_ms.values())
        return self.kinds_ms if whole_ms <= MOST_OF_A_STEP * self.step_ms.median else None


@dataclass(kw_only=True)
class CaseRecord:
    """One case with its variants, all measured in one process."""

    id: str
    model: str
    batch: int
    seq: int
    precision: str
    limit_bytes: int | None
    """The memory limit of `fits` and `auto`."""
    flops: int | None
    """FLOPs of a step, without recomputation."""
    tigon_commit: str | None = None
    date: str | None = None
    command: str = ""
    seconds: float = 0.0
    measurements: list[StepMeasurement] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


@dataclass(kw_only=True)
class TrainRecord(Record):
    """The record of `tigon bench train`."""

    kind: str = "training steps"
    rounds: int
    steps: int
    """Timed steps of each variant in a round."""
    cases: list[CaseRecord] = field(default_factory=list)

    SAME: ClassVar = ("rounds", "steps")
