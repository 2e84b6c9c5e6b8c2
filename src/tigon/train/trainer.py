"""Hugging Face's Trainer with four changes, and its arguments from a recipe.

1. Evaluation is the exact mean over tokens. The Trainer's own averages batch means, which differs when batches hold
   different numbers of learned tokens, and asks for the logits, which tigon's loss never materialises.
2. Every logged record carries tokens/s and memory.
3. A loss that is not finite stops the run: the Trainer's default logs it as 0.0 and goes on. Weights that are not
   finite are never saved.
4. Checkpoints hold no pickled arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from tigon.errors import RecipeError
from tigon.profile.device import used_bytes
from tigon.techniques import TECHNIQUES
from tigon.techniques.choices import Choices
from tigon.techniques.technique import Facts
from tigon.train.packing import Collator, RowDataset
from tigon.train.recipe import TrainConfig
from tigon.train.tokenizer import IGNORE_INDEX

MakeOptimizer = Callable[[Any, list[str]], torch.optim.Optimizer]


def arguments(
    train: TrainConfig, choices: Choices, facts: Facts, *, folder: Path, device: torch.device, evaluate: bool
) -> Any:
    """TrainingArguments of a run: what every run has, and what its techniques add."""
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
        "use_cpu": device.type == "cpu" and choices.zero == 0,  # DeepSpeed finds the CPU by itself, and wants to
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
            values |= technique.arguments(choices, facts)
    result = TrainingArguments(**values)
    # With several GPUs in one process the Trainer would wrap the model in DataParallel, which replicates it each step.
    if result.n_gpu > 1:
        result._n_gpu = 1
    return result


class TigonTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """See the module docstring."""

    def __init__(
        self, model: Any, args: Any, collator: Collator, train_rows: RowDataset, eval_rows: RowDataset | None = None,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:  # fmt: skip
        """make_optimizer: (model, names of decayed parameters) -> optimizer, where the Trainer has no name for it."""
        super().__init__(
            model=model, args=args, data_collator=collator, train_dataset=train_rows, eval_dataset=eval_rows
        )
        self._make_optimizer = make_optimizer
        self._sum_in_fp32()
        for silent in (PrinterCallback, ProgressCallback):
            self.remove_callback(silent)
        self.add_callback(_Stopwatch(self))
        self.n_micro_steps = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Evaluating and saving are no training time."""
        self.tokens_since_mark = 0
        self.mark_s = time.perf_counter()

    def _sum_in_fp32(self) -> None:
        """Accelerate's FSDP2 would add up gradients of all GPUs in bf16 and round the loss to it; DDP does neither."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        if plugin is not None and policy is not None:
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and self._make_optimizer is not None:
            self.optimizer: Any = self._make_optimizer(self.model, self.get_decay_parameter_names(self.model))
        return super().create_optimizer(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.n_micro_steps += 1
        self.tokens_since_mark += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self._refuse_nonfinite(logs["loss"])
            seconds = time.perf_counter() - self.mark_s
            logs["tokens_per_s"] = self.tokens_since_mark * self.args.world_size / seconds
            logs["memory_bytes"], logs["memory_peak_bytes"] = used_bytes(self.args.device)
            self.restart_clock()
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """The mean loss over all learned tokens of the evaluation rows, in nats."""
        was_training = self.model.training
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        n_learned = 0
        with torch.no_grad():
            for batch in self._eval_batches(eval_dataset or self.eval_dataset):
                inputs = self._prepare_inputs(batch)
                # one item: the model then returns the sum over its tokens (the Trainer's own loss contract)
                one = torch.ones((), dtype=torch.long, device=inputs["labels"].device)
                with self.compute_loss_context_manager(), self.accelerator.autocast():
                    loss = self.model(**inputs, num_items_in_batch=one).loss
                total += loss.double().cpu()
                n_learned += int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum())
        self.model.train(was_training)
        own = torch.tensor([float(total), n_learned], dtype=torch.float64, device=self.args.device)
        sums = self.accelerator.reduce(own)
        metrics = {f"{metric_key_prefix}_loss": float(sums[0] / sums[1])}
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _eval_batches(self, rows: RowDataset) -> Iterator[dict[str, Any]]:
        """This process's share. All get as many batches, as sharded weights are gathered by all at once; the Trainer's
        own loader evens them out with rows from the beginning, which would count twice."""
        size, world, rank = self.args.per_device_eval_batch_size, self.args.world_size, self.args.process_index
        for first in range(0, len(rows), size * world):
            start = first + rank * size
            own = [rows[i] for i in range(start, min(start + size, len(rows)))]
            batch = self.data_collator(own or [rows[0]])
            if not own:
                batch["labels"].fill_(IGNORE_INDEX)
            yield batch

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        refuse_nonfinite_weights(model, self.state.global_step)
        super()._save_checkpoint(model, trial)

    def _refuse_nonfinite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise RecipeError(
                f"the loss is {loss} by step {self.state.global_step}: training diverged and was stopped; lower "
                f"train.learning_rate ({self.args.learning_rate:g}), raise train.warmup_steps, or use another precision"
            )


def refuse_nonfinite_weights(model: Any, step: int) -> None:
    """Raise rather than save weights that can only give NaN."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(_own_part(parameter)).all()):
            raise RecipeError(
                f"{name} has values that are not finite at step {step}: not saved; lower train.learning_rate"
            )


def _own_part(parameter: Any) -> torch.Tensor:
    """What of a parameter is in this process: FSDP2's shard, ZeRO-3's partition, or all of it."""
    if hasattr(parameter, "ds_tensor"):
        partition: torch.Tensor = parameter.ds_tensor
        return partition
    shard: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard


class _Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Keeps the trainer's clock on training alone, and drops the pickle that the Trainer puts into checkpoints."""

    def __init__(self, trainer: TigonTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.restart_clock()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.restart_clock()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (checkpoint / "training_args.bin").unlink(missing_ok=True)
        self._trainer.restart_clock()
