"""One training step, in the order in which it runs.

The Trainer of transformers runs the loop, also for TRL's trainers. A comment `# Trainer:` stands for lines of its
`_run_epoch`, and the methods between them are tigon's part at this point.

- `GuardedTrainer.training_step` calls `micro_batch`. The Trainer's own `training_step`, which is `forward_backward`
  here, calls `GuardedTrainer.compute_loss`, and that calls `loss`. `GuardedTrainer.log` calls `log`.
- A causal model computes its loss in its own forward pass. The head of a patched model does so in
  models/seams/head/loss.py.
- The hook around the Trainer's `clip_grad_norm_` fills `norm.value` (guards/nan_guard.py: `ClippedNorm`).
- The methods `on_...` are events of the Trainer's callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState

from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.profiler.recording.device_memory import used_bytes
from tigon.techniques import tensor_parallel
from tigon.techniques.accumulation.fused_linear import has_fused_linears
from tigon.techniques.sequence_parallel.sequence_parallel import shards_of
from tigon.trainer.guards.nan_guard import ClippedNorm, NanGuard


class TrainingStep(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """The steps of one trainer."""

    def __init__(self, trainer: Trainer, max_skipped_steps: int) -> None:
        self.trainer = trainer
        self.gate = NanGuard(trainer.args.device, max_skipped_steps)
        self.norm = ClippedNorm(trainer.accelerator)
        self.speed = Speed(trainer)
        self.fusion = accumulation_fusion if has_fused_linears(trainer.model) else nullcontext
        self.phase_ended: Callable[[str], None] = lambda phase: None
        """Called in each micro-batch with `forward` and `backward` when they end."""

    # Trainer: batches = the step's micro-batches, from get_train_dataloader()
    # Trainer: num_items = their learned tokens in all processes, by which each loss, a sum over tokens, is divided
    # Trainer: for each micro-batch, without reducing gradients before the last one:

    def micro_batch(self, inputs: Mapping[str, Any], forward_backward: Callable[[], Any]) -> Any:
        trainer = self.trainer
        with self.speed.counting(inputs), self.fusion():
            loss = self.gate.add(forward_backward())  # Trainer: accelerator.backward(self.loss(...))
        if trainer.accelerator.sync_gradients:
            self.norm.value = tensor_parallel.sum_gradients(trainer.model)
        self.phase_ended("backward")
        return loss

    def loss(self, model: PreTrainedModel, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        loss = self.trainer.objective.loss(model, inputs, of_model)  # Trainer: model(**inputs, num_items_in_batch).loss
        self.phase_ended("forward")
        if isinstance(loss, tuple):  # with the outputs, which an evaluation may ask for
            return (self.gate.nan_if_not_finite(loss[0]), *loss[1:])
        return self.gate.nan_if_not_finite(loss)

    # Trainer: norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        scale = self.trainer.loss_scale()
        self.gate.close(self.norm.value, self.trainer.optimizer, scale=scale, step=state.global_step + 1)

    # Trainer: optimizer.step(), which changes no weight if the gate found a loss or a norm that is not finite
    # Trainer: lr_scheduler.step(); model.zero_grad(); state.global_step += 1

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        self.trainer.keep_schedule()
        if self.trainer.asked_to_stop():
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True

    # Trainer: if control.should_log: self.log({"loss": ..., "grad_norm": ..., "learning_rate": ...})

    def log(self, logs: dict[str, float]) -> None:
        reduce = self.trainer.accelerator.reduce
        if "loss" in logs or "eval_loss" in logs:
            logs.update(self.trainer.objective.metrics(self.trainer.model, reduce))
        if "loss" in logs:
            self.gate.put_loss(logs, reduce, self.trainer.state.global_step)
            logs.update(self.speed.take())

    # Trainer: if control.should_evaluate: self.evaluate()

    def on_evaluate(
        self, args: object, state: TrainerState, control: TrainerControl, metrics: Mapping[str, float], **kwargs: object
    ) -> None:
        best = state.best_metric
        if self.trainer.loads_best and (best is None or metrics["eval_loss"] < best):
            control.should_save = True  # so that the best model is always on the disk
        self.speed.restart()

    # Trainer: if control.should_save: self._save_checkpoint(model, trial)

    def on_save(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        if self.trainer.asked_to_stop():
            control.should_training_stop = True
        self.speed.restart()


class Speed:
    """Counts the tokens of a trainer's steps, for the records. The time of evaluation and saving is left out."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._alike = shards_of(trainer.model) * tensor_parallel.group_size(trainer.model)
        self.n_micro_batches = 0
        self.n_positions = 0
        """Tokens of the micro-batches that this process has read, padding included."""
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement."""
        self.n_tokens = 0
        """This process's share of the tokens since then."""
        self._since_s = time.perf_counter()

    @contextmanager
    def counting(self, inputs: object) -> Iterator[None]:
        """Count the tokens of a micro-batch. GRPO's is a list of prompts, whose completions are written inside."""
        if not self.n_micro_batches:
            self.restart()  # other callbacks have started trackers meanwhile
        self.n_micro_batches += 1
        named = inputs.items() if isinstance(inputs, Mapping) else ()
        n_positions = sum(int(value.numel()) for name, value in named if name.endswith("input_ids"))
        self.n_positions += n_positions
        self.n_tokens += n_positions // self._alike
        state = self._trainer.state
        before = state.num_input_tokens_seen
        yield
        # TRL counts the tokens of all processes, and the records multiply by their number.
        self.n_tokens += int(state.num_input_tokens_seen - before) // self._trainer.args.world_size

    def take(self) -> dict[str, float]:
        """The figures for a record, and begin a new measurement."""
        args = self._trainer.args
        tokens_per_s = self.n_tokens * args.world_size / (time.perf_counter() - self._since_s)
        now_bytes, peak_bytes = used_bytes(args.device)
        self.restart()
        return {"tokens_per_s": tokens_per_s, "memory_bytes": now_bytes, "memory_peak_bytes": peak_bytes}
