"""The public names of `liger_kernel` that tigon lacks, each with its reason. `docs/liger.md` lists them.

A test compares `offered.py` and this list with the names of Liger's version `VERSION`, so that each name is in one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Absent(NamedTuple):
    """Dotted names, with `*` for any text, and why tigon lacks them."""

    names: tuple[str, ...]
    reason: str


_LAUNCHER = "It is half of an op, without autograd, around a Triton kernel of Liger. The op itself is offered."
ABSENT = (
    Absent(
        ("chunked_loss.fused_linear_*.LigerFusedLinear*Base",),
        "A base class for chunked losses. `tigon.linear_logprobs` takes its place; the losses are plain PyTorch on it.",
    ),
    Absent(
        ("chunked_loss.grpo_loss.*_fn",),
        "An inner function of Liger's GRPO. `tigon.losses.grpo` has its terms.",
    ),
    Absent(
        (
            "ops.attn_res_*ward", "ops.attn_res.attn_res_*ward", "ops.dyt.liger_dyt_*wd",
            "ops.fused_ce_tvd_*ward", "ops.fused_ce_tvd.fused_ce_tvd_*ward",
            "ops.fused_linear_jsd_*ward", "ops.fused_linear_jsd.fused_linear_jsd_*ward",
            "ops.fused_linear_kl_div_*ward", "ops.fused_linear_kl_div.fused_linear_kl_div_*ward",
            "ops.fused_neighborhood_attention.fused_neighborhood_attention_forward",
            "ops.group_norm_*ward", "ops.group_norm.group_norm_*ward",
            "ops.jsd_*ward", "ops.jsd.jsd_*ward", "ops.kl_div.kldiv_*ward_triton",
            "ops.llama4_rope.llama4_rope_forward", "ops.mhc.mhc_*", "ops.mlp.gemm_swiglu", "ops.mlp.swiglu_backward_*",
            "ops.modulated_rms_norm_*ward", "ops.modulated_rms_norm.modulated_rms_norm_*ward",
            "ops.poly_norm_*ward", "ops.poly_norm.poly_norm_*ward",
            "ops.qwen2vl_mrope.qwen2vl_mrope_*ward",
            "ops.relu_squared_*ward", "ops.relu_squared.relu_squared_*ward",
            "ops.tvd.tv_distance_forward_triton", "ops.tvd.tvd_backward_triton",
        ),
        _LAUNCHER,
    ),
    Absent(
        ("ops.*_kernel", "ops.swiglu.silu"),
        "A raw Triton kernel. Its arguments are those of one implementation.",
    ),
    Absent(
        (
            "ops.utils.*", "ops._nvidia_shared.*", "ops.*.get_num_warps", "ops.mlp.get_bucket_m",
            "ops.fused_moe.compute_routing_metadata", "ops.vocab_parallel_cross_entropy.validate_formula_and_mode",
        ),
        "A helper of Liger's kernels: launch settings, copies to contiguous memory, queries of the device.",
    ),
    Absent(
        ("ops.configure.*",),
        "It sets tile sizes of Liger's kernels. tigon chooses them by GPU, and chunks by bytes.",
    ),
    Absent(
        ("ops.experimental.mm_int8int2.*",),
        "A product with 2-bit weights, for inference only.",
    ),
    Absent(
        ("transformers.moe.LigerExpertParallelFusedMoe",),
        "It sends tokens between GPUs with NVSHMEM kernels of a separate package. tigon trains without expert "
        "parallelism.",
    ),
    Absent(
        ("transformers.model.*",),
        "A copy of a transformers forward, or its output class or loss. tigon replaces no forward; "
        "`apply_liger_kernel_to_*` patches the model.",
    ),
    Absent(
        ("transformers.llama4_rope.apply_liger_llama4_rope_full",),
        "It assigns functions in a module of transformers. tigon assigns nothing there; use "
        "`apply_liger_kernel_to_llama4(model=model)`.",
    ),
    Absent(
        ("transformers.trainer.*",),
        "A trainer for an old TRL. `tigon.losses.orpo` has its loss, and docs/trainers.md lists TRL's trainers that "
        "work.",
    ),
    Absent(
        ("megatron.*RMSNorm", "megatron.*SwiGLU", "megatron.*apply_liger_kernel_to_megatron"),
        "It patches Megatron-LM, which tigon does not support.",
    ),
    Absent(
        (
            "backends.*", "functional.dispatch", "functional.declare_op_locations", "get_impl", "set_impl",
            "get_backend", "set_backend", "available_impls", "available_backends", "ops.backends.*", "ops.cute.*",
            "ops.cutedsl.*", "ops.cutile.*",
        ),
        "It is, or it chooses, another implementation of an op. tigon has one implementation per device.",
    ),
    Absent(
        ("triton.*",),
        "It works around a race in the cache of old Triton versions. `TRITON_CACHE_DIR` gives each job its own cache.",
    ),
    Absent(
        ("testing.*", "env_report.*"),
        "A tool for Liger's own tests and reports. `tigon doctor` reports the environment.",
    ),
    Absent(
        ("utils.get_*", "utils.infer_device_arch"),
        "A query of the device for Liger's kernels.",
    ),
)  # fmt: skip
"""Names relative to `liger_kernel`."""


def reason_for(name: str) -> str | None:
    """Why tigon lacks a dotted name under `liger_kernel`, or None if no row has it."""
    relative = name.removeprefix("liger_kernel.")
    for absent in ABSENT:
        # `triton.*` has the module `triton` too.
        if any(fnmatchcase(relative, pattern) or pattern == f"{relative}.*" for pattern in absent.names):
            return absent.reason
    return None
