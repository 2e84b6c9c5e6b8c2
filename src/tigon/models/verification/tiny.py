"""Small random models of any family of transformers, for `verify`.

The sizes below are set in every config with a field of that name; a family's row adds others. Weights are drawn wide
enough for every nonlinearity to matter: at 0.02 a gate is linear, and a cap of 30 has no effect on small logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.errors import PatchError

VOCAB = 97
LAYERS = 2

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "intermediate_size_mlp": 48,
        # mixtures of experts
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        # latent attention
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        # state space and linear attention layers
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "mamba_d_state": 8,
        "mamba_d_head": 8,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_ssm": 64,
        "mamba_chunk_size": 8,
    }
)
_VISION: Mapping[str, Any] = MappingProxyType({"depth": 1, "image_size": 16, "patch_size": 8, "num_hidden_layers": 1})


def tiny_config(
    model_type: str, overrides: Mapping[str, Any] = MappingProxyType({}), sizes: Mapping[str, Any] = SIZES
) -> Any:
    """A config of the family with these sizes. Raises PatchError if transformers does not know the family."""
    from transformers import CONFIG_MAPPING

    try:
        cls = CONFIG_MAPPING[model_type]
    except KeyError:
        raise PatchError(f"this version of transformers has no model_type {model_type!r}.") from None
    overrides = dict(overrides)
    for name, parts in dict(getattr(cls, "sub_configs", {})).items():
        own = dict(overrides.pop(name, {}))
        default = getattr(cls(), name, None)
        if default is None:
            continue
        if name == "text_config":
            overrides[name] = tiny_config(own.pop("model_type", default.model_type), own, sizes).to_dict()
        else:
            del parts
            overrides[name] = {**_accepted(type(default), {**SIZES, **_VISION}), **own}
    return cls(**{**_accepted(cls, sizes), **overrides})


def _accepted(cls: type, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes for which a config class has a field, and every dropout field set to 0."""
    names = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "attribute_map", {}))  # type: ignore[misc]
    known = {name: value for name, value in sizes.items() if name in names}
    silent = {name: 0.0 for name in names if "dropout" in name or name.endswith("pdrop")}
    return {**silent, **known}


def tiny_model(
    model_type: str, overrides: Mapping[str, Any] = MappingProxyType({}), *, every_expert: bool = False
) -> nn.Module:
    """A causal language model of the family in fp32 on the CPU, in training mode, with the same weights at every call.

    With `every_expert`, mixtures send each token through all experts. Otherwise a difference in rounding could change
    the choice between two nearly equal experts, and the results could not be compared.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = tiny_config(model_type, overrides)
    if every_expert and hasattr(config, "num_experts_per_tok"):
        config.num_experts_per_tok = SIZES["num_experts"]
    sees = "vision_config" in config.sub_configs and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: nn.Module = auto.from_config(config, dtype=torch.float32)
        # Norm weights start at 1 (or 0) and biases at 0, which would hide mistakes.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def tiny_batch(device: torch.device, rows: int = 2, tokens: int = 18) -> dict[str, Tensor]:
    """input_ids and labels (rows, tokens); the first third of row 0 is masked like a prompt."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, VOCAB - 4, (rows, tokens), generator=generator)
    labels = input_ids.clone()
    labels[0, : tokens // 3] = -100
    return {"input_ids": input_ids.to(device), "labels": labels.to(device)}
