"""Hugging Face's Trainer with six changes, and its arguments from a recipe.

1. Evaluation is the exact mean over tokens, and a patched model computes it without logits. The Trainer's own averages
   batch means, which differs when batches hold different numbers of learned tokens, and asks for the logits.
2. Every logged record carries tokens/s and memory.
3. A step whose loss or gradient is not finite is skipped (guards/nan_guard.py). The Trainer's default logs such a loss
   as 0.0 and updates the weights. Weights that are not finite are never saved.
4. Checkpoints are complete or absent, and hold no pickled arguments (checkpoint/checkpoint.py).
5. After a signal the run saves a checkpoint at the end of the step and ends (distributed/signals.py).
6. Evaluation that runs out of memory halves its batches, which does not change a mean over tokens.

If one process fails, all processes learn of it before the next collective. Otherwise they would wait there for it.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from tigon.data.packing import Collator, Sample, SampleDataset
from tigon.errors import RecipeError, RunFolderError
from tigon.objectives.base import Objective, Step
from tigon.objectives.causal_lm import CausalLM
from tigon.profiler.recording.device import used_bytes
from tigon.recipe.keys import TrainConfig
from tigon.techniques import TECHNIQUES
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.technique import RunInfo
from tigon.trainer.checkpoint import checkpoint, nvme_swap
from tigon.trainer.distributed import launch
from tigon.trainer.distributed.deepspeed_adam import use_exact_beta_powers
from tigon.trainer.distributed.deepspeed_classes import allow_deepspeed_globals, keep_partition_dtype
from tigon.trainer.distributed.signals import StopRequest, ignore_signals
from tigon.trainer.guards import prediction
from tigon.trainer.guards.nan_guard import NanGuard, first_nonfinite, innermost

MakeOptimizer = Callable[[Any, list[str]], torch.optim.Optimizer]
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


class EvaluationFailed(Exception):
    """Evaluation ran out of memory even with one sample per batch. Training can continue."""


class EvaluationBroken(Exception):
    """Evaluation ran out of memory inside a forward pass that needs all processes, so no process can continue."""


class _NothingLeft(Exception):
    """The checkpoint to resume from is already at the last step."""


def arguments(
    train: TrainConfig, choices: Choices, run_info: RunInfo, *, folder: Path, device: torch.device, evaluate: bool
) -> Any:
    """The TrainingArguments of a run: the recipe's settings, then the arguments of the techniques in use."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": train.steps if train.steps is not None else -1,
        "num_train_epochs": train.epochs if train.epochs is not None else 1.0,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.batch_size,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if train.schedule == "constant" else train.schedule,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "data_seed": train.seed,
        "use_cpu": device.type == "cpu" and choices.zero == 0,  # DeepSpeed has to choose the device itself
        "dataloader_num_workers": train.workers,
        "dataloader_pin_memory": device.type == "cuda",
        "logging_steps": train.log_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluate and train.eval_steps else "no",
        "eval_steps": train.eval_steps,
        "save_strategy": "steps" if train.save_steps else "no",
        "save_steps": train.save_steps or 500,
        "save_total_limit": train.keep_checkpoints,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
        "ddp_find_unused_parameters": False,
    }
    for technique in TECHNIQUES.values():
        if technique.used_by(choices):
            values |= technique.arguments(choices, run_info)
    result = TrainingArguments(**values)
    # With several GPUs in one process the Trainer uses DataParallel, which copies the model to each GPU every step.
    if result.n_gpu > 1:
        result._n_gpu = 1
    return result


class TigonTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """Hugging Face's Trainer with the changes that the module docstring lists."""

    def __init__(
        self, model: Any, args: Any, collator: Collator, train_samples: SampleDataset,
        eval_samples: SampleDataset | None = None,
        make_optimizer: MakeOptimizer | None = None, safeguards: Safeguards | None = None,
        objective: Objective | None = None,
    ) -> None:  # fmt: skip
        """Make a trainer.

        Args:
            model: The model, with its techniques applied.
            args: The result of `arguments`.
            collator: Makes a batch from samples.
            train_samples: The samples to train on.
            eval_samples: The samples of the eval loss; None: no evaluation.
            make_optimizer: Called with the model and the names of the parameters that decay; returns the optimizer.
                None: the Trainer makes the optimizer that `args` names.
            safeguards: The settings of the guards; None: their defaults.
            objective: The loss to minimise; None: the model's own loss.
        """
        super().__init__(
            model=model, args=args, data_collator=collator, train_dataset=train_samples, eval_dataset=eval_samples
        )
        self._make_optimizer = make_optimizer
        self.safeguards = safeguards or Safeguards()
        self.objective: Objective = objective or CausalLM()
        self._grouped = False
        self.gate = NanGuard(self.args.device, self.safeguards.max_skipped_steps)
        self.evaluation_error: str | None = None
        self._saved_step = 0
        self._writing: Path | None = None
        self._sum_in_fp32()
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
            file = Path(resume_from_checkpoint) / self._counted_file
            if file.exists():  # checkpoints of older versions of tigon lack it
                self.resume_counting(json.loads(file.read_text(encoding="utf-8")))
        if self.safeguards.stop is not None:
            self.safeguards.stop.listen()
        try:
            return super().train(resume_from_checkpoint, **kwargs)
        except _NothingLeft:  # without this exception the Trainer would take one more step
            self.is_in_train = False
            self._saved_step = self.state.global_step

    @property
    def _counted_file(self) -> str:
        return f"counted-{self.args.process_index}.json"

    def counted(self) -> dict[str, Any]:
        """This process's counters and running sums, for a checkpoint between two records.

        A resumed run restores them, so that its next record equals that of a run without interruption.
        """
        return {"gate": self.gate.state(), **self.objective.counted(self.model)}

    def resume_counting(self, counted: Mapping[str, Any]) -> None:
        """Restore what `counted` returned when the checkpoint was saved."""
        self.gate.resume(counted["gate"])
        self.objective.resume_counting(self.model, counted, self.args.device)

    def asked_to_stop(self) -> bool:
        """Whether any process received a signal. Every process has to call it at the same point."""
        return self.safeguards.stop is not None and bool(self.safeguards.stop.signal_in_any_process())

    def save_last(self) -> None:
        """Save a checkpoint of the last step unless one exists."""
        if self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)

    def restart_clock(self) -> None:
        """Restart the measurement of tokens/s, which excludes evaluation and saving."""
        self.tokens_since_mark = 0
        self.mark_s = time.perf_counter()

    def _sum_in_fp32(self) -> None:
        """Make FSDP2 reduce gradients in fp32, as DDP does. Accelerate would use bf16, and round the loss to bf16."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        if plugin is not None and policy is not None:
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled and checkpoint is not None:
            nvme_swap.restore(self.model_wrapped, Path(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and self._make_optimizer is not None:
            self.optimizer: Any = self._make_optimizer(self.model, self.get_decay_parameter_names(self.model))
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._grouped:
            self.objective.group(self.model, optimizer)
            self._grouped = True
        return optimizer

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        step = Step(done=self.state.global_step, total=self.state.max_steps, log_every=int(self.args.logging_steps))
        self.objective.begin_step(self.model, step)
        self.n_micro_steps += 1
        self.tokens_since_mark += inputs["input_ids"].numel()
        return self.gate.add(super().training_step(model, inputs, *args, **kwargs))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model_loss = partial(super().compute_loss, model, inputs, *args, **kwargs)
        return self.gate.nan_if_not_finite(self.objective.loss(model, inputs, model_loss))

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

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """The mean loss over all learned tokens of the eval samples, in nats; {} if a signal interrupts it.

        Raises:
            EvaluationFailed: One sample at once runs out of memory.
            EvaluationBroken: A forward pass on sharded weights ran out of memory in one of the processes.

        Both errors are raised in all processes.
        """
        samples, first, was_training = eval_dataset or self.eval_dataset, 0, self.model.training
        self.objective.begin_evaluation()
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        try:
            while first < len(samples):
                if self.asked_to_stop():  # the step before the evaluation is complete: save it, and end
                    if self.is_in_train:
                        self.control.should_save = self.control.should_training_stop = True
                        self.control.should_evaluate = False  # else the end of the epoch evaluates, and saves, again
                    return {}
                size = self.args.per_device_eval_batch_size
                batch_sums = self._sums_at(first, samples)
                if batch_sums is not None:
                    sums += batch_sums
                    first += size * self.args.world_size
        finally:
            self.model.train(was_training)
        total, n_learned = self.accelerator.reduce(sums).tolist()
        metrics = {f"{metric_key_prefix}_loss": total / n_learned}
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _sums_at(self, first: int, samples: SampleDataset) -> torch.Tensor | None:
        """(sum of the losses, learned tokens) of this process's part of the batch that begins at sample `first`.

        None if one of the processes ran out of memory; all processes have halved their batch size then.

        Every process runs the same number of batches, because all of them gather sharded weights together. A process
        without samples left runs the first sample and does not count it. The Trainer's own loader counts it twice.
        """
        size = self.args.per_device_eval_batch_size
        start, error = first + self.args.process_index * size, None
        own = [samples[i] for i in range(start, min(start + size, len(samples)))]
        # Determined before the forward pass: one that fails leaves the weights gathered.
        together = self.args.world_size > 1 and _is_sharded(self.model)
        try:
            sums = self._forward_sums(own or [samples[0]], bool(own))
        except RuntimeError as caught:
            if not prediction.is_out_of_memory(caught):
                raise
            error = caught
        patience_s = launch.ALONE_S if together and error is not None else launch.PATIENCE_S
        failures = launch.all_gather_ints(int(error is not None), patience_s=patience_s)
        if failures is not None and not any(failures):
            self.objective.count_batch()
            return sums
        short = [rank for rank, failed in enumerate(failures or ()) if failed] or [self.args.process_index]
        where = f" in process {short[0]} of {self.args.world_size}" if self.args.world_size > 1 else ""
        text = f"evaluation ran out of memory{where} with batch size {size}; lower "
        if together or failures is None:
            raise EvaluationBroken(f"{text}train.batch_size") from error
        if size == 1:
            raise EvaluationFailed(f"{text}data.sequence_length") from error
        error = None  # it refers to the tensors of the failed pass
        gc.collect()
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()
        self.args.per_device_eval_batch_size = size // 2
        return None

    def _forward_sums(self, samples: Sequence[Sample], counts: bool) -> torch.Tensor:
        inputs = self._prepare_inputs(self.data_collator(samples))
        return self.objective.evaluation_sums(self.model, inputs, counts, self._in_precision)

    @contextmanager
    def _in_precision(self) -> Iterator[None]:
        """Run a forward pass in the precision of training."""
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            yield

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate between steps. If the evaluation runs out of memory, training continues without it."""
        try:
            return super()._evaluate(*args, **kwargs)
        except EvaluationFailed as error:
            self.evaluation_error = str(error)
            self.control.should_evaluate = False
            return {}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        super()._save(output_dir, self.objective.checkpoint_state(self.model, state_dict))
        self.objective.save_beside(self.model, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.objective.load_beside(self.model, Path(resume_from_checkpoint))

    def gathered_state(self) -> dict[str, torch.Tensor] | None:
        """The whole weights of a sharded model. Every process calls it; with ZeRO-3 only the main process gets them."""
        wrapped = self.deepspeed if self.is_deepspeed_enabled else self.model
        state: dict[str, torch.Tensor] | None = self.accelerator.get_state_dict(wrapped)
        return state

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writing) if self._writing is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """All processes write into the scratch folder; then the main process renames it to the checkpoint."""
        step, first, folder = self.state.global_step, self.is_world_process_zero(), Path(self.args.output_dir)
        refuse_nonfinite_weights(model, step)
        if not folder.parent.is_dir():  # the run folder was deleted; the Trainer would create it again, incomplete
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.parent))
        if first:
            checkpoint.clear(folder)
        self.accelerator.wait_for_everyone()
        self._writing = checkpoint.scratch(folder, step)
        try:
            self._write(partial(super()._save_checkpoint, model, trial))
            self._write(partial(self._save_counted, checkpoint.scratch(folder, step) / checkpoint.name_of(step)))
            self._write(partial(self._publish, folder, step))
        finally:
            self._writing = None
        self._saved_step = step

    def _save_counted(self, folder: Path) -> None:
        (folder / self._counted_file).write_text(json.dumps(self.counted()), encoding="utf-8")

    def _publish(self, folder: Path, step: int) -> None:
        if self.is_world_process_zero():
            checkpoint.publish(folder, step, self.safeguards.metadata, keep=self.args.save_total_limit)

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
        if failures is not None and self.is_world_process_zero():
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


def _is_sharded(model: Any) -> bool:
    """Whether FSDP2 or ZeRO-3 gathers weights in a forward pass, so that every process has to take part in it."""
    return any(hasattr(p, "ds_tensor") or hasattr(p, "to_local") for p in model.parameters())


class _Boundaries(TrainerCallback):  # type: ignore[misc]
    """Between steps: restarts the clock of tokens/s after evaluation and saving, and ends the run after a signal."""

    def __init__(self, trainer: TigonTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed state has the log and save intervals of the earlier recipe; use those of the present one.
        state.compute_steps(args, state.max_steps)
        if state.global_step >= state.max_steps:
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
