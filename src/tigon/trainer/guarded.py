"""A Hugging Face Trainer with the guards of a run, under every trainer that tigon uses, TRL's included.

1. Every logged record carries tokens/s and memory.
2. A step whose loss or gradient is not finite is skipped (guards/nan_guard.py). The Trainer's default logs such a loss
   as 0.0 and updates the weights. Weights that are not finite are never saved.
3. Checkpoints are complete or absent, and hold no pickled arguments (checkpoint/checkpoint.py).
4. After a signal the run saves a checkpoint at the end of the step and ends (distributed/signals.py).

If one process fails, all processes learn of it before the next collective. Otherwise they would wait there for it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, ProgressCallback

from tigon._quiet import quiet_peft
from tigon.data.packing import BlankPadded, SampleDataset
from tigon.errors import RecipeError, RunFolderError
from tigon.objectives.base import Objective, Step
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.profiler.recording.device import used_bytes
from tigon.recipe.keys import TrainConfig
from tigon.techniques import tensor_parallel
from tigon.techniques.mechanisms.fused_linear import has_fused_linears
from tigon.techniques.sequence_parallel import shards_of
from tigon.trainer.checkpoint import checkpoint, distributed_checkpoint, elastic, nvme_swap, universal, whole_files
from tigon.trainer.checkpoint.adapter_files import check_against
from tigon.trainer.checkpoint.distributed_checkpoint import BackgroundSave
from tigon.trainer.distributed import launch, node_disks
from tigon.trainer.distributed.deepspeed_adam import use_exact_beta_powers
from tigon.trainer.distributed.deepspeed_classes import allow_deepspeed_globals, keep_partition_dtype
from tigon.trainer.distributed.signals import StopRequest, ignore_signals
from tigon.trainer.guards.nan_guard import NanGuard, first_nonfinite, innermost

MakeOptimizer = Callable[[Any, list[str]], torch.optim.Optimizer]
SCHEDULER = "scheduler.pt"  # the Trainer's name
WORKER_TIMEOUT_S = 600  # for one batch from a data loader process, which takes milliseconds to prepare it


@dataclass(frozen=True, kw_only=True)
class Safeguards:
    """Settings of a trainer's guards against faults."""

    stop: StopRequest | None = None
    """Receives signals while the model trains; None: signals have their usual effect."""
    max_skipped_steps: int = TrainConfig.max_skipped_steps
    """Consecutive skipped steps after which the run ends."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings that every checkpoint stores. A resumed run compares them with its own."""
    distributed: bool = False
    """Whether checkpoints are written in PyTorch's distributed format."""
    in_background: bool = False
    """Whether training continues while they are written. It needs `distributed`."""
    divided: bool = False
    """Whether processes write different weights or optimizer states into them."""


class _NothingLeft(Exception):
    """The checkpoint to resume from is already at the last step."""


class GuardedTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """A Trainer with the guards that the module docstring lists. `guard` sets them up after the construction."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make FSDP2 reduce gradients in fp32, as DDP does. Accelerate would use bf16, and round the loss to bf16.

        TRL's trainers shard their reference by the same policy while they are made.
        """
        super().create_accelerator_and_postprocess()
        if tensor_parallel.group_size(self.model) > 1:  # it would make DTensors of weights that kernels read
            self.accelerator._prepare_tp = lambda *prepared: prepared
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        if plugin is not None and policy is not None:
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)

    def guard(self, objective: Objective, safeguards: Safeguards, make_optimizer: MakeOptimizer | None) -> None:
        """Set up the guards. Call it once, before training.

        Args:
            objective: The objective of the run.
            safeguards: The settings of the guards.
            make_optimizer: Called with the model and the names of the parameters that decay; returns the optimizer.
                None: the Trainer makes the optimizer that its arguments name.
        """
        self._make_optimizer = make_optimizer
        self.safeguards = safeguards
        self.objective = objective
        self._grouped = False
        self._fuses_accumulation = has_fused_linears(self.model)
        self.row_shards = shards_of(self.model)
        """The processes that share each row, and read the same samples."""
        self.readers_alike = self.row_shards * tensor_parallel.group_size(self.model)
        """The processes that read the same samples."""
        self.gate = NanGuard(self.args.device, self.safeguards.max_skipped_steps)
        self.evaluation_error: str | None = None
        # The Trainer would remove the last checkpoint at the end if it keeps one and another is the best.
        self._keep, self.args.save_total_limit = self.args.save_total_limit, None
        self.args.save_on_each_node = False  # only for checkpoints; see `_save_on_each_disk`
        self.best_step: int | None = None
        self._saved_step = 0
        self._writing: Path | None = None
        self._pending: BackgroundSave | None = None
        self._writing_group: Any = None
        for silent in (PrinterCallback, ProgressCallback):
            self.remove_callback(silent)
        self.add_callback(_Boundaries(self))
        self.n_micro_steps = 0
        self.restart_clock()

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        if self.is_deepspeed_enabled:
            allow_deepspeed_globals()
            keep_partition_dtype()
        if resume_from_checkpoint is not None:
            counted = elastic.counted_before(
                Path(resume_from_checkpoint), self.args.process_index, self.args.world_size
            )
            if counted is not None:
                self.resume_counting(counted)
        if self.safeguards.stop is not None:
            self.safeguards.stop.listen()
        try:
            result = super().train(resume_from_checkpoint, **kwargs)
            self.end_background_save()
            return result
        except _NothingLeft:  # without this exception the Trainer would take one more step
            self.is_in_train = False
            self._saved_step = self.state.global_step
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self._load_best_model()

    @property
    def _counted_file(self) -> str:
        return f"counted-{self.args.process_index}.json"

    def counted(self) -> dict[str, Any]:
        """This process's counters and running sums, for a checkpoint between two records.

        A resumed run restores them, so that its next record equals that of a run without interruption.
        """
        waited = [each.early_stopping_patience_counter for each in self.stoppers()]
        return {"gate": self.gate.state(), "evaluations_without_progress": waited, **self.objective.counted(self.model)}

    def resume_counting(self, counted: Mapping[str, Any]) -> None:
        """Restore what `counted` returned when the checkpoint was saved."""
        self.gate.resume(counted["gate"])
        for each, waited in zip(self.stoppers(), counted.get("evaluations_without_progress", ()), strict=False):
            each.early_stopping_patience_counter = int(waited)
        self.objective.resume_counting(self.model, counted, self.args.device)

    def stoppers(self) -> list[EarlyStoppingCallback]:
        """The callback of train.early_stopping_patience, if the run has one."""
        return [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]

    def stopped_early(self) -> bool:
        """Whether the eval loss has not fallen for as long as train.early_stopping_patience allows."""
        return any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in self.stoppers())

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in the Trainer; a new best one is also saved at once, so that the best model is always on the disk.

        An evaluation that ran out of memory, or that a signal ended, has no loss and is not compared.
        """
        if "eval_loss" not in metrics:
            return False
        is_best = bool(super()._determine_best_metric(metrics, trial))
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _load_best_model(self) -> None:
        """Load the best checkpoint, after comparing it with its manifest.

        Raises:
            RunFolderError: It is damaged.
        """
        self.end_background_save()
        path, step = Path(self.state.best_model_checkpoint), self.state.best_global_step
        problem = checkpoint.problem_of(path, step)
        if problem is not None:
            raise RunFolderError(
                f"{path}: the checkpoint with the lowest eval loss {problem}; continue with the last weights by adding "
                "--set train.load_best=false --resume"
            )
        if distributed_checkpoint.is_distributed(path):
            distributed_checkpoint.load_model(self.model, path, self.objective.checkpoint_state)
        else:
            super()._load_best_model()
        self.best_step = step

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As in the Trainer, but silent about tied weights, which a checkpoint holds once under another name."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        if load_result.unexpected_keys or set(load_result.missing_keys) - tied:
            super()._issue_warnings_after_load(load_result)

    def asked_to_stop(self) -> bool:
        """Whether any process received a signal. Every process has to call it at the same point."""
        return self.safeguards.stop is not None and bool(self.safeguards.stop.signal_in_any_process())

    def save_last(self) -> None:
        """Save a checkpoint of the last step unless one exists, and wait until it is complete."""
        if self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
        self.end_background_save()

    def restart_clock(self) -> None:
        """Restart the measurement of tokens/s, which excludes evaluation and saving."""
        self.tokens_since_mark = 0
        self.mark_s = time.perf_counter()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled and checkpoint is not None:
            nvme_swap.restore(self.model_wrapped, Path(checkpoint))
        folder, optimizer = Path(checkpoint or ""), innermost(self.optimizer)
        if checkpoint is not None and distributed_checkpoint.is_distributed(folder):
            distributed_checkpoint.load_optimizer(self.model, optimizer, folder)
        elif checkpoint is not None and self.is_fsdp_enabled and whole_files.has_whole_files(folder):
            whole_files.load_optimizer(self.model, optimizer, folder)
        elif checkpoint is not None and self._is_of_another_engine(folder):
            universal.load_optimizer(self.model, optimizer, folder)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        scheduled = torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduled)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As in the Trainer; after a resume on another number of processes, from another process's file."""
        if checkpoint is None:
            return
        with elastic.own_random_state(Path(checkpoint), self.args.process_index, self.args.world_size) as folder:
            super()._load_rng_state(str(folder))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and self._make_optimizer is not None:
            self.optimizer: Any = self._make_optimizer(self.model, self.get_decay_parameter_names(self.model))
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._grouped:
            self.objective.group(self.model, optimizer)
            if tensor_parallel.group_size(self.model) > 1:
                tensor_parallel.step_by_mesh(self.model, optimizer)
            self._grouped = True
        return optimizer

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        step = Step(done=self.state.global_step, total=self.state.max_steps, log_every=int(self.args.logging_steps))
        self.objective.begin_step(self.model, step)
        if not self.n_micro_steps:
            self.restart_clock()  # other callbacks have started trackers meanwhile
        self.n_micro_steps += 1
        self.tokens_since_mark += self.tokens_in(inputs)
        with accumulation_fusion() if self._fuses_accumulation else nullcontext():
            loss = self.gate.add(super().training_step(model, inputs, *args, **kwargs))
        if self.accelerator.sync_gradients:
            tensor_parallel.sum_gradients(self.model)
        return loss

    def tokens_in(self, inputs: Any) -> int:
        """This process's share of the tokens of a micro-batch, padding included."""
        return int(inputs["input_ids"].numel()) // self.readers_alike

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer. It sums over all processes, and would count a shared row once per process."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return count if count is None or self.row_shards == 1 else count / self.row_shards

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(super().get_total_train_batch_size(args)) // self.row_shards

    def get_tp_size(self) -> int:
        """As in the Trainer. Some of its versions know only what transformers' own loader divided."""
        return tensor_parallel.group_size(self.model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model_loss = partial(super().compute_loss, model, inputs, *args, **kwargs)
        loss = self.objective.loss(model, inputs, model_loss)
        if isinstance(loss, tuple):  # with the outputs, which an evaluation may ask for
            return (self.gate.nan_if_not_finite(loss[0]), *loss[1:])
        return self.gate.nan_if_not_finite(loss)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Decide whether this step is skipped. The Trainer calls it once per step, after the backward pass.

        Without DeepSpeed the optimizer step follows. DeepSpeed has already taken its step, or skipped it by itself.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scale = None
        if self.is_deepspeed_enabled:
            scale = self._deepspeed_scale()
        elif getattr(self.accelerator, "scaler", None) is not None:
            scale = float(self.accelerator.scaler.get_scale())
        self.gate.close(norm, self.optimizer, scale=scale, step=self.state.global_step + 1)
        return norm

    def _deepspeed_scale(self) -> float:
        return float(getattr(self.optimizer.optimizer, "loss_scale", 1.0))

    def keep_schedule(self) -> None:
        """Advance the learning rate schedule after a step that DeepSpeed skipped, as the other engines do.

        While DeepSpeed still lowers the loss scale, the schedule waits, as it does with GradScaler.
        """
        skipped = self.is_deepspeed_enabled and self.accelerator.optimizer_step_was_skipped
        if skipped and self._deepspeed_scale() <= 1.0:
            self.lr_scheduler.step()

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.args.world_size > 1 and isinstance(self.train_dataset, SampleDataset):
            divided = loader.batch_sampler
            divided.num_processes //= self.row_shards  # processes that share rows read the same ones
            divided.process_index //= self.row_shards
            batches = divided.batch_sampler  # Accelerate's divides the batches of this one
            batches.sampler = BlankPadded(batches.sampler, batches.batch_size * divided.num_processes)
        if self.args.dataloader_num_workers:
            start = partial(_start_worker, loader.worker_init_fn)
            for each in (loader, getattr(loader, "base_dataloader", loader)):  # Accelerate wraps a loader
                each.timeout, each.worker_init_fn = WORKER_TIMEOUT_S, start
        return loader

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self.objective.metrics(self.model, self.accelerator.reduce))
        if "eval_loss" in logs:
            logs.update(self.objective.evaluation_metrics(self.accelerator.reduce))
        if "loss" in logs:
            self._put_losses(logs)
            seconds = time.perf_counter() - self.mark_s
            logs["tokens_per_s"] = self.tokens_since_mark * self.args.world_size / seconds
            logs["memory_bytes"], logs["memory_peak_bytes"] = used_bytes(self.args.device)
            self.restart_clock()
        super().log(logs, *args, **kwargs)

    def _put_losses(self, logs: dict[str, float]) -> None:
        """Replace the logged loss by the mean over the steps that were not skipped; drop it if all were skipped."""
        self.gate.settle(self.state.global_step)
        loss_sum, n_steps = self.gate.mean_loss()
        loss_sum = self.accelerator.reduce(loss_sum, "mean")
        if int(n_steps):
            logs["loss"] = float(loss_sum) / int(n_steps)
        else:
            del logs["loss"]
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        if self.gate.skipped:
            logs["skipped_steps"] = self.gate.skipped

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the Trainer; the weights of a distributed checkpoint are saved with its optimizer states."""
        if self._writing is None or not self.safeguards.distributed:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            distributed_checkpoint.save_configs(self.model, folder)
            self.objective.save_beside(self.model, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.safeguards.distributed:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.args.should_save:  # the states follow, when all processes have written their other files
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _states(self) -> dict[str, Any]:
        return distributed_checkpoint.states(self.model, innermost(self.optimizer), self.objective.checkpoint_state)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if self.args.save_on_each_node and not self.is_world_process_zero() and self._gathers_weights():
            return  # only the main process has them
        with quiet_peft():
            super()._save(output_dir, self.objective.checkpoint_state(self.model, state_dict))
        self.objective.save_beside(self.model, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / whole_files.ADAPTER_FILE).exists():
            check_against(self.model, folder)
        if distributed_checkpoint.is_distributed(folder):
            distributed_checkpoint.load_model(model or self.model, folder, self.objective.checkpoint_state)
        elif self.is_fsdp_enabled and whole_files.has_whole_files(folder):
            whole_files.load_model(model or self.model, folder)
        elif self._is_of_another_engine(folder):
            universal.load_model(model or self.model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.objective.load_beside(self.model, folder)

    def _gathers_weights(self) -> bool:
        """Whether a save gathers the whole weights in the main process."""
        stage = self.accelerator.state.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0
        return bool(self.is_fsdp_enabled or stage == 3)

    def _is_of_another_engine(self, checkpoint: Path) -> bool:
        """Whether DeepSpeed has written a checkpoint that this run reads without it."""
        return universal.is_deepspeeds(checkpoint) and not self.is_deepspeed_enabled

    def gathered_state(self) -> dict[str, torch.Tensor] | None:
        """The whole weights of a sharded model. Every process calls it; with ZeRO-3 only the main process gets them."""
        wrapped = self.deepspeed if self.is_deepspeed_enabled else self.model
        state: dict[str, torch.Tensor] | None = self.accelerator.get_state_dict(wrapped)
        return state

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writing) if self._writing is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """All processes write into the scratch folder; then the main process renames it to the checkpoint.

        In the background, the weights and states are written after this method has returned. If each node has its own
        disk, its first process takes the part of the main process there.
        """
        self.end_background_save()
        step, folder, disks = self.state.global_step, Path(self.args.output_dir), node_disks.several()
        refuse_nonfinite_weights(model, step)
        if not folder.parent.is_dir():  # the run folder was deleted; the Trainer would create it again, incomplete
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.parent))
        if node_disks.is_writer():
            checkpoint.clear(folder)
        self.accelerator.wait_for_everyone()
        self._writing = checkpoint.scratch(folder, step)
        written = self._writing / checkpoint.name_of(step)
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        publish = partial(self._publish, folder, step, best)
        self._prune = partial(self._remove_older, folder, step, best)
        divided_to = written / distributed_checkpoint.folder_of(self.safeguards.divided)
        try:
            self.args.save_on_each_node = disks is not None
            self._write(partial(super()._save_checkpoint, model, trial))
            self._name_best(written)
            self._write(partial(self._save_counted, written))
            if disks is not None:
                self._write(partial(self._give_to_other_disks, written))
            if self.safeguards.in_background or (self.safeguards.distributed and disks is not None):
                self._writing_group = self._writing_group or distributed_checkpoint.writing_group()
            if self.safeguards.in_background:
                self._write(partial(self._start_background_save, step, divided_to, publish))
            else:
                if self.safeguards.distributed:
                    self._write(lambda: distributed_checkpoint.save(divided_to, self._states(), self._writing_group))
                self._write(publish)
                if disks is not None:
                    self._write(self._prune)
        finally:
            self._writing, self.args.save_on_each_node = None, False
        self._saved_step = step

    def _start_background_save(self, step: int, folder: Path, publish: Callable[[], None]) -> None:
        self._pending = BackgroundSave(step, folder, self._states(), self._writing_group, publish)

    def _give_to_other_disks(self, written: Path) -> None:
        """Give every node's disk what other processes have written: their small files, and gathered weights."""
        own = [f"rng_state_{self.args.process_index}.pth", self._counted_file]
        node_disks.exchange(written, [*own, universal.LATEST] if self.is_world_process_zero() else own)
        if not self.safeguards.divided:
            node_disks.share(written)

    def end_background_save(self) -> None:
        """Wait until the save in the background is complete. Every process calls it.

        Raises:
            OSError: The disk is full in one of the processes.
            RunFolderError: Another process failed or did not answer.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._writing = checkpoint.scratch(Path(self.args.output_dir), pending.step)
        try:
            self._write(pending.wait)
            if node_disks.several() is not None:
                self._write(self._prune)
        finally:
            self._writing = None

    def _name_best(self, written: Path | None = None) -> None:
        """Set the path of the best checkpoint, which the Trainer has looked for in the scratch folder of the present.

        written: A checkpoint that is being written, whose state gets the path too.
        """
        step = self.state.best_global_step
        if not self.args.load_best_model_at_end or not step:
            return
        path = Path(self.args.output_dir) / checkpoint.name_of(step)
        exists = path.is_dir() or (written is not None and written.name == path.name)
        self.state.best_model_checkpoint = str(path) if exists else None
        if written is not None and node_disks.is_writer():
            self.state.save_to_json(str(written / "trainer_state.json"))

    def _save_counted(self, folder: Path) -> None:
        (folder / self._counted_file).write_text(json.dumps(self.counted()), encoding="utf-8")

    def _publish(self, folder: Path, step: int, best: int | None) -> None:
        """Move the checkpoint into place, and remove older ones unless other nodes may lack this one still."""
        disks = node_disks.several()
        if node_disks.is_writer():
            keep, part = (self._keep, None) if disks is None else (None, (disks.own, disks.count))
            checkpoint.publish(folder, step, self.safeguards.metadata, keep=keep, best=best, part=part)

    def _remove_older(self, folder: Path, step: int, best: int | None) -> None:
        """With a disk on each node, remove older checkpoints when this one is complete on all of them."""
        if node_disks.is_writer() and self._keep is not None:
            checkpoint.prune(folder, step, self._keep, best)

    def _write(self, part: Callable[[], None]) -> None:
        """Run one part of a save. If it fails in one process, all processes end the save and the files are removed.

        If a process does not answer, the files stay until the next save, because that process may still be writing.

        Raises:
            OSError: The disk is full in one of the processes.
            RunFolderError: Another process failed or did not answer.
        """
        folder, error, full = Path(self.args.output_dir), None, False
        try:
            part()
        except Exception as caught:
            error, full = caught, checkpoint.disk_is_full(caught, folder)
        failed = int(full) + int(error is not None)
        failures = launch.all_gather_ints(failed, patience_s=launch.PATIENCE_S if error is None else launch.ALONE_S)
        if failures is not None and not any(failures):
            return
        if failures is not None and node_disks.is_writer():
            assert self._writing is not None
            shutil.rmtree(self._writing, ignore_errors=True)
        if max(failures or [failed]) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        if error is not None:
            raise error
        others = [rank for rank, failure in enumerate(failures or ()) if failure]
        who = f"process {others[0]} failed" if others else f"a process has not answered for {launch.PATIENCE_S} s"
        raise RunFolderError(f"{folder}: {who} while a checkpoint was written; the checkpoint was not saved")


def _start_worker(seed: Callable[[int], None] | None, worker: int) -> None:
    ignore_signals(worker)
    if seed is not None:
        seed(worker)


def refuse_nonfinite_weights(model: Any, step: int) -> None:
    """Raise RecipeError if a weight is NaN or infinite, so that such weights are not saved."""
    index = first_nonfinite(model)
    if index is not None:
        name = [name for name, _ in model.named_parameters()][index]
        raise RecipeError(f"{name} has values that are not finite at step {step}: not saved; lower train.learning_rate")


class _Boundaries(TrainerCallback):  # type: ignore[misc]
    """Between steps: restarts the clock of tokens/s after evaluation and saving, and ends the run after a signal."""

    def __init__(self, trainer: GuardedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed state has the log and save intervals of the earlier recipe; use those of the present one.
        state.compute_steps(args, state.max_steps)
        self._trainer._name_best()
        if state.global_step >= state.max_steps or self._trainer.stopped_early():
            raise _NothingLeft
        use_exact_beta_powers(innermost(self._trainer.optimizer))
        self._trainer.restart_clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.keep_schedule()
        if self._trainer.asked_to_stop():
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.restart_clock()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.asked_to_stop():
            control.should_training_stop = True
        self._trainer.restart_clock()
