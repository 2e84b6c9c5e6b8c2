"""Hugging Face's Trainer with four changes, and its arguments from a recipe.

1. Evaluation is the exact mean over tokens. The Trainer's own averages batch means, which differs when batches hold
   different numbers of learned tokens, and asks for the logits, which tigon's loss never materialises.
2. Every logged record carries tokens/s and memory.
3. A loss that is not finite stops the run: the Trainer's default logs it as 0.0 and goes on. Weights that are not
   finite are never saved.
4. Checkpoints hold no pickled arguments.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from tigon.errors import RecipeError
from tigon.profile.device import used_bytes
from tigon.train.packing import Collator, RowDataset
from tigon.train.recipe import TrainConfig
from tigon.train.tokenizer import IGNORE_INDEX


def arguments(train: TrainConfig, *, folder: Path, precision: str, device: torch.device, evaluate: bool) -> Any:
    """TrainingArguments, spelled for the installed transformers (5.8 to 5.23 rename some; unknown ones raise there)."""
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": train.steps if train.steps is not None else -1,
        "num_train_epochs": train.epochs if train.epochs is not None else 1.0,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if train.schedule == "constant" else train.schedule,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "max_grad_norm": train.max_grad_norm,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        checkpointing: train.gradient_checkpointing,
        "seed": train.seed,
        "data_seed": train.seed,
        "use_cpu": device.type == "cpu",
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
    }
    result = TrainingArguments(**values)
    # With several GPUs in one process the Trainer would wrap the model in DataParallel, which replicates it each step.
    if result.n_gpu > 1:
        result._n_gpu = 1
    return result


class TigonTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """See the module docstring."""

    def __init__(self, model: Any, args: Any, collator: Collator, train_rows: RowDataset, eval_rows: RowDataset | None):
        super().__init__(
            model=model, args=args, data_collator=collator, train_dataset=train_rows, eval_dataset=eval_rows
        )
        for silent in (PrinterCallback, ProgressCallback):
            self.remove_callback(silent)
        self.add_callback(_Stopwatch(self))
        self.n_micro_steps = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Evaluating and saving are no training time."""
        self.tokens_since_mark = 0
        self.mark_s = time.perf_counter()

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.n_micro_steps += 1
        self.tokens_since_mark += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self._refuse_nonfinite(logs["loss"])
            seconds = time.perf_counter() - self.mark_s
            logs["tokens_per_s"] = self.tokens_since_mark / seconds
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
            for batch in self.get_eval_dataloader(eval_dataset):
                inputs = self._prepare_inputs(batch)
                # one item: the model then returns the sum over its tokens (the Trainer's own loss contract)
                one = torch.ones((), dtype=torch.long, device=inputs["labels"].device)
                with self.compute_loss_context_manager(), self.accelerator.autocast():
                    loss = self.model(**inputs, num_items_in_batch=one).loss
                total += loss.double().cpu()
                n_learned += int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum())
        self.model.train(was_training)
        metrics = {f"{metric_key_prefix}_loss": float(total) / n_learned}
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

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
        if not bool(torch.isfinite(parameter).all()):
            raise RecipeError(
                f"{name} has values that are not finite at step {step}: not saved; lower train.learning_rate"
            )


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
