"""The cases: every combination of model, batch, sequence length, number format and memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tigon.errors import OptionError
from tigon.planner.gpus import find_gpu

WEIGHTS = {"bf16": torch.bfloat16, "amp-bf16": torch.float32, "fp32": torch.float32}
"""Number format -> dtype of weights, gradients and optimizer states, as `train.precision`. amp-bf16 adds autocast."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to measure. The optimizer is AdamW, and gradients are clipped."""

    model: str
    batch: int
    """Samples per optimizer step."""
    seq: int
    precision: str
    memory: str | None
    """The memory limit as typed; None: the device's own memory."""

    @property
    def id(self) -> str:
        within = "" if self.memory is None else f" within {self.memory}"
        return f"{self.model} {self.batch}x{self.seq} {self.precision}{within}"

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def limit_bytes(self) -> int | None:
        return None if self.memory is None else find_gpu(self.memory).memory_bytes

    def micro_batches(self) -> list[int]:
        """The micro-batches that divide the batch, largest first."""
        return [size for size in range(self.batch, 0, -1) if self.batch % size == 0]


def select(
    models: Sequence[str],
    batches: Sequence[int],
    seqs: Sequence[int],
    precisions: Sequence[str],
    memories: Sequence[str],
    *,
    gpu: bool,
) -> list[Case]:
    """Every combination of the values; an empty list stands for the default.

    gpu: whether the default is Llama-3.2-1B at 64 x 1024 tokens in bf16, or the small model at 4 x 64 in fp32.

    Raises:
        OptionError: a value is out of range or unknown.
        UsageError: a memory limit is neither a size of at least 1 GiB nor the name of a GPU.
    """
    for name, least, values in (("--batch", 1, batches), ("--seq", 8, seqs)):
        if values and min(values) < least:
            raise OptionError(f"{name} {min(values)} must be at least {least}.")
    for precision in precisions:
        if precision not in WEIGHTS:
            raise OptionError(f"--precision {precision} is not known; choose one of {', '.join(WEIGHTS)}.")
    for memory in memories:
        find_gpu(memory)
    model, batch, seq, precision = ("llama-3.2-1b", 64, 1024, "bf16") if gpu else ("tigon-demo", 4, 64, "fp32")
    limits: Sequence[str | None] = memories or [None]
    combinations = itertools.product(
        models or [model], batches or [batch], seqs or [seq], precisions or [precision], limits
    )
    return [
        Case(model=model, batch=batch, seq=seq, precision=precision, memory=memory)
        for model, batch, seq, precision, memory in dict.fromkeys(combinations)
    ]
