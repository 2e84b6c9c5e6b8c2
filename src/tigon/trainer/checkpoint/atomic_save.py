"""Saves that are complete or absent: all processes write into a scratch folder, and the main process renames it.

If one process fails, all end the save. Otherwise the others would wait for it at the next collective.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, Trainer

from tigon.errors import RecipeError, RunFolderError
from tigon.trainer.checkpoint import checkpoint, distributed_checkpoint
from tigon.trainer.checkpoint.distributed_checkpoint import BackgroundSave
from tigon.trainer.distributed import launch
from tigon.trainer.guards.nan_guard import first_nonfinite

SCHEDULER = "scheduler.pt"  # the Trainer's name


class AtomicSave:
    """The saves of a `GuardedTrainer`, one after another.

    Args:
        trainer: The trainer. `trainer.safeguards` says how checkpoints are written.
        keep: Most checkpoints that stay; None: all.
    """

    def __init__(self, trainer: Trainer, keep: int | None) -> None:
        self._trainer, self._keep = trainer, keep
        self.last_step = 0
        """The step of the last checkpoint."""
        self.writing: Path | None = None
        """The scratch folder, while a checkpoint is written."""
        self._pending: BackgroundSave | None = None
        self._group: torch.distributed.ProcessGroup | None = None

    @property
    def _folder(self) -> Path:
        return Path(self._trainer.args.output_dir)

    def save(self, model: PreTrainedModel, write_files: Callable[[], None]) -> None:
        """Write a checkpoint of the present step. `write_files` is the Trainer's own save, into its output folder.

        In the background, the weights and states are written after this method has returned.

        Raises:
            RecipeError: A weight is NaN or infinite.
            OSError: The disk is full in one of the processes.
            RunFolderError: Another process failed or did not answer.
        """
        self.end_background()
        trainer, step, folder = self._trainer, self._trainer.state.global_step, self._folder
        refuse_nonfinite_weights(model, step)
        if not folder.parent.is_dir():  # the run folder was deleted; the Trainer would create it again, incomplete
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.parent))
        if trainer.args.should_save:
            checkpoint.clear(folder)
        trainer.accelerator.wait_for_everyone()
        self.writing = checkpoint.scratch(folder, step)
        written = self.writing / checkpoint.name_of(step)
        best = trainer.state.best_global_step if trainer.loads_best else None
        publish = partial(self._publish, folder, step, best)
        states_to = written / distributed_checkpoint.FOLDER
        try:
            self._write(partial(self._save_files, write_files))
            self.name_best(written)
            self._write(partial(self._save_counted, written))
            if trainer.safeguards.in_background:
                self._group = self._group or distributed_checkpoint.writing_group()
                self._write(partial(self._start_background, step, states_to, publish))
            else:
                if trainer.safeguards.distributed:
                    self._write(lambda: distributed_checkpoint.save(states_to, trainer.states()))
                self._write(publish)
        finally:
            self.writing = None
        self.last_step = step

    def _save_files(self, write_files: Callable[[], None]) -> None:
        """Let the Trainer write its files into the scratch folder.

        The weights and states of a distributed checkpoint follow, when all processes have written their other files.
        """
        trainer, args, folder = self._trainer, self._trainer.args, self._trainer.args.output_dir
        distributed = trainer.safeguards.distributed
        args.output_dir, args.save_only_model = str(self.writing), distributed
        try:
            write_files()
        finally:
            args.output_dir, args.save_only_model = folder, False
        if distributed:
            written = os.path.join(str(self.writing), checkpoint.name_of(trainer.state.global_step))
            if args.should_save:
                torch.save(trainer.lr_scheduler.state_dict(), os.path.join(written, SCHEDULER))
            trainer._save_scaler(written)
            trainer._save_rng_state(written)

    def _start_background(self, step: int, folder: Path, publish: Callable[[], None]) -> None:
        self._pending = BackgroundSave(step, folder, self._trainer.states(), self._group, publish)

    def end_background(self) -> None:
        """Wait until the save in the background is complete. Every process calls it.

        Raises:
            OSError: The disk is full in one of the processes.
            RunFolderError: Another process failed or did not answer.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.writing = checkpoint.scratch(self._folder, pending.step)
        try:
            self._write(pending.wait)
        finally:
            self.writing = None

    def name_best(self, written: Path | None = None) -> None:
        """Set the path of the best checkpoint (`train.load_best`), which the Trainer sought in the scratch folder.

        written: A checkpoint that is being written, whose state gets the path too.
        """
        state = self._trainer.state
        step = state.best_global_step
        if not self._trainer.loads_best or not step:
            return
        path = self._folder / checkpoint.name_of(step)
        exists = path.is_dir() or (written is not None and written.name == path.name)
        state.best_model_checkpoint = str(path) if exists else None
        if written is not None and self._trainer.args.should_save:
            state.save_to_json(str(written / "trainer_state.json"))

    def _save_counted(self, folder: Path) -> None:
        file = folder / f"counted-{self._trainer.args.process_index}.json"
        file.write_text(json.dumps(self._trainer.counted()), encoding="utf-8")

    def _publish(self, folder: Path, step: int, best: int | None) -> None:
        """Move the checkpoint into place in the main process, and remove older ones."""
        if self._trainer.args.should_save:
            checkpoint.publish(folder, step, self._trainer.safeguards.metadata, keep=self._keep, best=best)

    def _write(self, part: Callable[[], None]) -> None:
        """Run one part of a save. If it fails in one process, all processes end the save and the files are removed.

        If a process does not answer, the files stay until the next save, because that process may still be writing.

        Raises:
            OSError: The disk is full in one of the processes.
            RunFolderError: Another process failed or did not answer.
        """
        folder, error, full = self._folder, None, False
        try:
            part()
        except Exception as caught:
            error, full = caught, checkpoint.disk_is_full(caught, folder)
        failed = int(full) + int(error is not None)
        failures = launch.all_gather_ints(failed, patience_s=launch.PATIENCE_S if error is None else launch.ALONE_S)
        if failures is not None and not any(failures):
            return
        if failures is not None and self._trainer.args.should_save:
            assert self.writing is not None
            shutil.rmtree(self.writing, ignore_errors=True)
        if max(failures or [failed]) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        if error is not None:
            raise error
        others = [rank for rank, failure in enumerate(failures or ()) if failure]
        who = f"process {others[0]} failed" if others else f"a process has not answered for {launch.PATIENCE_S} s"
        raise RunFolderError(f"{folder}: {who} while a checkpoint was written; the checkpoint was not saved")


def refuse_nonfinite_weights(model: PreTrainedModel, step: int) -> None:
    """Raise RecipeError if a weight is NaN or infinite, so that such weights are not saved."""
    index = first_nonfinite(model)
    if index is not None:
        name = [name for name, _ in model.named_parameters()][index]
        raise RecipeError(f"{name} has values that are not finite at step {step}: not saved; lower train.learning_rate")
