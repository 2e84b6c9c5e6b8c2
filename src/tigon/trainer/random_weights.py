"""A preset's model with random weights, drawn by transformers' rules."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tigon.models.loading.auto_class import auto_class, refuse_attention
from tigon.recipe.keys import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def undrawn(model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A model with uninitialised weights. In CPU memory they take no physical memory until they are written."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(device):
        try:
            # A copy, because the model keeps and changes it: `config` stays as the preset says.
            return auto_class(config).from_config(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=model.attention,
                trust_remote_code=model.trust_remote_code,
            )
        except (ValueError, ImportError) as error:
            refuse_attention(model.name, model.attention, error)
            raise


def drawn(
    model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, through: torch.device
) -> Any:
    """A preset on `device`, with random weights that `through` draws module by module by transformers' rules.

    The random numbers that PyTorch's constructors draw are skipped, so the weights depend on the seed and `through`
    alone. Drawing a billion weights on the CPU would take a minute.
    """
    built = undrawn(model, config, dtype, device)
    built.tie_weights()
    rules, scratch = inspect.getsource(type(built)._init_weights), through if through != device else None
    done: set[int] = set()
    with torch.no_grad():
        for module in built.modules():
            left = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in done]
            done.update(map(id, left))  # a tied weight is drawn once, by its embedding, which zeroes a padding row
            if left:
                _draw_module(built, module, left, scratch)
        for module in built.modules():
            # Qwen3-Next's block of experts draws the weight of its router, which the router itself leaves at 0.
            if type(module).__name__ in rules and not module._parameters:
                children = [weight for child in module.children() for weight in child.parameters(recurse=False)]
                _draw_module(built, module, children, scratch, keeps=True)
    if scratch and scratch.type == "cuda":
        torch.cuda.empty_cache()  # releases the memory of the largest module
    return built


def _draw_module(
    built: Any, module: Any, weights: Sequence[Any], through: torch.device | None, *, keeps: bool = False
) -> None:
    """Let transformers draw a module's weights, on `through` if it is given. keeps: weights without a rule stay."""
    copies, targets = _draws_into_copies(), [(weight, weight.data) for weight in weights]
    for weight, target in targets if through or copies else ():
        device, dtype = through or target.device, torch.float32 if copies else target.dtype
        weight.data = target.to(device, dtype) if keeps else torch.zeros_like(target, device=device, dtype=dtype)
    built._init_weights(module)
    for weight, target in targets if through or copies else ():
        weight.data = target.copy_(weight.data)


@functools.cache
def _draws_into_copies() -> bool:
    """Whether transformers draws weights of linear layers into an fp32 copy, which 16-bit weights never see (5.8.1)."""
    import transformers

    return "weight.float()" in inspect.getsource(transformers.PreTrainedModel._init_weights)


def make_buffers_anew(
    built: PreTrainedModel, model: ModelConfig, config: PreTrainedConfig, *, dtype: torch.dtype
) -> None:
    """Replace the non-persistent buffers of a model that was built under deepspeed.zero.Init.

    deepspeed.zero.Init casts every tensor of a constructor to 16 bits. A rotary table in bf16 is a radian off after
    1000 tokens.
    """
    correct = dict(undrawn(model, config, dtype, torch.device("cpu")).named_modules())
    for path, module in built.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                module.register_buffer(name, getattr(correct[path], name).to(buffer.device), persistent=False)
