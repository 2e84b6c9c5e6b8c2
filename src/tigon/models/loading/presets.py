"""Model shapes by name, with random weights. Memory and speed depend only on the shape, so no download is needed.
`HUB_SHAPES` names the trained weights of a shape.

One row per shape, with the names of its transformers config. Sources: the `config.json` published with each checkpoint,
or what a comment names. A test compares the parameters of the newer shapes with the published counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLUMNS = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
]


def _shape(*values: object, rope: float | Mapping[str, Any], **others: object) -> Mapping[str, Any]:
    """The fields of a config. values: those of `_COLUMNS`; rope: theta, or `rope_parameters`."""
    parameters = rope if isinstance(rope, Mapping) else {"rope_type": "default", "rope_theta": rope}
    return {**dict(zip(_COLUMNS, values, strict=True)), "rope_parameters": parameters, **others}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def _qwen3_5(*values: object, model_type: str = "qwen3_5_text", **others: object) -> Mapping[str, Any]:
    """The part of Qwen3.5 that reads text. values: hidden_size to num_key_value_heads, then tie_word_embeddings.

    Three of four layers have a gated delta rule. Sources: scripts/models/qwen3.5-*.sh in radixark/miles and
    THUDM/slime; google/tunix and the defaults of transformers for the heads of the delta rule.
    """
    *sizes, tied = values
    return _shape(model_type, 248320, *sizes, 262144, 1e-6, tied, rope=_QWEN_ROPE, head_dim=256, **others)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # 1.8 M parameters, for a CPU. The vocabulary is large relative to the layers, as in commonly fine-tuned models.
    # 1/sqrt(hidden) as initializer_range: after 400 steps of 1024 tokens the eval loss is 5.36 with 0.06 and 5.60 with
    # Llama's 0.02.
    "tigon-demo": _shape("llama", 8192, 128, 352, 4, 4, 2, 2048, 1e-5, True, rope=10000.0, initializer_range=0.09),
    # 0.13 B: fits an 8 GiB GPU with fp32 master weights.
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, 9, 3, 8192, 1e-5, True, rope=100000.0),
    "smollm2-1.7b": _shape("llama", 49152, 2048, 8192, 24, 32, 32, 8192, 1e-5, True, rope=130000.0),
    "llama-3.2-1b": _shape("llama", 128256, 2048, 8192, 16, 32, 8, 131072, 1e-5, True,
        rope=_LLAMA3_ROPE | {"factor": 32.0}, head_dim=64),
    "llama-3.2-3b": _shape("llama", 128256, 3072, 8192, 28, 24, 8, 131072, 1e-5, True,
        rope=_LLAMA3_ROPE | {"factor": 32.0}, head_dim=128),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, 32, 8, 131072, 1e-5, False,
        rope=_LLAMA3_ROPE | {"factor": 8.0}),
    "llama-3.1-70b": _shape("llama", 128256, 8192, 28672, 80, 64, 8, 131072, 1e-5, False,
        rope=_LLAMA3_ROPE | {"factor": 8.0}),
    "llama-3.1-405b": _shape("llama", 128256, 16384, 53248, 126, 128, 8, 131072, 1e-5, False,
        rope=_LLAMA3_ROPE | {"factor": 8.0}),
    "llama-3-8b": _shape("llama", 128256, 4096, 14336, 32, 32, 8, 8192, 1e-5, False, rope=500000.0),
    "llama-2-7b": _shape("llama", 32000, 4096, 11008, 32, 32, 32, 4096, 1e-5, False, rope=10000.0),
    "olmo-2-1b": _shape("olmo2", 100352, 2048, 8192, 16, 16, 16, 4096, 1e-6, False, rope=500000.0),
    "qwen3-0.6b": _shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, 1e-6, True, rope=1000000.0, head_dim=128),
    "qwen3-1.7b": _shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 40960, 1e-6, True, rope=1000000.0, head_dim=128),
    "qwen3-4b": _shape("qwen3", 151936, 2560, 9728, 36, 32, 8, 40960, 1e-6, True, rope=1000000.0, head_dim=128),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, 1e-6, False, rope=1000000.0, head_dim=128),
    "qwen3-32b": _shape("qwen3", 151936, 5120, 25600, 64, 64, 8, 40960, 1e-6, False, rope=1000000.0, head_dim=128),
    # 30.5 B parameters, of which 3.3 B compute each token
    "qwen3-30b-a3b": _shape("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 40960, 1e-6, False,
        rope=1000000.0, moe_intermediate_size=768, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True),
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, 8, 2, True, linear_num_value_heads=16),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, 8, 2, True, linear_num_value_heads=16),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, 16, 4, True, linear_num_value_heads=32),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, 16, 4, False, linear_num_value_heads=32),
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, 24, 4, False, linear_num_value_heads=48),
    # 34.7 B parameters, of which about 3 B compute each token
    "qwen3.5-35b-a3b": _qwen3_5(2048, 512, 40, 16, 2, False, model_type="qwen3_5_moe_text", linear_num_value_heads=32,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8),
    # scripts/models/qwen3-next-80B-A3B.sh in THUDM/slime; the defaults of transformers for the delta rule
    "qwen3-next-80b-a3b": _shape("qwen3_next", 151936, 2048, 5120, 48, 16, 2, 262144, 1e-6, False,
        rope=_QWEN_ROPE, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
    # Sigmoid routers. scripts/models/glm4.5-106B-A12B.sh and glm4.7-30B-A3B.sh in vllm-project/vime, and the defaults
    # of transformers. The checkpoint's layer for multi-token prediction is not loaded, and not counted.
    "glm-4.5-air": _shape("glm4_moe", 151552, 4096, 10944, 46, 96, 8, 131072, 1e-5, False,
        rope={"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}, head_dim=128,
        attention_bias=True, moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0),
    "glm-4.7-flash": _shape("glm4_moe_lite", 154880, 2048, 10240, 47, 20, 20, 202752, 1e-5, False,
        rope=1000000.0, moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
        routed_scaling_factor=1.8, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256),
    # A delta rule with a gate per channel in 20 of 27 layers; the other seven have no rotary embedding. The defaults of
    # transformers, which are this checkpoint's, except for the layers with attention: 4, 8, ... 24 and 27.
    "kimi-linear-48b-a3b": _shape("kimi_linear", 163840, 2304, 9216, 27, 32, 32, 1048576, 1e-5, False,
        rope=10000.0, moe_intermediate_size=1024, num_experts=256, num_experts_per_tok=8, n_shared_experts=1,
        n_group=1, routed_scaling_factor=2.446, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, linear_num_heads=32, linear_head_dim=128,
        layer_types=["full_attention" if i % 4 == 0 or i == 27 else "linear_attention" for i in range(1, 28)]),
    # a vocabulary of 256,000 and capped logits
    "gemma-2-2b": _shape("gemma2", 256000, 2304, 9216, 26, 8, 4, 8192, 1e-6, True,
        rope=10000.0, head_dim=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        query_pre_attn_scalar=256, sliding_window=4096),
    # five layers with a window of 512 tokens before each layer without
    "gemma-3-1b": _shape("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, 1e-6, True,
        rope={"full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        head_dim=256, query_pre_attn_scalar=256, sliding_window=512),
    # The published longrope scales 48 frequencies; the shape of the model does not depend on them.
    "phi-4-mini": _shape("phi3", 200064, 3072, 8192, 32, 24, 8, 131072, 1e-5, True,
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        original_max_position_embeddings=4096, sliding_window=262144, pad_token_id=199999, bos_token_id=199999,
        eos_token_id=199999),
    # 20.9 B parameters, of which 3.6 B compute each token; without the checkpoint's 4-bit storage of the experts
    "gpt-oss-20b": _shape("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 131072, 1e-5, False,
        rope={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
              "original_max_position_embeddings": 4096, "truncate": False},
        head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128),
    "mistral-7b-v0.3": _shape("mistral", 32768, 4096, 14336, 32, 32, 8, 32768, 1e-5, False,
        rope=1000000.0, sliding_window=None),
    # the three models that the Liger Kernel paper measures in addition to llama-3-8b
    "gemma-7b": _shape("gemma", 256000, 3072, 24576, 28, 16, 16, 8192, 1e-6, True, rope=10000.0, head_dim=256),
    "mistral-7b": _shape("mistral", 32000, 4096, 14336, 32, 32, 8, 32768, 1e-5, False,
        rope=10000.0, sliding_window=4096),
    "qwen2-7b": _shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 131072, 1e-6, False, rope=1000000.0),
}  # fmt: skip

HUB_SHAPES: Mapping[str, str] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    "Qwen/Qwen2-7B": "qwen2-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3.5-0.8B": "qwen3.5-0.8b",
    "Qwen/Qwen3.5-2B": "qwen3.5-2b",
    "Qwen/Qwen3.5-4B": "qwen3.5-4b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "Qwen/Qwen3.5-27B": "qwen3.5-27b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3.5-2B-Base": "qwen3.5-2b",
    "Qwen/Qwen3.5-4B-Base": "qwen3.5-4b",
    "Qwen/Qwen3.5-9B-Base": "qwen3.5-9b",
    "Qwen/Qwen3.6-27B": "qwen3.5-27b",
    "Qwen/Qwen3.6-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "allenai/OLMo-2-0425-1B": "olmo-2-1b",
    "google/gemma-2-2b-it": "gemma-2-2b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "google/gemma-7b-it": "gemma-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama-3.1-405b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3.2-3b",
    "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama-3.2-3b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "microsoft/Phi-4-mini-instruct": "phi-4-mini",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi-linear-48b-a3b",
    "unsloth/gpt-oss-20b-BF16": "gpt-oss-20b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "zai-org/GLM-4.7-Flash": "glm-4.7-flash",
}
"""Hub ids -> the preset with the checkpoint's shape, so that a plan needs no download. Commands name the first id."""

