"""Times each step of a training run and reads its memory peaks, for sweeps and for the comparison of kernels."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState

from tigon.profiler.recording.peak import Peak, PeakMeter, training_state
from tigon.trainer.guarded import GuardedTrainer


class StepMeter:
    """Step times and memory peaks. Every mark reads the allocator's peaks since the previous mark and resets them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, int] = {}
        self.allocated_bytes = self.reserved_bytes = 0
        self.step_s: list[float] = []
        self.updated: list[bool] = []
        self._begin_s = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def mark(self, phase: str) -> None:
        """End a phase: the peak since the previous mark belongs to `phase`."""
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device)
        self.phases[phase] = max(self.phases.get(phase, 0), peak)
        self.allocated_bytes = max(self.allocated_bytes, peak)
        self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    def begin(self) -> None:
        """Start the time of a step, once the GPU is idle."""
        self._synchronize()
        self._begin_s = time.perf_counter()

    def end(self, trainer: GuardedTrainer) -> None:
        """End a step, after its optimizer update."""
        self._synchronize()
        self.step_s.append(time.perf_counter() - self._begin_s)
        # Accelerate does not notice when a fused optimizer itself skips a step because the loss scale is too large.
        skipped = trainer.accelerator.optimizer_step_was_skipped or bool(trainer.gate.left_out)
        self.updated.append(not skipped)
        self.mark("optimizer")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class StepTimer(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Times each step of a trainer by a meter, with a mark after each phase.

    DeepSpeed's backward includes its optimizer step.
    """

    def __init__(self, meter: StepMeter, trainer: GuardedTrainer) -> None:
        self.meter, self.trainer = meter, trainer
        trainer.step.phase_ended = meter.mark

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        self.meter.begin()

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        self.meter.end(self.trainer)


class MeteredSteps(StepTimer):
    """Keeps the losses too, and in one step measures the peak of memory instead of the time.

    metered_step: the steps before that one; None: every step is timed.
    """

    def __init__(self, meter: StepMeter, trainer: GuardedTrainer, metered_step: int | None) -> None:
        super().__init__(meter, trainer)
        self.metered_step = metered_step
        self.losses: list[float] = []
        self.peak: Peak | None = None
        self._peak_meter: PeakMeter | None = None

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        if state.global_step == self.metered_step:
            self.trainer.step.phase_ended = lambda phase: None  # a mark would reset the peak of the step
            self._peak_meter = PeakMeter(self.meter.device)
            self._peak_meter.start(_alive(kwargs["model"], kwargs["optimizer"]))
        super().on_step_begin(args, state, control, **kwargs)

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        if self._peak_meter is not None:
            self.stop()
        else:
            super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def stop(self) -> None:
        """End the measurement of memory, also if the step failed."""
        if self._peak_meter is not None:
            self.peak, self._peak_meter = self._peak_meter.stop(), None


def _alive(model: nn.Module, optimizer: object) -> list[torch.Tensor]:
    """Tensors that outlive a step. DeepSpeed keeps optimizer states on the optimizer that it wraps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return list(training_state(model, inner if hasattr(inner, "state") else optimizer))
