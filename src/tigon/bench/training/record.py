"""The record of `tigon bench train`: JSON with the machine, the versions, the ceilings and one entry per case.

Times are in milliseconds and memory in bytes. `null` means "not measured", and the entry says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tigon._files import read_text
from tigon.bench import record as records
from tigon.bench.timing import Spread
from tigon.errors import BenchError

KIND, SCHEMA = "training steps", 1
OVER = "over the limit"
_PACKAGES = ("trl", "accelerate")


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
class TrainRecord:
    """One run of the command, with the runs that resumed it."""

    environment: dict[str, Any]
    """Environment of the last run."""
    ceilings: dict[str, float]
    rounds: int
    steps: int
    """Timed steps of each variant in a round."""
    cases: list[CaseRecord] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kind: str = KIND
    schema: int = SCHEMA


def environment(device: torch.device) -> dict[str, Any]:
    """That of the kernel benchmark, with the versions of the packages that only training steps use."""
    return records.environment(device, _PACKAGES)


def is_train_record(path: Path) -> bool:
    """Whether the file is a record of training steps, of any schema."""
    try:
        raw = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("kind") == KIND


def load(path: Path) -> TrainRecord:
    """Read a record. Raises BenchError if it is not one."""
    try:
        raw = json.loads(read_text(path))
        if raw["kind"] != KIND or raw["schema"] != SCHEMA:
            raise BenchError(
                f"{path} has kind {raw['kind']}, schema {raw['schema']}; this tigon reads {KIND}, {SCHEMA}."
            )
        cases = [_case(case) for case in raw.pop("cases")]
        return TrainRecord(**raw, cases=cases)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BenchError(f"{path} is not a record of `tigon bench train --json`: {error}.") from None


def resumed(run: TrainRecord, path: Path) -> list[CaseRecord]:
    """The cases of the record at `path`; empty if the file does not exist.

    Raises BenchError if the record has another card, other versions or numbers of rounds and steps.
    """
    if not path.exists():
        return []
    earlier = load(path)
    there, here = earlier.environment, run.environment
    for what, was, now in (
        *((name, there.get(name), here[name]) for name in ("device", "driver", "threads", "versions")),
        ("rounds", earlier.rounds, run.rounds),
        ("steps", earlier.steps, run.steps),
    ):
        if was != now:
            raise BenchError(f"{path} has {what} {was}, this run {now}; leave out --resume, or write another file.")
    return earlier.cases


def _case(raw: dict[str, Any]) -> CaseRecord:
    measurements = [_measurement(m) for m in raw.pop("measurements")]
    return CaseRecord(**raw, measurements=measurements)


def _measurement(raw: dict[str, Any]) -> StepMeasurement:
    spread = raw.pop("step_ms")
    return StepMeasurement(**raw, step_ms=None if spread is None else Spread(**spread))
