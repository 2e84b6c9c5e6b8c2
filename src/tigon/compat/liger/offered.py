"""The names of `liger_kernel` that tigon offers. Any other name under `liger_kernel` is refused by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tigon.compat.liger.patching.families import SIGNATURES

VERSION = "0.8.5"
"""The Liger Kernel version whose names, argument orders and defaults are used."""

_HERE = __name__.rpartition(".")[0]
_APPLY = " ".join(f"apply_liger_kernel_to_{family}" for family in SIGNATURES)
_PRIVATE = "_apply_liger_kernel _apply_liger_kernel_to_instance"

# File of this package -> module of liger_kernel -> the names of the module that the file has. `ops`, `transformers` and
# `chunked_loss` also have names of their modules.
_FILES: Mapping[str, Mapping[str, str]] = {
    "layers": {
        "ops.rms_norm": "LigerRMSNormFunction",
        "ops.fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
        "ops.layer_norm": "LigerLayerNormFunction",
        "ops.rope": "LigerRopeFunction",
        "ops.qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
        "ops.swiglu": "LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction",
        "ops.geglu": "LigerGELUMulFunction",
        "ops.fused_moe": "LigerFusedMoEFunction",
        "transformers.rope": "liger_rotary_pos_emb",
        "transformers.qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
        "transformers.functional": "liger_rms_norm liger_fused_add_rms_norm liger_layer_norm liger_rope "
        "liger_qwen2vl_mrope liger_swiglu liger_geglu",
    },
    "modules": {
        "transformers.rms_norm": "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 "
        "LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next",
        "transformers.fused_add_rms_norm": "LigerFusedAddRMSNorm",
        "transformers.layer_norm": "LigerLayerNorm",
        "transformers.swiglu": "LigerSwiGLUMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerBlockSparseTop2MLP "
        "LigerExperts",
        "transformers.geglu": "LigerGEGLUMLP",
    },
    "losses.cross_entropy": {
        "ops.cross_entropy": "LigerCrossEntropyFunction",
        "ops.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
        "transformers.cross_entropy": "LigerCrossEntropyLoss",
        "transformers.fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
        "transformers.functional": "CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy",
    },
    "losses.divergences": {
        "ops.jsd": "LigerJSDFunction",
        "ops.kl_div": "LigerKLDivLossFunction",
        "ops.tvd": "LigerTVDLossFunction",
        "ops.fused_linear_jsd": "LigerFusedLinearJSDFunction",
        "transformers.jsd": "LigerJSD LigerJSDFunction",
        "transformers.kl_div": "LigerKLDIVLoss LigerKLDivLossFunction",
        "transformers.tvd": "LigerTVDLoss LigerTVDLossFunction",
        "transformers.fused_linear_jsd": "LigerFusedLinearJSD LigerFusedLinearJSDFunction",
        "transformers.functional": "liger_jsd liger_kl_div liger_tvd liger_fused_linear_jsd",
    },
    "losses.preference": {
        "chunked_loss.dpo_loss": "LigerFusedLinearDPOLoss LigerFusedLinearDPOFunction",
        "chunked_loss.cpo_loss": "LigerFusedLinearCPOLoss LigerFusedLinearCPOFunction",
        "chunked_loss.simpo_loss": "LigerFusedLinearSimPOLoss LigerFusedLinearSimPOFunction",
        "chunked_loss.orpo_loss": "LigerFusedLinearORPOLoss LigerFusedLinearORPOFunction",
        "chunked_loss.functional": "liger_fused_linear_dpo liger_fused_linear_cpo liger_fused_linear_simpo "
        "liger_fused_linear_orpo",
    },
    "losses.kto": {
        "chunked_loss.kto_loss": "LigerFusedLinearKTOLoss LigerFusedLinearKTOFunction",
        "chunked_loss.functional": "liger_fused_linear_kto",
    },
    "losses.grpo": {
        "ops.grpo_loss": "GrpoLossFunction fused_selective_log_softmax",
        "transformers.grpo_loss": "triton_grpo_loss GrpoLossFunction fused_selective_log_softmax",
        "chunked_loss.grpo_loss": "LigerFusedLinearGRPOLoss LigerFusedLinearGRPOFunction",
        "chunked_loss.functional": "liger_fused_linear_grpo",
    },
    "losses.distillation": {
        "chunked_loss.jsd_loss": "LigerFusedLinearJSDLoss LigerFusedLinearJSDFunction",
        "chunked_loss.functional": "liger_fused_linear_jsd",
    },
    "patching.apply": {
        "transformers": f"{_PRIVATE} {_APPLY}",
        "transformers.monkey_patch": f"{_PRIVATE} {_APPLY} MODEL_TYPE_TO_APPLY_LIGER_FN",
        "transformers.trainer_integration": _PRIVATE,
    },
    "patching.auto": {"transformers.auto_model": "AutoLigerKernelForCausalLM"},
    "utils": {
        "utils": "infer_device infer_comm_backend is_peft_available",
        "transformers": "is_transformers_available",
    },
}
_ONLY_IN_MODULES = ("fused_selective_log_softmax", "triton_grpo_loss", "liger_multimodal_rotary_pos_emb")


def _is_in_package(package: str, name: str) -> bool:
    """Whether the package of liger_kernel has the name of its module too."""
    if name in _ONLY_IN_MODULES or name.startswith("LigerRMSNormFor"):
        return False
    return package == "ops" or not name.endswith("Function")


def _table() -> dict[str, dict[str, str]]:
    packages = ("ops", "transformers", "chunked_loss")
    # `megatron` is empty, so that the error names what is imported from it.
    table: dict[str, dict[str, str]] = {"liger_kernel": {}, "liger_kernel.megatron": {}}
    table |= {f"liger_kernel.{package}": {} for package in packages}
    for file, modules in _FILES.items():
        for module, names in modules.items():
            here = dict.fromkeys(names.split(), f"{_HERE}.{file}")
            table.setdefault(f"liger_kernel.{module}", {}).update(here)
            package, _, rest = module.partition(".")
            if rest and package in packages and rest not in ("functional", "monkey_patch", "trainer_integration"):
                table[f"liger_kernel.{package}"].update(
                    {name: source for name, source in here.items() if _is_in_package(package, name)}
                )
    # Liger's monkey_patch imports these, and scripts find them there.
    for name in ("LigerRMSNorm", "LigerLayerNorm", "LigerSwiGLUMLP", "LigerGEGLUMLP", "liger_rotary_pos_emb"):
        table["liger_kernel.transformers.monkey_patch"][name] = table["liger_kernel.transformers"][name]
    return table


OFFERED: Mapping[str, dict[str, str]] = MappingProxyType(_table())
"""Module of liger_kernel -> name -> the module of tigon that has it. Submodules have separate keys."""


def resolve(module: str, name: str) -> Any:
    """The object of that name in the module of tigon that has it."""
    return getattr(importlib.import_module(module), name)
