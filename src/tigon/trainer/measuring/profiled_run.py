"""Records every allocation of a recipe's first steps, then times every operator of one step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState

from tigon._quiet import library_log_lines_dropped
from tigon._trunk import decoder_layers
from tigon.profiler.recording.cpu import CpuRecorder
from tigon.profiler.recording.cuda import CudaRecorder
from tigon.profiler.recording.journal import Journal, Recorder, Recording
from tigon.profiler.recording.watch import PhaseHooks
from tigon.profiler.render.op_table import OpRow, op_table
from tigon.profiler.timeline.assemble import assemble
from tigon.profiler.timeline.timeline import Timeline
from tigon.trainer import engine
from tigon.trainer import trainer as trainers
from tigon.trainer.checkpoint import nvme_swap
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.prepare import Prepared

SNAPSHOT, TRACE = "snapshot.pickle", "trace.json"


def record(prepared: Prepared, steps: int, folder: Path, label: str) -> tuple[Timeline, tuple[OpRow, ...], str]:
    """Train `steps` steps with every allocation recorded, then one with every operator timed.

    Args:
        prepared: The prepared run.
        steps: The number of recorded steps.
        folder: The folder for the profiler's trace and, on CUDA, the allocator's snapshot.
        label: The timeline's label.

    Returns:
        The timeline of live memory, the table of operators, and the reason if the run ran out of memory, else "".
    """
    device = prepared.device
    recorder: Recorder = CudaRecorder(device, folder / SNAPSHOT) if device.type == "cuda" else CpuRecorder()
    recorder.start()
    journal = Journal(recorder)
    loop, stopped = _Steps(recorder, journal, steps, folder / TRACE), ""
    try:
        with nvme_swap.own_files(prepared.recipe.sharding.nvme_folder):
            _train(prepared, loop, folder)
    except torch.OutOfMemoryError:
        size, length = prepared.recipe.train.batch_size, prepared.recipe.data.sequence_length
        where = f"in step {journal.step}" if journal.step else "while loading"
        stopped = f"out of memory {where} with train.batch_size {size} and data.sequence_length {length}"
    finally:
        recording = loop.end_recording()
    rows = op_table(loop.timed, on_cuda=device.type == "cuda")
    return assemble(recording, journal, label), tuple(rows), stopped


def _train(prepared: Prepared, steps: _Steps, folder: Path) -> None:
    built, _ = engine.build(prepared, folder / "base")
    engine.refuse_nonfinite(built, prepared.recipe.model)
    built = prepared.objective.attach(built)
    # On CUDA, the allocator's Python frames do not reach into autograd's C++. The CPU recorder names autograd's nodes.
    name_nodes = prepared.device.type == "cuda"
    with PhaseHooks(
        steps.journal, built, decoder_layers(built), checkpointed=_is_checkpointed, name_nodes=name_nodes
    ) as hooks:
        steps.watch = hooks
        trainer = trainers.make(prepared, built, replace(prepared.training_data, eval=None), folder)
        for frozen in _frozen_models(trainer):
            hooks.watch_frozen(frozen)
        trainer.add_callback(steps)
        try:
            trainer.train()
        finally:
            steps.end_timing()
            for left in ("checkpoints", "base"):
                shutil.rmtree(folder / left, ignore_errors=True)


def _frozen_models(trainer: GuardedTrainer) -> tuple[nn.Module, ...]:
    """The models that a trainer of TRL does not train: a reference or a teacher."""
    models = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
    return tuple(model for model in models if model is not None)


def _is_checkpointed(layer: nn.Module) -> bool:
    return bool(getattr(layer, "gradient_checkpointing", False))


class _Steps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Reports the phases of the training loop to the hooks, and starts timing after `recorded` recorded steps."""

    def __init__(self, recorder: Recorder, journal: Journal, recorded: int, trace: Path) -> None:
        self.journal = journal
        self._watch: PhaseHooks | None = None
        self.timed: list[Any] = []
        """The profiler's events of the timed step."""
        self._recorder, self._recorded, self._trace = recorder, recorded, trace
        self._recording: Recording | None = None
        self._profiler: torch.profiler.profile | None = None

    @property
    def watch(self) -> PhaseHooks:
        assert self._watch is not None, "set `watch` before the training loop begins"
        return self._watch

    @watch.setter
    def watch(self, watch: PhaseHooks) -> None:
        self._watch = watch

    def end_recording(self) -> Recording:
        if self._recording is None:
            self._recording = self._recorder.stop()
            if self._watch is not None:
                self._watch.close()
        return self._recording

    # --- the training loop's events ----------------------------------------------------------------------------------

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        self.watch.begin_step(kwargs["model"])

    def on_substep_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._recording is None:
            self.watch.end_micro_batch()

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._recording is None:
            self.watch.begin_optimizer()

    def on_optimizer_step(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        if self._recording is None:
            self.watch.end_optimizer(kwargs["optimizer"])

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        if self._profiler is not None:
            with library_log_lines_dropped():
                self._profiler.step()
        elif state.global_step < self._recorded:
            self.watch.begin_step(kwargs["model"])
        elif state.global_step == self._recorded:
            self.end_recording()
            self._begin_timing()

    # --- timing ------------------------------------------------------------------------------------------------------

    def _begin_timing(self) -> None:
        with library_log_lines_dropped():
            one = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
            self._profiler = torch.profiler.profile(schedule=one, record_shapes=True, on_trace_ready=self._keep)
            self._profiler.__enter__()

    def _keep(self, profiler: torch.profiler.profile) -> None:
        self.timed = list(profiler.events())
        profiler.export_chrome_trace(str(self._trace))

    def end_timing(self) -> None:
        if self._profiler is not None:
            with library_log_lines_dropped():
                self._profiler.__exit__(None, None, None)
            self._profiler = None
