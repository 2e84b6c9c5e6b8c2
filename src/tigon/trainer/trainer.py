"""The trainer of an ordinary run, and the arguments of every trainer from a recipe.

It has the guards of `GuardedTrainer` and two more changes:

1. Evaluation is the exact mean over tokens, and a patched model computes it without logits. The Trainer's own averages
   batch means, which differs when batches hold different numbers of learned tokens, and asks for the logits.
2. Evaluation that runs out of memory halves its batches, which does not change a mean over tokens.

If one process fails, all processes learn of it before the next collective. Otherwise they would wait there for it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tigon.data.packing import Collator, Sample, SampleDataset
from tigon.models.seams.head.loss import without_logits
from tigon.objectives.base import Objective
from tigon.objectives.causal_lm import CausalLM
from tigon.recipe.keys import TrainConfig
from tigon.techniques import TECHNIQUES
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.technique import RunInfo
from tigon.trainer.distributed import launch
from tigon.trainer.guarded import GuardedTrainer, MakeOptimizer, Safeguards
from tigon.trainer.guards import prediction


class EvaluationFailed(Exception):
    """Evaluation ran out of memory even with one sample per batch. Training can continue."""


class EvaluationBroken(Exception):
    """Evaluation ran out of memory inside a forward pass that needs all processes, so no process can continue."""


def arguments(
    train: TrainConfig, choices: Choices, run_info: RunInfo, *, folder: Path, device: torch.device, evaluate: bool,
    reads_images: bool = False,
) -> Any:  # fmt: skip
    """The TrainingArguments of an ordinary run.

    reads_images: Whether a vision tower is trained. Some models leave its last layer out, as LLaVA does, so DDP has to
        look for weights without a gradient.
    """
    values = argument_values(train, choices, run_info, folder=folder, device=device, evaluate=evaluate)
    own: dict[str, Any] = {"remove_unused_columns": False, "label_names": ["labels"]}
    if reads_images:
        own["ddp_find_unused_parameters"] = True
    return without_data_parallel(TrainingArguments(**{**values, **own}))


def argument_values(
    train: TrainConfig, choices: Choices, run_info: RunInfo, *, folder: Path, device: torch.device, evaluate: bool
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
        "prediction_loss_only": True,
        "ddp_find_unused_parameters": _keeps_buckets(),
    }
    if evaluate and train.eval_steps and (train.load_best or train.early_stopping_patience is not None):
        values |= {"metric_for_best_model": "loss", "greater_is_better": False}
    if evaluate and train.eval_steps and train.load_best:
        values["load_best_model_at_end"] = True
        values["save_strategy"] = "steps" if train.save_steps else "best"
    for technique in TECHNIQUES.values():
        if technique.used_by(choices):
            values |= technique.arguments(choices, run_info)
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


class TigonTrainer(GuardedTrainer):
    """The trainer of an ordinary run."""

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
        self.guard(objective or CausalLM(), safeguards or Safeguards(), make_optimizer)

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
                    first += size * self.args.world_size // self.readers_alike
        finally:
            self.model.train(was_training)
        total, n_learned = self.accelerator.reduce(sums).tolist()
        metrics = {f"{metric_key_prefix}_loss": total / n_learned}
        if self.objective.metric_section() is None:  # otherwise the loss is a weighted sum of several heads' losses
            metrics |= {f"{metric_key_prefix}_perplexity": value for value in perplexity(total / n_learned)}
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
        start, error = first + self.args.process_index // self.readers_alike * size, None
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

    def own_loss(self, sample: Sample) -> float:
        """The mean loss of the model's own head for a sample that every process takes, without dropout.

        The load balancing loss of a mixture of experts is left out, because it depends on all tokens of a batch. The
        state of the run does not change.
        """
        inputs = self._prepare_inputs(self.data_collator([sample]))
        if getattr(self.model.config.get_text_config(), "output_router_logits", False):
            inputs["output_router_logits"] = False
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), without_logits(), self._in_precision():
                loss = self.model(**inputs).loss
        finally:
            self.model.train(was_training)
        return float(self.accelerator.reduce(loss.detach().float(), "mean"))

    def _forward_sums(self, samples: Sequence[Sample], counts: bool) -> torch.Tensor:
        inputs = self._prepare_inputs(self.data_collator(samples))
        sums = self.objective.evaluation_sums(self.model, inputs, counts, self._in_precision)
        # A process's loss is that of its shard. It has counted the learned tokens of whole rows.
        return sums / sums.new_tensor([1, self.row_shards])

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


def perplexity(loss: float) -> tuple[float, ...]:
    """(exp of a loss in nats per token,); empty if it exceeds the range of floats."""
    try:
        return (math.exp(loss),)
    except OverflowError:
        return ()


def _is_sharded(model: Any) -> bool:
    """Whether FSDP2 or ZeRO-3 gathers weights in a forward pass, so that every process has to take part in it."""
    return any(hasattr(p, "ds_tensor") or hasattr(p, "to_local") for p in model.parameters())
