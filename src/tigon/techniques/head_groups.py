"""Attention whose backward pass processes one group of heads after another.

A fused kernel's memory grows linearly with the tokens of a micro-batch. Its backward pass adds an fp32 copy of dQ and,
if query heads share key heads, a dK and a dV for each query head. For Llama-3.2-1B at 524,288 tokens this is 8 GiB, and
Q has 2 GiB. Heads are independent, so groups of heads can take turns, and only one group needs scratch memory at a
time.

The forward pass stays one call, because its output is one tensor. Checkpointing may keep its results for the layer's
recomputation (`train.checkpointing: offload-attention`). The backward pass calls PyTorch's kernel on slices
of the saved tensors and writes slices of dQ, dK and dV. If that kernel cannot be used (a mask, fp32), the whole
function is called for each group, and a copy joins the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from tigon.errors import RecipeError
from tigon.ops import recomputation
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Search, Spans, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# B batch, h query heads, k key heads, T tokens, D head width.

Attend = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers: (module, query (B, h, T, D), key (B, k, T, D), value, attention_mask, ...) ->
(out (B, T, h, D), weights or None)."""


class _Kernel(NamedTuple):
    """One of PyTorch's causal attentions."""

    forward: Callable[..., Any]
    """(q, k, v, scale) -> (out, log-sum-exp (B, h, T, ...), more tensors that its backward takes)"""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(dout, q, k, v, out, lse, rest, scale) -> (dq, dk, dv)"""
    shares_key_heads: bool


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return results[0], results[1], results[2:8]


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return results[0], results[1], results[2:8]


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, lse, ()


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse, 0.0, True, scale=scale
    )


_KERNELS: Mapping[tuple[str, SDPBackend], _Kernel] = {
    ("cuda", SDPBackend.CUDNN_ATTENTION): _Kernel(_cudnn_forward, _cudnn_backward, shares_key_heads=True),
    ("cuda", SDPBackend.FLASH_ATTENTION): _Kernel(_flash_forward, _flash_backward, shares_key_heads=True),
    ("cpu", SDPBackend.FLASH_ATTENTION): _Kernel(_cpu_forward, _cpu_backward, shares_key_heads=False),
}


class _Grouped(torch.autograd.Function):
    """Causal attention. Like PyTorch's, it saves q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: _Kernel, groups: int, scale: float | None) -> Tensor:
        out_BhTD, lse_BhT, rest = recomputation.compute_once(lambda: kernel.forward(q, k, v, scale))
        ctx.save_for_backward(q, k, v, out_BhTD, lse_BhT)
        ctx.kernel, ctx.rest, ctx.groups, ctx.scale = kernel, rest, groups, scale
        return out_BhTD  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        made = [torch.empty_like(x) for x in saved[:3]]
        key_heads = saved[1].shape[1]
        parts_per_key_head = max(1, ctx.groups // key_heads)
        by_group: list[Sequence[Tensor]] = []
        for x in (dout, *saved, *made):
            shared = x.shape[1] == key_heads and parts_per_key_head > 1
            chunks = x.chunk(key_heads if shared else ctx.groups, dim=1)
            by_group.append([one for one in chunks for _ in range(parts_per_key_head)] if shared else chunks)
        for number, (dout_g, q, k, v, out, lse, dq, dk, dv) in enumerate(zip(*by_group, strict=True)):
            gradients = ctx.kernel.backward(dout_g, q, k, v, out, lse.contiguous(), ctx.rest, ctx.scale)
            dq.copy_(gradients[0])
            for target, part in zip((dk, dv), gradients[1:], strict=True):
                if number % parts_per_key_head:
                    target.add_(part)
                else:
                    target.copy_(part)
            del gradients, part  # otherwise they stay until the next group's exist
        return *made, None, None, None


def in_groups(attend: Attend, groups: int) -> Attend:
    """Returns `attend` with scratch memory for one group of heads at a time.

    More groups than key heads divide the query heads of each key head.
    """

    def grouped(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
        if not torch.is_grad_enabled():  # the forward pass needs no scratch memory
            return attend(module, query, key, value, attention_mask, **rest)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        plain = attention_mask is None and causal and dropout == 0 and options.get("position_bias") is None
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        kernel = _kernel_for(query, key, value) if plain else None
        if kernel is None:
            parts = min(groups, key.shape[1])
            by_parts = one_by_one(attend, parts) if parts > 1 else attend
            return by_parts(module, query, key, value, attention_mask, **rest)
        out_BhTD: Tensor = _Grouped.apply(query, key, value, kernel, groups, scaling)
        return out_BhTD.transpose(1, 2).contiguous(), None

    return grouped


def _kernel_for(query: Tensor, key: Tensor, value: Tensor) -> _Kernel | None:
    """Returns the kernel that PyTorch chooses for these tensors: on Hopper and later cuDNN's, which is faster there
    (docs/log/2026-11.md, "cuDNN's")."""
    width, shared = query.shape[-1], query.shape[1] != key.shape[1]
    if not query.shape[2] == key.shape[2] > 1 or value.shape[-1] != width or width % 8:
        return None
    if not query.dtype == key.dtype == value.dtype or query.device.type not in {device for device, _ in _KERNELS}:
        return None
    choice = SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=shared))
    kernel = _KERNELS.get((query.device.type, choice))
    return None if kernel is None or (shared and not kernel.shares_key_heads) else kernel


