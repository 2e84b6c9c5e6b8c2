"""The location in tigon of each name of `liger_kernel`. Any other name under `liger_kernel` is refused by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tigon.compat.liger.patching.families import SIGNATURES

VERSION = "0.8.5"
"""The Liger Kernel version whose names, argument orders and defaults are used."""

_HERE = __name__.rpartition(".")[0]

# Module of liger_kernel.ops -> its names; Functions are in `ops/functions.py`, the rest in `ops/launchers.py`.
_OPS = {
    "rms_norm": ("LigerRMSNormFunction", "rms_norm_forward", "rms_norm_backward"),
    "fused_add_rms_norm": (
        "LigerFusedAddRMSNormFunction", "fused_add_rms_norm_forward", "fused_add_rms_norm_backward",
    ),
    "layer_norm": ("LigerLayerNormFunction", "layer_norm_forward", "layer_norm_backward"),
    "rope": ("LigerRopeFunction", "rope_forward", "rope_backward"),
    "swiglu": (
        "LigerSiLUMulFunction", "swiglu_forward", "swiglu_backward",
        "LigerFusedGateUpSiLUMulFunction", "swiglu_fused_gate_up_forward", "swiglu_fused_gate_up_backward",
    ),
    "geglu": ("LigerGELUMulFunction", "geglu_forward", "geglu_backward"),
    "cross_entropy": ("LigerCrossEntropyFunction", "cross_entropy_forward", "cross_entropy_backward"),
    "fused_linear_cross_entropy": (
        "LigerFusedLinearCrossEntropyFunction",
        "fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward",
    ),
}  # fmt: skip

# Module of liger_kernel.transformers -> its names, in `transformers/modules.py`.
_MODULES = {
    "rms_norm": ("LigerRMSNorm",),
    "fused_add_rms_norm": ("LigerFusedAddRMSNorm",),
    "layer_norm": ("LigerLayerNorm",),
    "swiglu": ("LigerSwiGLUMLP", "LigerPhi3SwiGLUMLP"),
    "geglu": ("LigerGEGLUMLP",),
    "cross_entropy": ("LigerCrossEntropyLoss",),
    "fused_linear_cross_entropy": ("LigerFusedLinearCrossEntropyLoss",),
}

_FUNCTIONAL = (
    "CrossEntropyOutput", "liger_cross_entropy", "liger_fused_add_rms_norm", "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd", "liger_fused_linear_kl_div", "liger_geglu", "liger_jsd", "liger_kl_div",
    "liger_layer_norm", "liger_rms_norm", "liger_rope", "liger_swiglu", "liger_tvd",
)  # fmt: skip

# Module of liger_kernel.ops and of liger_kernel.transformers -> its Function and its module, both `divergences.py`.
_DIVERGENCES = {
    "jsd": ("LigerJSDFunction", "LigerJSD"),
    "kl_div": ("LigerKLDivLossFunction", "LigerKLDIVLoss"),
    "tvd": ("LigerTVDLossFunction", "LigerTVDLoss"),
    "fused_ce_tvd": ("LigerFusedCETVDFunction", "LigerFusedCETVDLoss"),
    "fused_linear_jsd": ("LigerFusedLinearJSDFunction", "LigerFusedLinearJSD"),
    "fused_linear_kl_div": ("LigerFusedLinearKLDivFunction", "LigerFusedLinearKLDivLoss"),
}

# Module of liger_kernel.ops -> (file in `compositions/`, its Functions and other names). All are compositions.
_COMPOSED_OPS = {
    "attn_res": ("attention", ("LigerAttnResFunction",)),
    "dyt": ("norms", ("LigerDyTFunction",)),
    "experimental.embedding": ("activations", ("LigerEmbeddingFunction",)),
    "fused_linear_scaled_cross_entropy": (
        "scaled_cross_entropy",
        ("LigerFusedLinearScaledCrossEntropyFunction", "LigerFusedLinearScaledCrossEntropyTPFunction"),
    ),
    "fused_moe": ("mlps", ("LigerFusedMoEFunction",)),
    "fused_neighborhood_attention": ("attention", ("LigerFusedNeighborhoodAttentionFunction",)),
    "group_norm": ("norms", ("LigerGroupNormFunction",)),
    "llama4_rope": ("rotary", ("LigerLlama4RopeFunction",)),
    "mhc": ("hyper_connections", ("LigerMHCCoeffsFunction", "LigerMHCPreFunction", "LigerMHCPostResFunction")),
    "mlp": ("mlps", ("LigerMLPFunction",)),
    "modulated_rms_norm": ("norms", ("LigerModulatedRMSNormFunction",)),
    "multi_token_attention": ("attention", ("LigerMultiTokenAttentionFunction",)),
    "poly_norm": ("norms", ("LigerPolyNormFunction",)),
    "qwen2vl_mrope": ("rotary", ("LigerQwen2VLMRopeFunction",)),
    "relu_squared": ("activations", ("LigerReLUSquaredFunction",)),
    "softmax": ("activations", ("LigerSoftmaxFunction",)),
    "sparsemax": ("activations", ("LigerSparsemaxFunction",)),
    "tiled_mlp": ("mlps", ("LigerTiledMLPFunction", "apply_tiled_mlp")),
    "vocab_parallel_cross_entropy": ("vocab_parallel", ("LigerVocabParallelCEFunction",)),
}

# Module of liger_kernel.transformers -> (file in this package, names that only the module has, names that
# liger_kernel.transformers has too).
_COMPOSED_MODULES = {
    "dyt": ("compositions.norms", (), ("LigerDyT",)),
    "experimental.embedding": ("compositions.activations", ("LigerEmbedding",), ()),
    "fused_neighborhood_attention": (
        "compositions.attention",
        (
            "LigerFusedNeighborhoodAttention", "LigerFusedNeighborhoodAttentionLayer",
            "LigerFusedNeighborhoodAttentionConfig",
        ),
        (),
    ),
    "geglu": ("transformers.family_mlps", ("LigerGEGLUMLPForGemma4",), ()),
    "group_norm": ("compositions.norms", ("LigerGroupNorm",), ()),
    "llama4_rope": (
        "compositions.rotary", (), ("liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb"),
    ),
    "mhc": ("compositions.hyper_connections", (), ("LigerMHC",)),
    "mlp": ("transformers.family_mlps", (), ("LigerMLP", "LigerFalconH1MLP")),
    "modulated_rms_norm": ("compositions.norms", (), ("LigerModulatedRMSNorm",)),
    "multi_token_attention": ("compositions.attention", (), ("LigerMultiTokenAttention",)),
    "poly_norm": ("compositions.norms", (), ("LigerPolyNorm",)),
    "qwen2vl_mrope": ("compositions.rotary", ("liger_multimodal_rotary_pos_emb",), ()),
    "relu_squared": ("compositions.activations", (), ("LigerReLUSquared",)),
    "rms_norm": (
        "transformers.family_norms",
        (
            "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3", "LigerRMSNormForGemma4",
            "LigerRMSNormForOlmo2", "LigerRMSNormForGlm4", "LigerRMSNormForQwen3Next",
        ),
        ("LigerRMSNormForMuseGlimmer", "LigerRMSNormForMuseGlimmerTextCentered"),
    ),
    "rope": ("compositions.rotary", ("liger_rotary_pos_emb_gpt_oss", "liger_rotary_pos_emb_vision"), ()),
    "softmax": ("compositions.activations", (), ("LigerSoftmax",)),
    "sparsemax": ("compositions.activations", (), ("LigerSparsemax",)),
    "swiglu": (
        "transformers.family_mlps",
        ("LigerHunyuanV1SwiGLUMLP",),
        (
            "LigerBlockSparseTop2MLP", "LigerExperts", "LigerFalconH1SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP",
            "LigerSwiGLUMLPForMuseGlimmer",
        ),
    ),
    "tiled_mlp": ("transformers.family_mlps", (), ("LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP")),
    "vocab_parallel_cross_entropy": ("compositions.vocab_parallel", (), ("LigerVocabParallelCrossEntropy",)),
}  # fmt: skip

# File in `compositions/` -> its names of liger_kernel.transformers.functional.
_COMPOSED_FUNCTIONAL = {
    "activations": ("liger_relu_squared", "liger_softmax", "liger_sparsemax"),
    "attention": ("liger_attn_res", "liger_fused_neighborhood_attention", "liger_multi_token_attention"),
    "hyper_connections": (
        "liger_mhc_apply", "liger_mhc_coeffs", "liger_mhc_forward", "liger_mhc_post_res", "liger_mhc_pre",
    ),
    "norms": ("liger_dyt", "liger_group_norm", "liger_modulated_rms_norm", "liger_poly_norm"),
    "rotary": ("liger_qwen2vl_mrope",),
    "scaled_cross_entropy": ("liger_fused_linear_scaled_cross_entropy_tp",),
}  # fmt: skip

_UTILS = (
    "infer_device", "infer_comm_backend", "is_npu_available", "is_peft_available", "transformers_version_dispatch",
)  # fmt: skip

_SHORT = (
    "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd", "kl_div",
    "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
)  # fmt: skip

# Module of liger_kernel.chunked_loss -> (its file in `chunked_loss/`, infix of its class and of its Function).
_CHUNKED = {
    "cosine_similarity_loss": ("distillation", "CosineSimilarity"),
    "cpo_loss": ("preference", "CPO"),
    "dpo_loss": ("preference", "DPO"),
    "grpo_loss": ("policy", "GRPO"),
    "jsd_loss": ("distillation", "JSD"),
    "kto_loss": ("unpaired", "KTO"),
    "orpo_loss": ("preference", "ORPO"),
    "simpo_loss": ("preference", "SimPO"),
}


def _table() -> dict[str, dict[str, str]]:
    ops, submodules = "liger_kernel.ops", "liger_kernel.transformers"
    table: dict[str, dict[str, str]] = {"liger_kernel": {}, ops: {}}
    for module, names in _OPS.items():
        table[f"{ops}.{module}"] = {
            name: f"{_HERE}.ops.{'functions' if name.endswith('Function') else 'launchers'}" for name in names
        }
        table[ops] |= table[f"{ops}.{module}"]
    rotary = {"liger_rotary_pos_emb": f"{_HERE}.transformers.functional"}
    modules: dict[str, str] = {}
    for module, names in _MODULES.items():
        table[f"{submodules}.{module}"] = dict.fromkeys(names, f"{_HERE}.transformers.modules")
        modules |= table[f"{submodules}.{module}"]
    table["liger_kernel.utils"] = dict.fromkeys(_UTILS, f"{_HERE}.utils")
    private = ("_apply_liger_kernel", "_apply_liger_kernel_to_instance")
    apply = dict.fromkeys((*private, *(f"apply_liger_kernel_to_{f}" for f in SIGNATURES)), f"{_HERE}.patching.apply")
    auto = {"AutoLigerKernelForCausalLM": f"{_HERE}.patching.auto"}
    available = {"is_transformers_available": f"{_HERE}.utils"}
    table[submodules] = {**auto, **modules, **rotary, **apply, **available}
    table[f"{submodules}.auto_model"] = auto
    table[f"{submodules}.monkey_patch"] = {
        **apply, "MODEL_TYPE_TO_APPLY_LIGER_FN": f"{_HERE}.patching.apply", **modules, **rotary,
    }  # fmt: skip
    table[f"{submodules}.trainer_integration"] = dict.fromkeys(private, f"{_HERE}.patching.apply")
    table[f"{submodules}.rope"] = rotary
    table[f"{submodules}.functional"] = dict.fromkeys(_FUNCTIONAL, f"{_HERE}.transformers.functional")
    _add_post_training(table)
    _add_compositions(table)
    table["liger_kernel.functional"] = dict.fromkeys(_SHORT, f"{_HERE}.functional")
    return table


def _add_post_training(table: dict[str, dict[str, str]]) -> None:
    """Add the losses of preference and policy training and of distillation."""
    ops, submodules, chunked = "liger_kernel.ops", "liger_kernel.transformers", "liger_kernel.chunked_loss"
    for name, (function, module) in _DIVERGENCES.items():
        table[f"{ops}.{name}"] = {function: f"{_HERE}.ops.divergences"}
        table[ops] |= table[f"{ops}.{name}"]
        here = {module: f"{_HERE}.transformers.divergences"}
        table[submodules] |= here
        table[f"{submodules}.{name}"] = here | table[f"{ops}.{name}"]
    of_ops = f"{_HERE}.ops.grpo_loss"
    table[ops]["GrpoLossFunction"] = of_ops
    table[f"{ops}.grpo_loss"] = {"GrpoLossFunction": of_ops, "fused_selective_log_softmax": of_ops}
    table[f"{submodules}.grpo_loss"] = {
        "triton_grpo_loss": f"{_HERE}.transformers.grpo_loss", **table[f"{ops}.grpo_loss"],
    }  # fmt: skip
    table[chunked] = {}
    for name, (file, infix) in _CHUNKED.items():
        loss = {f"LigerFusedLinear{infix}Loss": f"{_HERE}.chunked_loss.modules"}
        table[chunked] |= loss
        table[f"{chunked}.{name}"] = loss | {f"LigerFusedLinear{infix}Function": f"{_HERE}.chunked_loss.{file}"}
    table[f"{chunked}.grpo_loss"]["get_gamma_weights"] = f"{_HERE}.ops.policy"
    short = ("orpo", "dpo", "jsd", "cosine", "cpo", "simpo", "kto", "grpo")
    names = (f"liger_fused_linear_{name}" for name in short)
    table[f"{chunked}.functional"] = dict.fromkeys(names, f"{_HERE}.chunked_loss.functional")


def _add_compositions(table: dict[str, dict[str, str]]) -> None:
    """Add the ops that are short compositions, and the modules of single families."""
    ops, submodules = "liger_kernel.ops", "liger_kernel.transformers"
    for name, (file, names) in _COMPOSED_OPS.items():
        table[f"{ops}.{name}"] = dict.fromkeys(names, f"{_HERE}.compositions.{file}")
        table[ops] |= table[f"{ops}.{name}"]
    for name, (file, only, both) in _COMPOSED_MODULES.items():
        here = table.setdefault(f"{submodules}.{name}", {})
        here |= dict.fromkeys((*only, *both), f"{_HERE}.{file}")
        table[submodules] |= dict.fromkeys(both, f"{_HERE}.{file}")
    for file, functions in _COMPOSED_FUNCTIONAL.items():
        table[f"{submodules}.functional"] |= dict.fromkeys(functions, f"{_HERE}.compositions.{file}")
    for module in ("liger_kernel.megatron", "liger_kernel.megatron.cross_entropy"):
        table[module] = {"LigerMegatronCrossEntropy": f"{_HERE}.compositions.vocab_parallel"}
    table[f"{ops}.experimental"] = {}
    table[f"{submodules}.experimental"] = dict(table[f"{submodules}.experimental.embedding"])


OFFERED: Mapping[str, dict[str, str]] = MappingProxyType(_table())
"""Module of liger_kernel -> name -> the module of tigon that has it. Submodules have separate keys."""


def resolve(module: str, name: str) -> Any:
    """The object of that name in the module of tigon that has it."""
    return getattr(importlib.import_module(module), name)
