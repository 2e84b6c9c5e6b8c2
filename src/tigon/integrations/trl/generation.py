"""`decode_in_graphs(trainer)`: tigon's generator in a trainer of TRL, and how far it differs from the training.

TRL's trainers call the model's `generate`, a public method, with padded prompts and a config. The method is replaced on
this model alone. What the generator does not know is left to transformers, with one warning.

Under FSDP2 all processes gather the whole weights once for all completions, and free them before the update
(`whole_weights`). If they do not fit, transformers generates, and a warning says so.

The generator keeps the log-probability of each token that it chose. A hook on the model's forward compares them with
those of the trainer's first pass over the same completions, before the weights change. The importance ratio is then 1
except for rounding, and TRL's names for the difference (that it measures for vLLM) say how large it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.errors import PatchError, UsageError
from tigon.integrations.trl.head import UnfusedWarning
from tigon.integrations.trl.overrides import Override
from tigon.integrations.trl.whole_weights import BorrowingTwin
from tigon.models.decoding.generation_config import objection, settings_of
from tigon.models.decoding.memory import SPARE, cache_bytes, logits_bytes
from tigon.models.decoding.prompt_queue import PromptQueue
from tigon.models.decoding.rows import Limits
from tigon.units import in_bytes

if TYPE_CHECKING:
    from transformers import GenerationConfig, Trainer

# N prompts, P tokens of a padded prompt, C of a completion, B completions of a micro-batch, T = P + C.

DIFFERENCE = "sampling/sampling_logp_difference"
"""TRL's name for the difference between the log-probabilities of generator and trainer."""


class GraphGeneration:
    """The generator in place of the `generate` of a trainer's model, until `restore`."""

    def __init__(self, trainer: Trainer, *, required: bool = False) -> None:
        """required: whether to raise UsageError where the generator would leave completions to transformers.

        Raises:
            PatchError: The generator cannot write this trainer's completions.
        """
        self.trainer, self.model, self.required = trainer, trainer.model, required
        self.unread: dict[tuple[int, ...], list[float]] = {}
        """Prompt and completion -> the completion's log-probabilities, of what the trainer has not read yet."""
        self.largest: float | None = None
        """The largest difference of a log-probability from the trainer's so far, in nats."""
        self.left_to_transformers: str | None = None
        """Why transformers generates since the training has begun; None if the generator does."""
        self._step, self._has_warned = -1, False
        if reason := _objection(trainer):
            raise PatchError(reason)
        self._twin = BorrowingTwin(self.model) if trainer.is_fsdp_enabled else None
        # Engines place weights on the GPU when the training begins. The generator is checked there, not on the host.
        self._unchecked = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if not self._unchecked and (reason := _refusal(self.model)):
            raise PatchError(reason)
        self._override = Override(self.model, "generate", self.generate)
        self._hook = self.model.register_forward_hook(self._compare, with_kwargs=True)

    def __str__(self) -> str:
        if self.left_to_transformers:
            return f"TRL's generate: transformers', because {self.left_to_transformers}"
        line = "TRL's generate: tigon's generator, each prompt once"
        if self._twin is not None:
            line += ", whole weights gathered once for all completions"
        if self.largest is None:
            return line
        ratio = f"the importance ratio is within {math.expm1(self.largest):.1e} of 1 before an update"
        return f"{line}; log-probabilities per token within {self.largest:.1e} nats of the trainer's, so {ratio}"

    def restore(self) -> None:
        """Give the model its own `generate` back."""
        self._override.restore()
        self._hook.remove()

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **more: object,
    ) -> Tensor:
        """In place of transformers' `generate`. input_ids (N, P), padded at the left; returns (N, P + C)."""
        if input_ids is None or attention_mask is None or generation_config is None or more:
            if generation_config is not None and not self._has_warned:  # without a config it is not the trainer's call
                self._has_warned = True
                warnings.warn(f"transformers generates, because of {', '.join(more)}", UnfusedWarning, stacklevel=2)
            given = {"input_ids": input_ids, "attention_mask": attention_mask, "generation_config": generation_config}
            more |= {name: value for name, value in given.items() if value is not None}
            return self._override.original(**more)  # type: ignore[no-any-return]
        from tigon.models.decoding.generator import generate  # loads transformers

        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids.cpu(), attention_mask.cpu(), strict=True)]
        limits, sampling = settings_of(generation_config)
        self._check(prompts, limits)
        if self.left_to_transformers:
            return self._override.original(  # type: ignore[no-any-return]
                input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config
            )
        with self._whole_model() as model:
            written = generate(model, prompts, limits, sampling)
        self._step, self.unread = self.trainer.state.global_step, {}
        if self.model.training:
            for prompt, tokens, logprobs in zip(prompts, written.tokens, written.logprobs, strict=True):
                sequence = (*prompt, *tokens)
                self.unread[sequence] = logprobs
        longest = max(map(len, written.tokens))
        pad = generation_config.pad_token_id or 0
        padded = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in written.tokens])
        return torch.cat([input_ids, padded.to(input_ids)], 1)

    @contextmanager
    def _whole_model(self) -> Iterator[Any]:
        """A model with whole weights. Under FSDP2 all processes have to enter."""
        if self._twin is None:
            yield self.model
        else:
            with self._twin.borrowed() as twin:
                yield twin

    def _check(self, prompts: Sequence[Sequence[int]], limits: Limits) -> None:
        """Leave this and all later completions to transformers if a process has a reason for it.

        All processes decide alike, because a pass of transformers over divided weights takes all of them.
        """
        if self.left_to_transformers:
            return
        if self._twin is not None:
            self.left_to_transformers = _of_any_process(self._missing_memory(self._twin, prompts, limits))
        if self._unchecked and not self.left_to_transformers:
            self._unchecked = False
            with self._whole_model() as model:
                reason = _refusal(model)
            self.left_to_transformers = _of_any_process(reason)
        if self.left_to_transformers and self.required:
            raise UsageError(f"tigon's generator cannot write the completions: {self.left_to_transformers}.")
        if self.left_to_transformers:
            warnings.warn(f"transformers generates, because {self.left_to_transformers}", UnfusedWarning, stacklevel=3)

    def _missing_memory(self, twin: BorrowingTwin, prompts: Sequence[Sequence[int]], limits: Limits) -> str | None:
        """Why whole weights, keys and values do not fit beside what this process holds; None if they fit."""
        device = self.trainer.args.device
        if device.type != "cuda":
            return None
        policy = getattr(self.trainer.accelerator.state.fsdp_plugin, "mixed_precision_policy", None)
        dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
        config, room = self.model.config.get_text_config(), PromptQueue(prompts).room
        itemsize = (dtype or next(self.model.parameters()).dtype).itemsize
        own = cache_bytes(config, room, limits.new_tokens, itemsize)
        needed = twin.whole_bytes(dtype) + sum(own) + sum(logits_bytes(room.rows, config.vocab_size, itemsize))
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        if SPARE * needed <= free:
            return None
        return f"whole weights, keys and values take {in_bytes(needed)}, and {in_bytes(free)} are free"

    def _compare(self, module: nn.Module, args: object, given: Mapping[str, Any], output: Any) -> None:
        """A forward hook. It reads the first pass over each completion, in the step of the completions alone."""
        logprobs_BT = getattr(output, "log_probs", None)
        if not self.unread or logprobs_BT is None or not torch.is_grad_enabled():
            return
        if self.trainer.state.global_step != self._step:
            self.unread = {}
            return
        differences = []
        labels_BT, mask_BT = given["labels"], given["attention_mask"].bool()
        for row, (ids_T, mask_T) in enumerate(zip(given["input_ids"], mask_BT, strict=True)):
            sampled = self.unread.pop(tuple(ids_T[mask_T].tolist()), None)
            if sampled is None:
                continue
            is_completion = (labels_BT[row] != -100) & mask_T
            own = logprobs_BT[row, -len(ids_T) + 1 :].detach().float()
            trained = own[is_completion[1:][-len(own) :]]
            if len(trained) == len(sampled):
                differences.append((trained - torch.tensor(sampled, device=own.device)).abs())
        if differences:
            metrics = self.trainer._metrics["train"]
            both = torch.cat(differences)
            metrics[f"{DIFFERENCE}/mean"].append(both.mean().item())
            metrics[f"{DIFFERENCE}/max"].append(both.max().item())
            self.largest = max(both.max().item(), self.largest or 0.0)


