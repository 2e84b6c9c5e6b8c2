"""`decode_in_graphs(trainer)`: tigon's generator in a trainer of TRL, and how far it differs from the training.

TRL's trainers call the model's `generate`, a public method, with padded prompts and a config. The method is replaced on
this model alone. What the generator does not know is left to transformers, with one warning.

The generator keeps the log-probability of each token that it chose. A hook on the model's forward compares them with
those of the trainer's first pass over the same completions, before the weights change. The importance ratio is then 1
except for rounding, and TRL's names for the difference (that it measures for vLLM) say how large it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon.errors import PatchError, UsageError
from tigon.integrations.trl.head import UnfusedWarning
from tigon.integrations.trl.overrides import Override
from tigon.models.decoding.generation_config import objection, settings_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, Trainer

# N prompts, P tokens of a padded prompt, C of a completion, B completions of a micro-batch, T = P + C.

DIFFERENCE = "sampling/sampling_logp_difference"
"""TRL's name for the difference between the log-probabilities of generator and trainer."""


class GraphGeneration:
    """The generator in place of the `generate` of a trainer's model, until `restore`."""

    def __init__(self, trainer: Trainer) -> None:
        """Raises PatchError if the generator cannot write this trainer's completions."""
        from tigon.models.decoding.self_check import refusal  # loads transformers

        self.trainer, self.model = trainer, trainer.model
        self.unread: dict[tuple[int, ...], list[float]] = {}
        """Prompt and completion -> the completion's log-probabilities, of what the trainer has not read yet."""
        self.largest: float | None = None
        """The largest difference of a log-probability from the trainer's so far, in nats."""
        self._step, self._has_warned = -1, False
        reason = _objection(trainer) or refusal(self.model)
        if reason is not None:
            raise PatchError(reason)
        self._override = Override(self.model, "generate", self.generate)
        self._hook = self.model.register_forward_hook(self._compare, with_kwargs=True)

    def __str__(self) -> str:
        line = "TRL's generate: tigon's generator, each prompt once"
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
        written = generate(self.model, prompts, limits, sampling)
        self._step, self.unread = self.trainer.state.global_step, {}
        if self.model.training:
            for prompt, tokens, logprobs in zip(prompts, written.tokens, written.logprobs, strict=True):
                sequence = (*prompt, *tokens)
                self.unread[sequence] = logprobs
        longest = max(map(len, written.tokens))
        pad = generation_config.pad_token_id or 0
        padded = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in written.tokens])
        return torch.cat([input_ids, padded.to(input_ids)], 1)

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


def decode_in_graphs(trainer: Trainer) -> GraphGeneration:
    """Let a TRL trainer write its completions with tigon's generator: CUDA graphs, and each prompt computed once.

    Args:
        trainer: A GRPO, RLOO or distillation trainer of TRL 1.16, before `trainer.train()`. Only this model changes.

    Returns:
        What was replaced, with `restore()`.

    Raises:
        UsageError: The generator cannot write this trainer's completions; the message says why.
    """
    try:
        return GraphGeneration(trainer)
    except PatchError as error:
        raise UsageError(f"tigon's generator cannot write this trainer's completions: {error}.") from None


def _objection(trainer: Trainer) -> str | None:
    """What of the trainer's options the generator does not know."""
    config = getattr(trainer, "generation_config", None)
    if config is None or getattr(trainer, "use_transformers_continuous_batching", False):
        return "this trainer does not call the model's generate"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "weights that are divided among processes are gathered by transformers' generate alone"
    if getattr(trainer, "_is_vlm", False):
        return "the model reads images too"
    return objection(config, trainer.model.generation_config)
