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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from tigon.errors import PatchError, UsageError, one_line
from tigon.integrations.trl.head import UnfusedWarning
from tigon.integrations.trl.overrides import Override
from tigon.integrations.trl.whole_weights import BorrowingTwin
from tigon.models.decoding.generation_config import objection, settings_of
from tigon.models.decoding.memory import SPARE, cache_bytes, logits_bytes
from tigon.models.decoding.prompt_queue import PromptQueue
from tigon.models.decoding.rows import Limits
from tigon.models.patch import unwrap
from tigon.models.seams.base import is_dtensor
from tigon.techniques.generator_obstacles import HOST_STATES, QUANTIZED_FSDP2, QUANTIZED_ZERO3, TENSOR_PARALLEL
from tigon.techniques.tensor_parallel import group_size
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
        self.patched_since: str | None = None
        """A module that `tigon.patch` changed after `decode_in_graphs`. The copy of the modules lacks the change."""
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
            return f"TRL's generate: transformers generates, because {self.left_to_transformers}"
        line = "TRL's generate: tigon's generator, each prompt once"
        if self._twin is not None:
            line += ", whole weights gathered once for all completions"
        if self.patched_since:
            line += f", without the later tigon.patch of {self.patched_since}"
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
        reason = None
        if (twin := self._twin) is not None:
            reason = _of_any_process(_reason(partial(self._missing_memory, twin, prompts, limits)))
        if self._unchecked and not reason:
            self._unchecked = False
            reason = _of_any_process(_reason(self._refusal_of_whole_model))
        self.left_to_transformers = reason
        if reason and self.required:
            raise UsageError(f"tigon's generator cannot write the completions: {reason}.")
        if reason:
            warnings.warn(f"transformers generates, because {reason}", UnfusedWarning, stacklevel=3)
        elif twin is not None and not self.patched_since and (name := twin.patched_since()):
            self.patched_since = name
            warnings.warn(
                f"tigon's generator writes without the tigon.patch of {name}, which came after decode_in_graphs; call "
                "decode_in_graphs after tigon.patch",
                UnfusedWarning,
                stacklevel=3,
            )

    def _refusal_of_whole_model(self) -> str | None:
        with self._whole_model() as model:
            return _refusal(model)

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
    if obstacle := _obstacle(trainer):
        return f"it does not go with {obstacle}"
    return objection(config, trainer.model.generation_config)


def _obstacle(trainer: Trainer) -> str | None:
    """What of the trainer's engine and of its model's storage the generator does not go with."""
    model, state = unwrap(trainer.model), trainer.accelerator.state
    engine: Mapping[str, Any] = state.deepspeed_plugin.deepspeed_config if trainer.is_deepspeed_enabled else {}
    zero = engine.get("zero_optimization", {})
    policy = state.fsdp_plugin.cpu_offload if trainer.is_fsdp_enabled else None
    if isinstance(policy, CPUOffloadPolicy) or any(_is_on_host(zero, part) for part in ("optimizer", "param")):
        return HOST_STATES
    if _is_quantized(model) and trainer.is_fsdp_enabled:
        return QUANTIZED_FSDP2
    if _is_quantized(model) and zero.get("stage", 0) == 3:
        return QUANTIZED_ZERO3
    mesh = trainer.accelerator.torch_device_mesh
    meshed = mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    meshed = meshed or engine.get("tensor_parallel", {}).get("autotp_size", 0) > 1
    return TENSOR_PARALLEL if meshed or _divides_matrices(model) else None


def _is_on_host(zero: Mapping[str, Any], part: str) -> bool:
    """Whether DeepSpeed's section `zero_optimization` offloads the optimizer's states, or the parameters."""
    return ((zero.get(f"offload_{part}") or {}).get("device") or "none") != "none"


def _is_quantized(model: nn.Module) -> bool:
    """Whether transformers or bitsandbytes stores weights of the model in fewer bits than 16."""
    if getattr(model, "quantization_method", None) or getattr(model, "is_quantized", False):
        return True
    return any(type(weight).__name__ == "Params4bit" for weight in model.parameters())


def _divides_matrices(model: nn.Module) -> bool:
    """Whether transformers or tigon has divided the model's matrices before the training begins."""
    distributed = getattr(model.config, "distributed_config", None)  # since transformers 5
    of_config = distributed.get("tp_size") if isinstance(distributed, Mapping) else getattr(distributed, "tp_size", 1)
    sizes = (getattr(model, "tp_size", 1), of_config, group_size(model))
    if any((size or 1) > 1 for size in sizes):
        return True
    by_fsdp2 = any(isinstance(module, FSDPModule) for module in model.modules())
    return not by_fsdp2 and any(map(is_dtensor, model.parameters()))


def _refusal(model: Any) -> str | None:
    from tigon.models.decoding.self_check import refusal  # loads transformers

    return refusal(model)


def _reason(find: Callable[[], str | None]) -> str | None:
    """What `find` returns, or the error that it raises. A process that left here would let the others wait for it."""
    try:
        return find()
    except torch.OutOfMemoryError as error:
        return f"the memory does not suffice ({one_line(error)})"
    except PatchError as error:
        return str(error)
    except AttributeError as error:
        return f"its modules are not those of the copy ({one_line(error)})"


def _of_any_process(reason: str | None) -> str | None:
    """The reason of the first process that has one."""
    if not dist.is_initialized():
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((one for one in reasons if one), None)
