"""What a model computes for some prompts, and checksums of its weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.errors import one_line


@dataclass(frozen=True)
class Behaviour:
    """What a model computes for some prompts."""

    hidden: tuple[tuple[Tensor, ...], ...] = ()
    """Of each prompt: the embeddings, the output of each layer, and the logits or scores of each token. Empty if the
    model does not run."""
    problem: str | None = None
    """Why the model does not run on this machine."""


def observe(model: Any, prompts: Sequence[Sequence[int]], *, in_fp32: bool = True) -> Behaviour:
    """What a model computes for some prompts, in one batch. Its mode and its weights stay as they were.

    Args:
        model: The model.
        prompts: The tokens of each prompt.
        in_fp32: Whether to compute in fp32 whatever the dtype of the weights, so that only the weights' own rounding
            shows. Without it the model computes in its own dtype.
    """
    was_training = model.training
    # A model with a score finds the end of a prompt by the token that pads. Without one it takes prompts one by one.
    alone = _pad_id(model) is None and model.get_output_embeddings() is None
    batches = [[prompt] for prompt in prompts] if alone else [prompts]
    model.eval()
    try:
        with torch.no_grad(), _weights_in_fp32(model) if in_fp32 else nullcontext():
            return Behaviour(tuple(states for batch in batches if batch for states in _states(model, batch)))
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
        return Behaviour(problem=f"the model does not run on this machine ({one_line(error)})")
    finally:
        model.train(was_training)


def _states(model: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """The states of each prompt of a batch, as in `Behaviour.hidden`."""
    length, device, pad = max(map(len, prompts)), next(model.parameters()).device, _pad_id(model) or 0
    # Padding on the right changes no earlier token of a causal model.
    ids_BT = torch.tensor([[*prompt, *[pad] * (length - len(prompt))] for prompt in prompts], device=device)
    mask_BT = torch.tensor([[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in prompts], device=device)
    out = model(input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False)
    # One score per prompt may be near 0, where a relative difference says nothing. The scores of all tokens are not.
    logits = out.logits
    if logits.ndim == 2:
        logits = (
            model.score(out.hidden_states[-1]) if hasattr(model, "score") else logits[:, None].expand(-1, length, -1)
        )
    states = (*out.hidden_states, logits)
    return [tuple(state[i, : len(prompt)].cpu() for state in states) for i, prompt in enumerate(prompts)]


def _pad_id(model: Any) -> int | None:
    pad: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)
    return pad


@contextmanager
def _weights_in_fp32(model: Any) -> Iterator[None]:
    """In the block a module casts its own weights to fp32 while it computes, so that few are in memory twice."""
    kept: dict[int, Tensor] = {}

    def cast(module: Any, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                kept[id(parameter)] = parameter.data
                parameter.data = parameter.data.float()

    def restore(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(id(parameter), parameter.data)

    hooks = [module.register_forward_pre_hook(cast) for module in model.modules()]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def checksums(model: Any) -> dict[str, int]:
    """A checksum of each tensor's values in fp32, so that neither the dtype nor the class's order matters."""
    seen: dict[tuple[int, torch.Size], int] = {}
    sums = {}
    for name, tensor in model.state_dict().items():
        if ".original_module." in name:  # PEFT's copy from before the training, which computes nothing
            continue
        key = (tensor.data_ptr(), tensor.shape)  # a tied weight is read once
        if key not in seen:
            seen[key] = zlib.crc32(tensor.detach().cpu().float().contiguous().numpy().data)
        sums[name] = seen[key]
    return sums
