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
    "qwen3_moe": {
        **_SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "output_router_logits": True,
    },
    "gpt_oss": {
        **_SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v2": {
        **_SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    },
    # Hybrids: a gated delta rule, one with a gate per channel beside a router of sigmoids, and Mamba 2.
    "qwen3_5_text": {
        **_SIZES, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "kimi_linear": {
        **_SIZES, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon_h1": {
        **_SIZES, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_rms_norm": True,
    },
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
    # Every expert serves each token: with fewer, a rounding may change the choice between two.
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product, their default, has no fp64
    for parameter in model.parameters():
        value = parameter.detach()
        if parameter.ndim == 1:  # norm weights start at 1 and biases at 0, where mistakes hide
            value = value + torch.randn_like(value) * 0.2
        parameter.data = value.bfloat16().to(dtype)
    # Rotary frequencies are buffers and stay fp32, as in a checkpoint loaded in bf16.
    return (model.double() if dtype == torch.float64 else model).to(device).train()
