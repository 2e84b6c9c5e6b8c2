"""Repeats a few training steps with different kernels, and measures loss, peak memory and tokens/s.

Seed, weights and samples are the same. Each repeat is a whole Trainer run, as a user runs it. The kernels
take turns, the second turn in reverse order, so that another program's load on the machine meets all of them. Single
steps in turns would be fairer still, but would hold all models in memory at once.

Memory is measured in the last step of the first turn. The speed leaves out that step, because recording allocations on
the CPU costs time, and each turn's first step, which warms up.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from tigon.profiler.recording.peak import Peak
from tigon.trainer import trainer as trainers
from tigon.trainer.distributed.signals import StopRequest
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.measuring.timed_run import MeteredSteps, StepMeter
from tigon.trainer.prepare import Prepared
from tigon.trainer.setup import Setup, TrainingData

LABELS = {
    "none": "unpatched",
    "no-flce": "all but linear cross entropy",
    "tigon": "all of tigon",
    "liger": "Liger Kernel",
}
STOPPED = "stopped by a signal"
TURNS = 3
"""How often each choice of kernels repeats the steps."""


@dataclass
class Repeat:
    """The turns of one choice of kernels."""

    kernels: str
    n_tokens: int
    """Tokens of a step."""
    losses: tuple[float, ...] = ()
    """The loss of each step of the first turn, in nats per token."""
    peak: Peak | None = None
    """That of the first turn's last step."""
    warm_s: list[float] = field(default_factory=list)
    """The times of the first steps, for repeats that have no other timed step."""
    timed_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the first turn."""
        return self.error is None and self.peak is None

    def add(self, turn: _Turn, steps: int) -> None:
        """Add a turn of so many steps, unless a signal has ended it early."""
        if len(turn.meter.step_s) + (turn.peak is not None) < steps:
            return
        self.warm_s.append(turn.meter.step_s[0])
        self.timed_s += turn.meter.step_s[1:]
        if turn.peak is not None:
            self.losses, self.peak = tuple(turn.losses), turn.peak

    def as_mapping(self) -> dict[str, Any]:
        """The row of the run's summary. tokens_per_s: the median; its range: the slowest and the fastest step."""
        row = {"label": LABELS[self.kernels], "kernels": self.kernels}
        if self.error is not None or self.peak is None:
            return {**row, "losses": (), "timed_steps": 0, "error": self.error or STOPPED}
        times = self.timed_s or self.warm_s
        return {
            **row,
            "losses": self.losses,
            "at_rest_bytes": self.peak.at_rest_bytes,
            "peak_bytes": self.peak.peak_bytes,
            "tokens_per_s": self.n_tokens / statistics.median(times),
            "tokens_per_s_range": (self.n_tokens / max(times), self.n_tokens / min(times)),
            "timed_steps": len(times),
            "error": None,
        }


class _Turn(MeteredSteps):
    """The steps of one choice of kernels in one turn, which a signal ends."""

    def __init__(self, trainer: GuardedTrainer, metered_step: int | None, stop: StopRequest) -> None:
        super().__init__(StepMeter(trainer.args.device), trainer, metered_step)
        self._stop = stop

    def on_step_end(self, args: object, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if self._stop.number:
            control.should_training_stop = True


def compare(
    prepared: Prepared, build: Callable[[str], nn.Module], run: Path, announce: Callable[[str], None], stop: StopRequest
) -> list[Repeat]:
    """Repeat the same steps with each of the recipe's `comparison.kernels`.

    Running out of memory, or a signal in the first turn, ends a repeat with an `error` instead of an exception. A
    signal in a later turn leaves the figures of the complete turns.

    Args:
        prepared: The run.
        build: Makes the model for one of the kernels.
        run: The run folder.
        announce: Called with a line before each turn.
        stop: Receives signals.

    Returns:
        A Repeat for each of the kernels.
    """
    kernels, setup, device = prepared.recipe.comparison.kernels, _short(prepared), prepared.device
    train, data = setup.recipe.train, replace(prepared.training_data, eval=None)
    assert train.steps is not None
    # Samples of unpacked rows differ in length. Every choice takes the same samples, so their mean compares fairly.
    samples = prepared.train.samples
    mean = sum(len(sample.tokens_T) for sample in samples) / len(samples)
    n_tokens = round(train.samples_per_step * mean)
    measured = {choice: Repeat(choice, n_tokens) for choice in kernels}
    _release(device)
    for turn in range(TURNS):
        left = [choice for choice in kernels if measured[choice].error is None]
        if left and not stop.number:
            names = ", ".join(LABELS[choice] for choice in left)
            announce(f"comparison: turn {turn + 1} of {TURNS}, {train.steps} steps each: {names}")
        for choice in left if turn % 2 == 0 else reversed(left):
            if stop.number:
                break
            try:
                metered_step = train.steps - 1 if turn == 0 else None
                measured[choice].add(_train(setup, build(choice), data, run, metered_step, stop), train.steps)
            except torch.OutOfMemoryError:
                measured[choice].error = "out of memory"
            _release(device)
    return list(measured.values())


def _short(prepared: Prepared) -> Setup:
    """The run with the steps and the micro-batch of the comparison, of which each step is recorded."""
    train, options = prepared.recipe.train, prepared.recipe.comparison
    batch_size = options.batch_size or train.batch_size
    return prepared.with_train(replace(train.shortened(options.steps), batch_size=batch_size, log_steps=1))


def _train(
    setup: Setup, model: nn.Module, data: TrainingData, run: Path, metered_step: int | None, stop: StopRequest
) -> _Turn:
    """Train one turn. The model is freed when this function ends, also if it runs out of memory."""
    trainer = trainers.make(setup, model, data, run)
    turn = _Turn(trainer, metered_step, stop)
    trainer.add_callback(turn)
    try:
        trainer.train()
    finally:
        turn.stop()
    return turn


def _release(device: torch.device) -> None:
    """Free a model before the next one is built. The Trainer has reference cycles, so this needs gc.collect()."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
