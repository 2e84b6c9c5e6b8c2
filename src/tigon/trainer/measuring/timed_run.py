"""Times each step of a training run and reads the memory peak of each phase, for sweeps and measurements."""

from __future__ import annotations

import time

import torch
from transformers import TrainerCallback

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

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.meter.begin()

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.meter.end(self.trainer)