def one_by_one(attend: Attend, groups: int) -> Attend:
    """Returns a function that calls `attend` for each group in turn."""

    def grouped(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        parts = zip(*(x.chunk(groups, dim=1) for x in (query, key, value)), strict=True)
        return torch.cat([attend(module, q, k, v, attention_mask, **options)[0] for q, k, v in parts], dim=2), None

    return grouped


def _fits(config: PreTrainedConfig, settings: Settings) -> None:
    check_groups(config, settings.train.attention_groups)


def _trace(model: PreTrainedModel, settings: Settings, spans: Spans) -> None:
    check_groups(model.config, settings.train.attention_groups)


def _group(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    replace_attention(model, settings.train.attention_groups)
    return model


def replace_attention(model: PreTrainedModel, groups: int) -> Callable[[], None]:
    """Let this model's sdpa compute in groups. Returns a function that undoes it."""
    check_groups(model.config, groups)
    return replace_sdpa(model, f"sdpa_in_{groups}_groups", lambda attend: in_groups(attend, groups))


def replace_sdpa(model: nn.Module, name: str, wrap: Callable[[Attend], Attend]) -> Callable[[], None]:
    """Register a version of sdpa with transformers under its own name, and set that name in this model's configs.

    Returns a function that sets their names again.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, wrap(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    replaced = [config for config in configs.values() if config._attn_implementation == "sdpa"]
    for config in replaced:
        config._attn_implementation_internal = name

    def undo() -> None:
        for config in replaced:
            config._attn_implementation_internal = "sdpa"

    return undo


def text_config(config: PreTrainedConfig) -> Any:
    """Returns the part of a transformers config that describes the language model: itself for a model of text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_text_alone(config: PreTrainedConfig, key: str) -> None:
    """Raise RecipeError, which names `key`, unless a transformers config is of a model of text."""
    if text_config(config) is not config:
        raise RecipeError(
            f"{key} takes models of text, and {config.model_type} takes images or sound too; set {key}: 1"
        )


def check_has_attention(config: PreTrainedConfig, key: str) -> None:
    """Raise RecipeError, which names `key`, for a family without attention, such as Mamba."""
    text = text_config(config)
    if not hasattr(text, "num_attention_heads"):
        raise RecipeError(f"{key} divides attention heads, and {text.model_type} has none; set {key}: 1")


def key_heads(config: PreTrainedConfig) -> int:
    """Returns the number of key heads of a transformers config, or the largest divisor of those of all layers; 1 for a
    family without attention, such as Mamba."""
    text = text_config(config)
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]  # Gemma 4's layers differ
    numbers = (getattr(each, "num_key_value_heads", None) or getattr(each, "num_attention_heads", 1) for each in layers)
    return math.gcd(*(int(number or 1) for number in numbers))


def check_groups(config: PreTrainedConfig, groups: int) -> None:
    """Raise RecipeError unless `groups` divides the key heads of a transformers config, or the query heads of each."""
    if groups == 1:
        return
    check_has_attention(config, "train.attention_groups")
    n_heads, n_query_heads = key_heads(config), int(text_config(config).num_attention_heads)
    if n_heads % groups and (groups % n_heads or n_query_heads % groups):
        shared = f", or a multiple of it that divides {n_query_heads}" if n_query_heads > n_heads else ""
        raise RecipeError(
            f"train.attention_groups is {groups}, and the model has {n_heads} key heads; choose a divisor of "
            f"{n_heads}{shared}"
        )


DECLARATION = Declaration(
    searches=(
        Search(key="train.attention_groups", how="long samples", candidates=lambda config: (key_heads(config),)),
    ),
    labels={"train.attention_groups": "attention in {} groups"},
    techniques=(
        Technique(
            name="grouped-attention",
            recipe={"train.attention_groups": 4},
            chosen=(Condition("train.attention_groups", "is at least", 2),),
            model=_group,
            fits=_fits,
            trace=_trace,
        ),
    ),
    exclusions=(
        Exclusion(
            when=(
                Condition("train.attention_groups", "is at least", 2),
                Condition("model.attention", "is not", "sdpa"),
            ),
            reason="the groups are calls of the sdpa function",
            instead="model.attention: sdpa",
            source="tigon.techniques.head_groups",
        ),
    ),
)
