"""tigon's only subclass of the Hugging Face Trainer. In front of a trainer of TRL, it gives that one the same guards.

1. A step runs as step.py shows: its record has tokens/s and memory, and it is skipped if its loss or gradient is not
   finite. The Trainer's default logs such a loss as 0.0 and updates the weights. Such weights are never saved.
2. Evaluation is the exact mean over tokens (evaluation/token_mean.py). TRL's trainers evaluate by themselves.
3. Checkpoints are complete or absent, and hold no pickled arguments (checkpoint/checkpoint.py).
4. After a signal the run saves a checkpoint at the end of the step and ends (distributed/signals.py).

CONTRIBUTING.md gives the reasons for the three private methods. All else is a public method of the Trainer, a
callback or a documented hook.

If one process fails, all processes learn of it before the next collective. Otherwise they would wait there for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, ProgressCallback

from tigon._quiet import quiet_peft
from tigon.data.packing import BlankPadded, SampleDataset
from tigon.errors import RunFolderError
from tigon.objectives.base import Objective
from tigon.recipe.keys import TrainConfig
from tigon.techniques import tensor_parallel
from tigon.techniques.sequence_parallel.sequence_parallel import shards_of
from tigon.trainer.checkpoint import checkpoint, distributed_checkpoint, nvme_swap, resume_rules
from tigon.trainer.checkpoint.adapter_files import ADAPTER_FILE, check_against, declare_head
from tigon.trainer.checkpoint.atomic_save import SCHEDULER, AtomicSave
from tigon.trainer.distributed import frozen_shards
from tigon.trainer.distributed.deepspeed_fixes import (
    allow_deepspeed_globals,
    keep_partition_dtype,
    use_exact_beta_powers,
)
from tigon.trainer.distributed.signals import StopRequest, ignore_signals
from tigon.trainer.evaluation.token_mean import EvaluationFailed, TokenMean
from tigon.trainer.guards.nan_guard import innermost
from tigon.trainer.step import TrainingStep

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from tigon.trainer.post_training.completions import CompletionLog
    from tigon.trainer.post_training.reward_stop import RewardStop

MakeOptimizer = Callable[[Any, list[str]], torch.optim.Optimizer]
COUNTS_SHARED_ROWS_AGAIN = Version(transformers.__version__) < Version("5.19.dev0")
"""Whether the Trainer divides its count of tokens by Accelerate's sizes instead of `get_cp_size` (up to 5.18)."""
LOSS_COUNTS_TENSOR_GROUPS = Version(transformers.__version__) < Version("5.10.dev0")
"""Whether the Trainer multiplies a loss by all processes, also by those that divide matrices (up to 5.9)."""
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


class Counter(Protocol):
    """Sums since the last record that a checkpoint stores, because the library that keeps them does not."""

    def counted(self) -> dict[str, Any]: ...

    def resume_counting(self, counted: Mapping[str, Any]) -> None: ...


class _NothingLeft(Exception):
    """The checkpoint to resume from is already at the last step."""


class GuardedTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """A Trainer with the guards that the module docstring lists. `guard` sets them up after the construction."""

    control: TrainerControl
    reference: ClassVar[nn.Module | None] = None
    """A frozen model that TRL's trainer divides while it is made. `trl_trainer.make` sets it in a subclass."""

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
        if self.reference is not None:
            frozen_shards.divide_layers(self.reference, self.accelerator)

    def guard(
        self,
        objective: Objective,
        safeguards: Safeguards,
        make_optimizer: MakeOptimizer | None,
        learning_rates: Mapping[str, float],
    ) -> None:
        """Set up the guards. Call it once, before training.

        Args:
            objective: The objective of the run.
            safeguards: The settings of the guards.
            make_optimizer: Called with the model and the names of the parameters that decay; returns the optimizer.
                None: the Trainer makes the optimizer that its arguments name.
            learning_rates: A part of parameters' names -> the factor of their learning rate.
        """
        self._learning_rates = {**learning_rates, **(objective.added.learning_rates if objective.added else {})}
        self._make_optimizer = make_optimizer
        self.safeguards = safeguards
        self.objective, self.added = objective, objective.added
        self._grouped = False
        self.step = TrainingStep(self, safeguards.max_skipped_steps)
        self.gate = self.step.gate
        self.token_mean = TokenMean(self)
        self.counters: list[Counter] = []
        """What a checkpoint between two records stores beside the gate."""
        self.fused = ""
        """What of a trainer of TRL runs on tigon's head and what does not, for the report."""
        self.reward_stop: RewardStop | None = None
        self.completions: CompletionLog | None = None
        self.generator: object = ""
        """What writes the completions of a trainer of TRL; its text is for the report."""
        self.completions_line = ""
        self.evaluation_error: str | None = None
        # The Trainer would remove the last checkpoint at the end if it keeps one and another is the best.
        self.saves, self.args.save_total_limit = AtomicSave(self, self.args.save_total_limit), None
        # The Trainer would load the best one without comparing it with its manifest.
        self.loads_best, self.args.load_best_model_at_end = self.args.load_best_model_at_end, False
        self.best_step: int | None = None
        for silent in (PrinterCallback, ProgressCallback):
            self.remove_callback(silent)
        self.add_callback(_Start(self))
        self.add_callback(self.step)
        if self.added is not None:
            self.add_callback(self.added)
        forget_tied(self.model)

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: object) -> Any:
        if self.is_deepspeed_enabled:
            allow_deepspeed_globals()
            keep_partition_dtype()
        if resume_from_checkpoint is not None:
            rank, processes = self.args.process_index, self.args.world_size
            self.resume_counting(resume_rules.load_counters(Path(resume_from_checkpoint), rank, processes))
        if self.safeguards.stop is not None:
            self.safeguards.stop.listen()
        result = None
        try:
            result = super().train(resume_from_checkpoint, **kwargs)
            self.average_weights()
            self.saves.end_background()
        except _NothingLeft:  # without this exception the Trainer would take one more step
            self.is_in_train = False
            self.saves.last_step = self.state.global_step
        if self.loads_best and self.state.best_model_checkpoint is not None:
            self.load_best()
        return result

    # --- the step, as step.py shows it -------------------------------------------------------------------------------

    def training_step(self, model: PreTrainedModel, inputs: Mapping[str, Any], *args: object, **kwargs: object) -> Any:
        return self.step.micro_batch(inputs, partial(super().training_step, model, inputs, *args, **kwargs))

    def compute_loss(self, model: PreTrainedModel, inputs: Mapping[str, Any], *args: object, **kwargs: object) -> Any:
        return self.step.loss(model, inputs, partial(super().compute_loss, model, inputs, *args, **kwargs))

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        self.step.log(logs)
        super().log(logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: SampleDataset | None = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> Any:
        """The Trainer's or TRL's evaluation; for tigon's own objectives, the mean loss over all learned tokens.

        Without a loss, because a signal came or, between steps, one sample at once runs out of memory, the loss is NaN.

        Raises:
            EvaluationFailed: After training, one sample at once runs out of memory.
            EvaluationBroken: A forward pass on sharded weights ran out of memory in one of the processes.
        """
        self.average_weights()
        if self.objective.trl is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        try:
            metrics = self.token_mean.metrics(eval_dataset or self.eval_dataset, metric_key_prefix)
        except EvaluationFailed as error:
            if not self.is_in_train:
                raise
            self.evaluation_error, metrics = str(error), {}
        if metrics:
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_evaluate = False  # else the end of the epoch evaluates, and saves, again
        return metrics or {f"{metric_key_prefix}_loss": math.nan}

    def loss_scale(self) -> float | None:
        """The loss scale of fp16 training; None without one."""
        if self.is_deepspeed_enabled:
            return float(getattr(self.optimizer.optimizer, "loss_scale", 1.0))
        scaler = getattr(self.accelerator, "scaler", None)
        return None if scaler is None else float(scaler.get_scale())

    def keep_schedule(self) -> None:
        """Advance the learning rate schedule after a step that DeepSpeed skipped, as the other engines do.

        While DeepSpeed still lowers the loss scale, the schedule waits, as it does with GradScaler.
        """
        skipped = self.is_deepspeed_enabled and self.accelerator.optimizer_step_was_skipped
        if skipped and (self.loss_scale() or 1.0) <= 1.0:
            self.lr_scheduler.step()

    def average_weights(self) -> None:
        """Replace the weights by their averages, if the optimizer has some, as schedule-free does.

        The Trainer's next micro-batch puts the weights that are trained back.
        """
        average = getattr(innermost(self.optimizer), "eval", None)
        if average is not None:
            average()

    def asked_to_stop(self) -> bool:
        """Whether any process received a signal. Every process has to call it at the same point."""
        return self.safeguards.stop is not None and bool(self.safeguards.stop.signal_in_any_process())

    def create_optimizer(self, *args: object, **kwargs: object) -> Any:
        if self.optimizer is None and self._make_optimizer is not None:
            self.optimizer: AcceleratedOptimizer = self._make_optimizer(
                self.model, self.get_decay_parameter_names(self.model)
            )
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._grouped:
            for part, factor in self._learning_rates.items():
                own = {id(one) for name, one in self.model.named_parameters() if part in name}
                split_groups(optimizer, own, factor)
            if tensor_parallel.group_size(self.model) > 1:
                tensor_parallel.step_by_mesh(self.model, optimizer)
            self._grouped = True
        return optimizer

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.args.world_size > 1 and isinstance(self.train_dataset, SampleDataset):
            divided, n_alike = loader.batch_sampler, self.get_cp_size()
            divided.num_processes //= n_alike  # processes that share rows read the same ones
            divided.process_index //= n_alike
            batches = divided.batch_sampler  # Accelerate's divides the batches of this one
            batches.sampler = BlankPadded(batches.sampler, batches.batch_size * divided.num_processes)
        if self.args.dataloader_num_workers:
            start = partial(_start_worker, loader.worker_init_fn)
            for each in (loader, getattr(loader, "base_dataloader", loader)):  # Accelerate wraps a loader
                each.timeout, each.worker_init_fn = WORKER_TIMEOUT_S, start
        return loader

    def get_batch_samples(self, *args: object, **kwargs: object) -> Any:
        """A step's micro-batches, and their learned tokens in all processes, by which the losses are divided.

        Before transformers 5.19 the Trainer counts a row once for each process that shares it, and divides the count by
        the sizes that Accelerate knows: those of tensor groups.
        """
        batches, n_learned = super().get_batch_samples(*args, **kwargs)
        if n_learned is not None and COUNTS_SHARED_ROWS_AGAIN:
            n_learned = n_learned / self.get_cp_size()
        if n_learned is not None and LOSS_COUNTS_TENSOR_GROUPS:
            n_learned = n_learned * getattr(self.accelerator.parallelism_config, "non_data_parallel_size", 1)
        return batches, n_learned

    def get_cp_size(self) -> int:
        """The processes that share each row. The Trainer counts the learned tokens and the samples of a row once."""
        return shards_of(self.model)

    def get_tp_size(self) -> int:
        """As in the Trainer. Some of its versions know only what transformers' own loader divided."""
        return tensor_parallel.group_size(self.model)

    @property
    def readers_alike(self) -> int:
        """The processes that read the same samples."""
        return self.get_cp_size() * self.get_tp_size()

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write nothing: the run folder has a report."""

    # --- counters, checkpoints ---------------------------------------------------------------------------------------

    def counted(self) -> dict[str, Any]:
        """This process's counters and running sums, for a checkpoint between two records.

        A resumed run restores them, so that its next record equals that of a run without interruption.
        """
        counted: dict[str, Any] = {"gate": self.gate.state()}
        for counter in self.counters:
            counted |= counter.counted()
        return counted if self.added is None else {**counted, **self.added.counted(self.model)}

    def resume_counting(self, counted: Mapping[str, Any]) -> None:
        """Restore what `counted` returned when the checkpoint was saved."""
        self.gate.resume(counted["gate"])
        for counter in self.counters:
            counter.resume_counting(counted)
        if self.added is not None:
            self.added.resume_counting(self.model, counted, self.args.device)

    def stopped_early(self) -> str | None:
        """Why training ends before its last step, if the eval loss or the rewards end it; otherwise None."""
        stoppers = (each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback))
        if any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in stoppers):
            return "the eval loss fell no more (train.early_stopping_patience)"
        return None if self.reward_stop is None else self.reward_stop.reason()

    def load_best(self) -> None:
        """Load the best checkpoint, after comparing it with its manifest.

        Raises:
            RunFolderError: It is damaged.
        """
        self.saves.end_background()
        path, step = Path(self.state.best_model_checkpoint), self.state.best_global_step
        problem = checkpoint.problem_of(path, step)
        if problem is not None:
            raise RunFolderError(
                f"{path}: the checkpoint with the lowest eval loss {problem}; continue with the last weights by adding "
                "--set train.load_best=false --resume"
            )
        if distributed_checkpoint.is_distributed(path):
            distributed_checkpoint.load_model(self.model, path, self._kept)
        else:
            self._load_best_model()
        self.best_step = step

    def save_last(self) -> None:
        """Save a checkpoint of the last step unless one exists, and wait until it is complete."""
        if self.saves.last_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
        self.saves.end_background()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled and checkpoint is not None:
            nvme_swap.restore(self.model_wrapped, Path(checkpoint))
        folder, optimizer = Path(checkpoint or ""), innermost(self.optimizer)
        if self.is_fsdp_enabled and hasattr(optimizer, "train"):  # PyTorch makes the states that it fills by a step
            optimizer.train()
            optimizer.state.clear()  # PyTorch would take the empty entries of `train` for states
        if checkpoint is None or not distributed_checkpoint.can_load(folder, sharded=self.is_fsdp_enabled):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        distributed_checkpoint.load_optimizer(self.model, optimizer, folder)
        scheduled = torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduled)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights that a checkpoint holds. A distributed one has them beside the optimizer states."""
        folder = Path(output_dir or self.args.output_dir)
        if self.saves.writing is None or not self.safeguards.distributed:
            with quiet_peft():
                self._save_weights(folder, _internal_call)
        elif self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            distributed_checkpoint.save_configs(self.model, folder)
        if self.args.should_save:
            declare_head(self.model, folder)
            if self.added is not None:
                self.added.save_beside(self.model, folder)

    def _save_weights(self, folder: Path, _internal_call: bool) -> None:
        if self.added is None or self.added.saved_prefix is None:
            super().save_model(str(folder), _internal_call)
            return
        state = self.gathered_state() if self.is_deepspeed_enabled or self.is_fsdp_enabled else None
        state = self._kept(self.model, state)
        self.model.save_pretrained(folder, state_dict=state, is_main_process=self.args.should_save)

    def _kept(self, model: PreTrainedModel, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """The weights that a checkpoint holds; None: all of a model whose weights are not sharded.

        state: the state dict that was gathered from sharded weights; None if they are not sharded.
        """
        prefix = None if self.added is None else self.added.saved_prefix
        if prefix is None:
            return state
        whole = model.state_dict() if state is None else state
        return {name: tensor for name, tensor in whole.items() if name.startswith(prefix)}

    def states(self) -> dict[str, Any]:
        """The weights and optimizer states of a distributed checkpoint."""
        return distributed_checkpoint.states(self.model, innermost(self.optimizer), self._kept)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / ADAPTER_FILE).exists():
            check_against(self.model, folder)
        if distributed_checkpoint.can_load(folder, sharded=self.is_fsdp_enabled):
            distributed_checkpoint.load_model(model or self.model, folder, self._kept)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.added is not None:
            self.added.load_beside(self.model, folder)

    def gathered_state(self) -> dict[str, torch.Tensor] | None:
        """The whole weights of a sharded model. Every process calls it; with ZeRO-3 only the main process gets them."""
        wrapped = self.deepspeed if self.is_deepspeed_enabled else self.model
        state: dict[str, torch.Tensor] | None = self.accelerator.get_state_dict(wrapped)
        return state

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        """Save atomically (checkpoint/atomic_save.py). In the background, weights and states are written later."""
        self.average_weights()
        self.saves.save(model, partial(super()._save_checkpoint, model, trial))


def split_groups(optimizer: torch.optim.Optimizer, own: set[int], factor: float) -> None:
    """Move the parameters whose ids are in `own` to separate groups with `factor` times the learning rate."""
    for group in list(optimizer.param_groups):
        added = [p for p in group["params"] if id(p) in own]
        if not added:
            continue
        if len(added) == len(group["params"]):  # DeepSpeed does not accept empty groups
            group["lr"] *= factor
            continue
        group["params"] = [p for p in group["params"] if id(p) not in own]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "params": added, "lr": group["lr"] * factor})


def _start_worker(seed: Callable[[int], None] | None, worker: int) -> None:
    ignore_signals(worker)
    if seed is not None:
        seed(worker)


class _Start(TrainerCallback):  # type: ignore[misc]
    """Before the first step: the intervals of the present recipe, and whether any step is left."""

    def __init__(self, trainer: GuardedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        # A resumed state has the log and save intervals of the earlier recipe; use those of the present one.
        state.compute_steps(args, state.max_steps)
        self._trainer.saves.name_best()
        if state.global_step >= state.max_steps or self._trainer.stopped_early():
            raise _NothingLeft
        use_exact_beta_powers(innermost(self._trainer.optimizer))
        self._trainer.step.speed.restart()


def forget_tied(model: PreTrainedModel) -> None:
    """Leave tied weights out of the missing keys of a state dict, which has them once, under another name.

    The Trainer would warn of them whenever it loads a checkpoint.
    """
    if tied := frozenset(getattr(model, "all_tied_weights_keys", None) or ()):
        model.register_load_state_dict_post_hook(partial(_forget, tied))


def _forget(tied: frozenset[str], module: torch.nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in tied]
