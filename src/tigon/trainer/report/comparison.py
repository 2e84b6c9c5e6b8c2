"""Repeats a few training steps with different kernels, and measures loss, peak memory and tokens/s.

Seed, weights and samples are the same. Each repeat is a whole Trainer run, as a user runs it. Memory is measured in the
last step. The speed leaves out the last step, because recording allocations on the CPU costs time, and the first step,
which warms up.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tigon.data.packing import Collator, SampleDataset
from tigon.objectives.base import Objective
from tigon.profiler.recording.peak import Peak, PeakMeter, training_state
from tigon.recipe.keys import TrainConfig
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.technique import RunInfo
from tigon.trainer import trainer as trainers
from tigon.trainer.distributed.signals import StopRequest
from tigon.trainer.engine import make_optimizer
from tigon.trainer.guarded import MakeOptimizer

LABELS = {
    "none": "unpatched", "no-flce": "all but linear cross entropy", "tigon": "all of tigon", "liger": "Liger Kernel",
}  # fmt: skip
STOPPED = "stopped by a signal"


@dataclass(frozen=True)
class Repeat:
    """The measurements of one choice of kernels."""

    kernels: str
    losses: tuple[float, ...] = ()
    """The loss of each step in nats per token."""
    at_rest_bytes: int | None = None
    """Bytes of weights and optimizer states."""
    peak_bytes: int | None = None
    """The peak of the last step, with `at_rest_bytes`."""
    tokens_per_s: float | None = None
    error: str | None = None
    """The reason why the other fields are missing."""

    @property
    def stopped(self) -> bool:
        return self.error == STOPPED

    def as_mapping(self) -> dict[str, Any]:
        return {"label": LABELS[self.kernels], **asdict(self)}


@dataclass
class _Observer(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Step times, losses, and the peak of the last step."""

    device: torch.device
    last_step: int
    stop: StopRequest
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: Peak | None = None
    meter: PeakMeter | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.last_step - 1:
            self.meter = PeakMeter(self.device)
            self.meter.start(training_state(kwargs["model"], kwargs["optimizer"]))
        self._synchronize()
        self._begin_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._synchronize()
        self.step_s.append(time.perf_counter() - self._begin_s)
        if state.global_step == self.last_step:
            self.end()
        if self.stop.number:
            control.should_training_stop = True

    def end(self) -> None:
        """End the measurement, also if the measured step failed."""
        if self.meter is not None:
            self.peak, self.meter = self.meter.stop(), None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compare(
    kernels: Sequence[str],
    build: Callable[[str], Any],
    *,
    train: TrainConfig,
    steps: int,
    choices: Choices,
    run_info: RunInfo,
    folder: Path,
    device: torch.device,
    collator: Collator,
    samples: SampleDataset,
    objective: Objective,
    announce: Callable[[str], None],
    stop: StopRequest,
) -> list[Repeat]:
    """Repeat the same steps with each of `kernels`.

    Running out of memory, or a signal, ends a repeat with an `error` instead of an exception.

    Args:
        kernels: The values of `model.kernels` to compare.
        build: Makes the model for one of `kernels`.
        train: The run's training settings.
        steps: The number of steps.
        choices: The techniques in use.
        run_info: What the techniques need to know about the run.
        folder: The folder of the Trainer.
        device: The device to train on.
        collator: Makes a batch from samples.
        samples: The training samples.
        announce: Called with a line before each repeat.
        stop: Receives signals.

    Returns:
        A Repeat for each of `kernels`.
    """
    short = replace(
        train, steps=steps, epochs=None, warmup_steps=min(train.warmup_steps, steps // 2), log_steps=1,
        eval_steps=None, save_steps=None,
    )  # fmt: skip
    repeats = []
    _release(device)
    for choice in kernels:
        if stop.number:
            repeats.append(Repeat(choice, error=STOPPED))
            continue
        announce(f"comparison: {steps} steps, {LABELS[choice]}")
        try:
            args = trainers.arguments(short, choices, run_info, folder=folder, device=device, evaluate=False)
            optimizer = make_optimizer(short, choices)
            repeats.append(
                _repeat(
                    choice, build, args, optimizer, device=device, collator=collator, samples=samples,
                    objective=objective, stop=stop,
                )
            )  # fmt: skip
        except torch.OutOfMemoryError:
            repeats.append(Repeat(choice, error="out of memory"))
        _release(device)
    return repeats


def _repeat(
    choice: str, build: Callable[[str], Any], args: Any, optimizer: MakeOptimizer | None, *,
    device: torch.device, collator: Collator, samples: SampleDataset, objective: Objective, stop: StopRequest,
) -> Repeat:  # fmt: skip
    observer = _Observer(device, args.max_steps, stop)
    trainer = trainers.TigonTrainer(build(choice), args, collator, samples, None, optimizer, objective=objective)
    trainer.add_callback(observer)
    try:
        trainer.train()
    finally:
        observer.end()
    if len(observer.step_s) < args.max_steps:
        return Repeat(choice, error=STOPPED)
    assert observer.peak is not None
    n_tokens = args.per_device_train_batch_size * args.gradient_accumulation_steps * len(samples[0].tokens_T)
    timed_s = observer.step_s[1:-1] or observer.step_s[:1]
    return Repeat(
        choice,
        losses=tuple(observer.losses),
        at_rest_bytes=observer.peak.at_rest_bytes,
        peak_bytes=observer.peak.peak_bytes,
        tokens_per_s=n_tokens / statistics.median(timed_s),
    )


def _release(device: torch.device) -> None:
    """Free a model before the next one is built. The Trainer has reference cycles, so this needs gc.collect()."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
