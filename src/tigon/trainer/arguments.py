"""The arguments of every trainer from a recipe, and the function that makes the optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch._functorch import config as functorch_config
from transformers import TrainingArguments

from tigon.recipe.keys import TrainConfig
from tigon.techniques import TECHNIQUES
from tigon.techniques.optimizers import galore, muon
from tigon.trainer.distributed import launch
from tigon.trainer.guarded import MakeOptimizer
from tigon.trainer.setup import Setup


def arguments(setup: Setup, run: Path, *, evaluate: bool) -> dict[str, Any]:
    """The arguments of any trainer: the recipe's settings, then the arguments of the techniques in use.

    Args:
        setup: The recipe and its techniques.
        run: The run folder. Checkpoints are written to `checkpoints/` in it.
        evaluate: Whether there is something to evaluate on.
    """
    train, settings, device = setup.recipe.train, setup.settings, setup.device
    values: dict[str, Any] = {
        "output_dir": str(run / "checkpoints"),
        "max_steps": train.steps if train.steps is not None else -1,
        "num_train_epochs": train.epochs if train.epochs is not None else 1.0,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.batch_size,
        "learning_rate": train.learning_rate,
        **_schedule(train),
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
        "restore_callback_states_from_checkpoint": True,  # evaluations without progress, of early stopping
    }
    if evaluate and train.eval_steps and (train.load_best or train.early_stopping_patience is not None):
        values |= {"metric_for_best_model": "loss", "greater_is_better": False}
    if evaluate and train.eval_steps and train.load_best:
        values["load_best_model_at_end"] = True
        values["save_strategy"] = "steps" if train.save_steps else "best"
    for technique in TECHNIQUES.values():
        if technique.used_by(settings):
            values |= technique.arguments(settings, setup.run_info)
    return values


def _schedule(train: TrainConfig) -> dict[str, Any]:
    """The learning rate schedule by transformers' names."""
    if train.schedule == "warmup_stable_decay":
        decay = {"num_decay_steps": train.decay_steps, "decay_type": "linear", "min_lr_ratio": train.min_lr_rate}
        return {"lr_scheduler_type": train.schedule, "lr_scheduler_kwargs": decay}
    if train.min_lr_rate:  # a rule allows only cosine here
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": train.min_lr_rate}}
    return {"lr_scheduler_type": "constant_with_warmup" if train.schedule == "constant" else train.schedule}


def _keeps_buckets() -> bool:
    """Whether DDP keeps the buckets of gradients that it begins with, by looking for weights without a gradient.

    Otherwise DDP makes new buckets after a process's first step. From three processes on, the place in a bucket decides
    in which order gradients are summed, so the first step of a resumed run would round in another way. The cost is one
    walk over the autograd graph per micro-batch.
    """
    return launch.world_size() > 2


def without_data_parallel(args: TrainingArguments) -> TrainingArguments:
    """`args` for one GPU. With several GPUs in one process the Trainer copies the model to each GPU every step."""
    if args.n_gpu > 1:
        args._n_gpu = 1
    return args


def make_optimizer(setup: Setup) -> MakeOptimizer | None:
    """The function that makes the optimizer; None if the Trainer makes it from its name."""
    train, settings = setup.recipe.train, setup.settings
    row = settings.train.optimizer_row
    if row.needs_compiler and settings.sharding.fsdp:
        # With sharded weights, PyTorch's cache of traced graphs has one key for 8-bit and 4-bit moments. A run with one
        # would load the graph of the other and fail (torch 2.13). The cache of compiled kernels is not affected.
        functorch_config.enable_autograd_cache = False
    if row.trainer_name is not None:
        return None
    shared: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "weight_decay": train.weight_decay,
    }
    if row.name == "muon":
        return partial(muon.build, **shared)
    return partial(
        galore.build,
        **shared,
        rank=settings.train.galore_rank,
        gap=train.galore_gap,
        layerwise=row.in_backward,
    )


def learning_rates(setup: Setup) -> dict[str, float]:
    """A part of parameters' names -> the factor of their learning rate: LoRA+ lets the matrices B learn faster."""
    ratio = setup.settings.lora.loraplus_lr_ratio
    return {} if ratio == 1 else {"lora_B": ratio}
