"""Makes the trainer of an ordinary run, and the arguments of every trainer from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tigon.data.packing import Collator, SampleDataset
from tigon.objectives.base import Objective
from tigon.recipe.keys import TrainConfig
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo
from tigon.trainer.distributed import launch
from tigon.trainer.guarded import GuardedTrainer, MakeOptimizer, Safeguards


def arguments(
    train: TrainConfig, settings: Settings, run_info: RunInfo, *, folder: Path, device: torch.device, evaluate: bool,
    reads_images: bool = False,
) -> Any:  # fmt: skip
    """The TrainingArguments of an ordinary run.

    reads_images: Whether a vision tower is trained. Some models leave its last layer out, as LLaVA does, so DDP has to
        look for weights without a gradient.
    """
    values = argument_values(train, settings, run_info, folder=folder, device=device, evaluate=evaluate)
    own: dict[str, Any] = {"remove_unused_columns": False, "label_names": ["labels"]}
    if reads_images:
        own["ddp_find_unused_parameters"] = True
    return without_data_parallel(TrainingArguments(**{**values, **own}))


def argument_values(
    train: TrainConfig, settings: Settings, run_info: RunInfo, *, folder: Path, device: torch.device, evaluate: bool
) -> dict[str, Any]:
    """The arguments of any trainer: the recipe's settings, then the arguments of the techniques in use."""
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
        "use_cpu": device.type == "cpu" and settings.sharding.zero == 0,  # DeepSpeed has to choose the device itself
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
        "prediction_loss_only": True,
        "ddp_find_unused_parameters": _keeps_buckets(),
    }
    if evaluate and train.eval_steps and (train.load_best or train.early_stopping_patience is not None):
        values |= {"metric_for_best_model": "loss", "greater_is_better": False}
    if evaluate and train.eval_steps and train.load_best:
        values["load_best_model_at_end"] = True
        values["save_strategy"] = "steps" if train.save_steps else "best"
    for technique in TECHNIQUES.values():
        if technique.used_by(settings):
            values |= technique.arguments(settings, run_info)
    return values


def _keeps_buckets() -> bool:
    """Whether DDP keeps the buckets of gradients that it begins with, by looking for weights without a gradient.

    Otherwise DDP makes new buckets after a process's first step. From three processes on, the place in a bucket decides
    in which order gradients are summed, so the first step of a resumed run would round in another way. The cost is one
    walk over the autograd graph per micro-batch.
    """
    return launch.world_size() > 2


def without_data_parallel(args: Any) -> Any:
    """`args` for one GPU. With several GPUs in one process the Trainer copies the model to each GPU every step."""
    if args.n_gpu > 1:
        args._n_gpu = 1
    return args


def make(
    model: Any, args: Any, collator: Collator, train_samples: SampleDataset, eval_samples: SampleDataset | None = None,
    make_optimizer: MakeOptimizer | None = None, safeguards: Safeguards | None = None,
    objective: Objective | None = None,
) -> GuardedTrainer:  # fmt: skip
    """The trainer of an ordinary run.

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
    trainer = GuardedTrainer(
        model=model, args=args, data_collator=collator, train_dataset=train_samples, eval_dataset=eval_samples
    )
    trainer.guard(objective or Objective(), safeguards or Safeguards(), make_optimizer)
    return trainer
