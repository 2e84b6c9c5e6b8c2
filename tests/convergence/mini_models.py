"""The families that are trained: one row each, in the words of the family's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

VOCAB = 89

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MINI_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SIZES, "tie_word_embeddings": True},
    "mistral": {**_SIZES, "sliding_window": 8},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen2": dict(_SIZES),
    "qwen3": {**_SIZES, "head_dim": 16},
    "gemma2": {**_SIZES, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt2": {
        "vocab_size": VOCAB, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "initializer_range": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


def mini_model(
    family: str, dtype: torch.dtype, device: torch.device | str = "cpu", *, seed: int = 0, **overrides: Any
) -> nn.Module:
    """A model in training mode. A family and a seed give the same weights at every call, rounded to bf16 whatever the
    dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**MINI_MODELS[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if dtype == torch.float64 and hasattr(config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the grouped product, their default, has no fp64
    for parameter in model.parameters():
        value = parameter.detach()
        if parameter.ndim == 1:  # norm weights start at 1 and biases at 0, where mistakes hide
            value = value + torch.randn_like(value) * 0.2
        parameter.data = value.bfloat16().to(dtype)
    # Rotary frequencies are buffers and stay fp32, as in a checkpoint loaded in bf16.
    return (model.double() if dtype == torch.float64 else model).to(device).train()
