"""Evaluation: the exact mean loss over tokens.

The Trainer's own evaluation averages batch means, which differs when batches hold different numbers of learned tokens,
and it asks for the logits. A patched model computes this one without them. A batch that runs out of memory is halved,
which does not change a mean over tokens.

If one process fails, all processes learn of it before the next collective. Otherwise they would wait there for it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tigon.data.packing import Sample, SampleDataset
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.models.seams.head.loss import without_logits
from tigon.trainer.distributed import launch
from tigon.trainer.guards import prediction

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class EvaluationFailed(Exception):
    """Evaluation ran out of memory even with one sample per batch. Training can continue."""


class EvaluationBroken(Exception):
    """Evaluation ran out of memory inside a forward pass that needs all processes, so no process can continue."""


class TokenMean:
    """The evaluation of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def metrics(self, samples: SampleDataset, prefix: str) -> dict[str, float]:
        """The mean loss over all learned tokens, in nats, and what the objective adds; {} if a signal interrupts it.

        Raises:
            EvaluationFailed: One sample at once runs out of memory.
            EvaluationBroken: A forward pass on sharded weights ran out of memory in one of the processes.

        Both errors are raised in all processes.
        """
        trainer, first = self.trainer, 0
        was_training = trainer.model.training
        trainer.model.eval()
        if trainer.objective.labels_part is not None:
            trainer.objective.labels_part.begin_evaluation()
        if trainer.added is not None:
            trainer.added.begin_evaluation(trainer.model)
        sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        try:
            while first < len(samples):
                if trainer.asked_to_stop():  # the step before the evaluation is complete: save it, and end
                    if trainer.is_in_train:
                        trainer.control.should_save = trainer.control.should_training_stop = True
                    return {}
                size = trainer.args.per_device_eval_batch_size
                batch_sums = self._sums_at(first, samples)
                if batch_sums is not None:
                    sums += batch_sums
                    first += size * trainer.args.world_size // trainer.readers_alike
        finally:
            trainer.model.train(was_training)
        total, n_learned = trainer.accelerator.reduce(sums).tolist()
        metrics = {f"{prefix}_loss": total / n_learned}
        # With added modules the loss may be a weighted sum, and that of labels is not one of text.
        if trainer.added is None and trainer.objective.labels_part is None:
            metrics |= {f"{prefix}_perplexity": value for value in perplexity(total / n_learned)}
        return metrics

    def _sums_at(self, first: int, samples: SampleDataset) -> torch.Tensor | None:
        """(sum of the losses, learned tokens) of this process's part of the batch that begins at sample `first`.

        None if one of the processes ran out of memory; all processes have halved their batch size then.

        Every process runs the same number of batches, because all of them gather sharded weights together. A process
        without samples left runs the first sample and does not count it. The Trainer's own loader counts it twice.
        """
        args = self.trainer.args
        size = args.per_device_eval_batch_size
        start, error = first + args.process_index // self.trainer.readers_alike * size, None
        own = [samples[i] for i in range(start, min(start + size, len(samples)))]
        # Determined before the forward pass: one that fails leaves the weights gathered.
        together = args.world_size > 1 and _is_sharded(self.trainer.model)
        try:
            sums = self.forward_sums(own or [samples[0]], bool(own))
        except RuntimeError as caught:
            if not prediction.is_out_of_memory(caught):
                raise
            error = caught
        patience_s = launch.ALONE_S if together and error is not None else launch.PATIENCE_S
        failures = launch.all_gather_ints(int(error is not None), patience_s=patience_s)
        if failures is not None and not any(failures):
            for count in self._counted:
                count()
            return sums
        short = [rank for rank, failed in enumerate(failures or ()) if failed] or [args.process_index]
        where = f" in process {short[0]} of {args.world_size}" if args.world_size > 1 else ""
        text = f"evaluation ran out of memory{where} with batch size {size}; lower "
        if together or failures is None:
            raise EvaluationBroken(f"{text}train.batch_size") from error
        if size == 1:
            raise EvaluationFailed(f"{text}data.sequence_length") from error
        error = None  # it refers to the tensors of the failed pass
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        args.per_device_eval_batch_size = size // 2
        return None

    def forward_sums(self, samples: Sequence[Sample], counts: bool) -> torch.Tensor:
        """The same sums for these samples, in fp64; 0 unless `counts`.

        They stay on the device. The host must not wait for them: the wait would not end if another process has run out
        of memory in a collective forward pass. A callback's event `on_prediction_step` gets the batch too, and appends
        to `counted` what to call if no process ran out of memory; otherwise the batch comes again, in smaller parts.
        """
        trainer, inputs = self.trainer, self._inputs(samples)
        # With num_items_in_batch 1, the model returns the sum of the losses over its tokens.
        one = torch.ones((), dtype=torch.long, device=inputs["labels"].device)
        # Compute the loss without logits, which would take more memory than a training step.
        self._counted: list[Callable[[], None]] = []
        if (part := trainer.objective.labels_part) is not None:
            labels = inputs.pop("labels")
            with torch.no_grad(), self._in_precision():
                outputs = trainer.model(**inputs)
                loss = part.outputs_loss(outputs, labels, num_items_in_batch=one)
            own = labels if counts else torch.full_like(labels, IGNORE_INDEX)
            self._counted.append(partial(part.evaluated, outputs, own))
            return torch.stack([loss.double(), (labels != IGNORE_INDEX).sum().double()]) * counts
        with torch.no_grad(), without_logits(), self._in_precision():
            loss = trainer.model(**inputs, num_items_in_batch=one).loss
        batch = {"inputs": inputs, "precision": self._in_precision, "counted": self._counted, "has_samples": counts}
        event = (trainer.args, trainer.state, trainer.control)
        trainer.callback_handler.call_event("on_prediction_step", *event, **batch)
        # A process's loss is that of its shard. It has counted the learned tokens of whole rows.
        n_learned = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum().double() / trainer.get_cp_size()
        return torch.stack([loss.double(), n_learned]) * counts

    def own_loss(self, sample: Sample) -> float:
        """The mean loss of the model's own head for a sample that every process takes, without dropout.

        The load balancing loss of a mixture of experts is left out, because it depends on all tokens of a batch. The
        state of the run does not change.
        """
        model, inputs = self.trainer.model, self._inputs([sample])
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            inputs["output_router_logits"] = False
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), without_logits(), self._in_precision():
                loss = model(**inputs).loss
        finally:
            model.train(was_training)
        return float(self.trainer.accelerator.reduce(loss.detach().float(), "mean"))

    def _inputs(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The model's arguments for a batch of samples, on the device."""
        inputs: dict[str, Any] = self.trainer._prepare_inputs(self.trainer.data_collator(samples))
        return inputs

    @contextmanager
    def _in_precision(self) -> Iterator[None]:
        """Run a forward pass in the precision of training."""
        with self.trainer.compute_loss_context_manager(), self.trainer.accelerator.autocast():
            yield


def perplexity(loss: float) -> tuple[float, ...]:
    """(exp of a loss in nats per token,); empty if it exceeds the range of floats."""
    try:
        return (math.exp(loss),)
    except OverflowError:
        return ()


def _is_sharded(model: PreTrainedModel) -> bool:
    """Whether FSDP2 or ZeRO-3 gathers weights in a forward pass, so that every process has to take part in it."""
    return any(hasattr(p, "ds_tensor") or hasattr(p, "to_local") for p in model.parameters())