def decode_in_graphs(trainer: Trainer, *, required: bool = False) -> GraphGeneration:
    """Let a TRL trainer write its completions with tigon's generator: CUDA graphs, and each prompt computed once.

    Args:
        trainer: A GRPO, RLOO or distillation trainer of TRL 1.16, before `trainer.train()`. Only this model changes.
        required: With FSDP2 and DeepSpeed some reasons against the generator are known at the first completions only.
            False: transformers then generates, and a warning says why. True: `train` raises UsageError.

    Returns:
        What was replaced, with `restore()`.

    Raises:
        UsageError: The generator cannot write this trainer's completions; the message says why.
    """
    try:
        return GraphGeneration(trainer, required=required)
    except PatchError as error:
        raise UsageError(f"tigon's generator cannot write this trainer's completions: {error}.") from None


def _objection(trainer: Trainer) -> str | None:
    """What of the trainer's options the generator does not know."""
    config = getattr(trainer, "generation_config", None)
    if config is None or getattr(trainer, "use_transformers_continuous_batching", False):
        return "this trainer does not call the model's generate"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "the weights are divided by FSDP1"
    if trainer.is_deepspeed_enabled and not getattr(trainer.args, "ds3_gather_for_generation", True):
        return "ds3_gather_for_generation is False"
    if getattr(trainer, "_is_vlm", False):
        return "the model reads images too"
    return objection(config, trainer.model.generation_config)


def _refusal(model: Any) -> str | None:
    from tigon.models.decoding.self_check import refusal  # loads transformers

    return refusal(model)


def _of_any_process(reason: str | None) -> str | None:
    """The reason of the first process that has one."""
    if not dist.is_initialized():
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((one for one in reasons if one), None)