COPIES = "unsloth"
"""An owner whose models have the names and configs of the original ones."""


def _gemma4(
    vision: Mapping[str, Any] | None, *sizes: object, window: int, model_type: str = "gemma4", **text: object
) -> Mapping[str, Any]:
    """Gemma 4. vision: its encoder, or None for transformers' defaults, with which a model hears too; sizes:
    hidden_size to num_key_value_heads.

    Sources: tunix/models/gemma4/config.py in google/tunix; the defaults of transformers for rotary embeddings and the
    other encoders. Five layers with a window stand before each without, whose heads have 512 dimensions.
    """
    text_config = {
        "vocab_size": 262144,
        **dict(zip(_COLUMNS[2:7], sizes, strict=True)),
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 262144 if vision else 131072,
        "sliding_window": window,
        "final_logit_softcapping": 30.0,
        **text,
    }
    encoders = {"vision_config": vision or {}, "audio_config": None if vision else {}}
    return {"model_type": model_type, "text_config": text_config, **encoders}


_VISION_27 = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
_GEMMA4_VISION = {**_VISION_27, "num_key_value_heads": 16, "head_dim": 72, "standardize": True}

MULTIMODAL_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "vision_config": {**_VISION_27, "image_size": 896, "patch_size": 14},
    },
    "google/gemma-4-E2B-it": _gemma4(None, 1536, 6144, 35, 8, 1, window=512, num_kv_shared_layers=20,
        use_double_wide_mlp=True, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7),
    "google/gemma-4-E4B-it": _gemma4(None, 2560, 10240, 42, 8, 2, window=512, num_kv_shared_layers=18),
    "google/gemma-4-12B-it": _gemma4(None, 3840, 15360, 48, 16, 8, window=1024, model_type="gemma4_unified",
        attention_k_eq_v=True, num_global_key_value_heads=1, max_position_embeddings=262144),
    "google/gemma-4-31B-it": _gemma4(_GEMMA4_VISION, 5376, 21504, 60, 32, 16, window=1024, attention_k_eq_v=True,
        num_global_key_value_heads=4, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
    # 25.2 B parameters in the text's part, of which 3.8 B compute each token
    "google/gemma-4-26B-A4B-it": _gemma4(_GEMMA4_VISION, 2816, 2112, 30, 16, 8, window=1024, attention_k_eq_v=True,
        num_global_key_value_heads=2, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704, use_bidirectional_attention="vision"),
}  # fmt: skip
"""Shapes of models that also read images. They are not presets: `model.config` changes only a flat config."""


def carried(hub_id: str) -> str | None:
    """What `load_config` takes for the shape of this model of the hub, or None if tigon does not carry it.

    Case does not count, because ids are often typed without capitals. A folder of this name on disk is what is meant.
    """
    if Path(hub_id).is_dir():
        return None
    owner, _, name = hub_id.lower().partition("/")
    for known in (*HUB_SHAPES, *MULTIMODAL_SHAPES):
        if known.lower() == hub_id.lower() or (owner == COPIES and known.lower().endswith(f"/{name}")):
            return HUB_SHAPES.get(known, known)
    return None


def checkpoint_of(preset: str) -> str | None:
    """The hub id of the trained weights with the shape of `preset`; None for tigon-demo and for other names."""
    return next((hub_id for hub_id, name in HUB_SHAPES.items() if name == preset), None)
