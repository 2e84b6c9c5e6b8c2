"""The public names of `liger_kernel` that tigon refuses, each with its reason or with what to use instead.

`docs/liger.md` lists them. A test compares `offered.py` and this list with the names of Liger's version `VERSION`, so
that each name is in one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Absent(NamedTuple):
    """Dotted names with a space between them, `*` for any text, and why tigon lacks them."""

    names: str
    reason: str


ABSENT = (
    # --- Liger's own machinery ----------------------------------------------------------------------------------------
    Absent(
        "backends.* functional.* get_impl set_impl get_backend set_backend available_impls available_backends "
        "ops.backends.* ops.cute.* ops.cutedsl.* ops.cutile.*",
        "It is, or it chooses, another implementation of an op. tigon has one implementation per device; call "
        "`tigon.rms_norm` and the like.",
    ),
    Absent(
        "ops.*_forward ops.*_backward ops.*_fwd ops.*_bwd ops.*_backward_* ops.mlp.gemm_swiglu ops.*_triton",
        "It is half of an op, without autograd, around a Triton kernel of Liger. tigon offers ops with autograd.",
    ),
    Absent("ops.*_kernel ops.swiglu.silu", "A raw Triton kernel. Its arguments are those of one implementation."),
    Absent(
        "ops.utils.* ops._nvidia_shared.* ops.*.get_num_warps ops.mlp.get_bucket_m "
        "ops.fused_moe.compute_routing_metadata ops.vocab_parallel_cross_entropy.validate_formula_and_mode "
        "utils.get_* utils.infer_device_arch utils.is_npu_available utils.transformers_version_dispatch",
        "A helper of Liger's kernels: launch settings, copies to contiguous memory, queries of the device.",
    ),
    Absent("ops.configure.*", "It sets tile sizes of Liger's kernels. tigon chooses them by GPU, and chunks by bytes."),
    Absent(
        "triton.*",
        "It works around a race in the cache of old Triton versions. `TRITON_CACHE_DIR` gives each job its own cache.",
    ),
    Absent(
        "testing.* env_report.*",
        "A tool for Liger's own tests and reports. `tigon doctor` reports the environment.",
    ),
    Absent(
        "transformers.model.*",
        "A copy of a transformers forward, or its output class or loss. tigon replaces no forward; "
        "`apply_liger_kernel_to_*` patches the model.",
    ),
    Absent(
        "chunked_loss.fused_linear_*.LigerFusedLinear*Base",
        "A base class for chunked losses. `tigon.linear_logprobs` takes its place; the losses are plain PyTorch on it.",
    ),
    Absent(
        "chunked_loss.grpo_loss.*_fn chunked_loss.grpo_loss.get_gamma_weights",
        "An inner function of Liger's GRPO. `tigon.losses.grpo` has its terms.",
    ),
    # --- what tigon does not do ---------------------------------------------------------------------------------------
    Absent("ops.experimental.mm_int8int2.*", "A product with 2-bit weights, for inference only."),
    Absent(
        "transformers.moe.LigerExpertParallelFusedMoe",
        "It sends tokens between GPUs with NVSHMEM kernels of a separate package. tigon trains without expert "
        "parallelism.",
    ),
    Absent(
        "transformers.llama4_rope.apply_liger_llama4_rope_full",
        "It assigns functions in a module of transformers. tigon assigns nothing there; use "
        "`apply_liger_kernel_to_llama4(model=model)`.",
    ),
    Absent(
        "transformers.trainer.*",
        "A trainer for an old TRL. `tigon.losses.orpo` has its loss, and docs/trainers.md lists TRL's trainers that "
        "work.",
    ),
    Absent(
        "megatron.*RMSNorm megatron.*SwiGLU megatron.*apply_liger_kernel_to_megatron",
        "It patches Megatron-LM, which tigon does not support.",
    ),
    # --- modules of single families -----------------------------------------------------------------------------------
    Absent(
        "transformers.*MuseGlimmer* transformers.*LigerFalconH1* transformers.*LigerHunyuanV1SwiGLUMLP "
        "transformers.*LigerGEGLUMLPForGemma4 transformers.*LigerMLP ops.*LigerMLPFunction *.mlp",
        "A layer of one family. `apply_liger_kernel_to_*` patches the family's own; in a model of yours use "
        "`LigerRMSNorm`, `LigerSwiGLUMLP` or `LigerGEGLUMLP`.",
    ),
    Absent(
        "transformers.*Llama4* transformers.*llama4_* ops.*LigerLlama4RopeFunction ops.llama4_rope",
        "Use `tigon.rope(q, k, cos, sin, interleaved=True, unsqueeze_dim=2)` with `cos = "
        "freqs_cis.real.repeat_interleave(2, -1)` and `sin` of the imaginary part.",
    ),
    Absent(
        "transformers.rope.liger_rotary_pos_emb_gpt_oss",
        "Use `liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])`.",
    ),
    Absent(
        "transformers.rope.liger_rotary_pos_emb_vision",
        "Use `tigon.rope(q[None], k[None], cos, sin, unsqueeze_dim=2)`.",
    ),
    # --- ops for which tigon has no kernel, with PyTorch's equivalent -------------------------------------------------
    Absent("*LigerSoftmax* *liger_softmax *.softmax", "Use `torch.softmax(x, -1)`."),
    Absent("*LigerSparsemax* *liger_sparsemax *.sparsemax", "Use `entmax.sparsemax(x, dim)` of the package entmax."),
    Absent("*LigerReLUSquared* *liger_relu_squared *.relu_squared", "Use `torch.relu(x).square()`."),
    Absent("*LigerEmbedding* *.experimental.embedding", "Use `torch.nn.Embedding`."),
    Absent(
        "*LigerGroupNorm* *liger_group_norm *.group_norm",
        "Use `torch.nn.GroupNorm(num_groups, num_channels, eps)`.",
    ),
    Absent("*LigerDyT* *liger_dyt *.dyt", "Use `gamma * torch.tanh(alpha * x) + beta`."),
    Absent(
        "*LigerPolyNorm* *liger_poly_norm *.poly_norm",
        "Use `F.rms_norm` of `x**3`, `x**2` and `x`, times the three weights, plus the bias.",
    ),
    Absent(
        "*LigerModulatedRMSNorm* *liger_modulated_rms_norm *.modulated_rms_norm",
        "Use `tigon.rms_norm(x, weight, eps) * (1 + scale) + shift`.",
    ),
    Absent(
        "*LigerMultiTokenAttention* *liger_multi_token_attention *.multi_token_attention",
        "Use `F.conv2d(torch.softmax(scores + causal_mask, -1), weight, bias, padding=...).tril()`.",
    ),
    Absent(
        "*NeighborhoodAttention* *.fused_neighborhood_attention *liger_fused_neighborhood_attention",
        "Use `F.scaled_dot_product_attention(q, k, v, attn_mask=neighbours)`, or `flex_attention` with that mask.",
    ),
    Absent(
        "*LigerAttnRes* *liger_attn_res *.attn_res",
        "Use `share = torch.softmax((F.rms_norm(V, V.shape[-1:], w_norm) * w_query).sum(-1, keepdim=True), 0)` and "
        "`(share * V).sum(0)`.",
    ),
    Absent(
        "*LigerMHC* *liger_mhc_* *.mhc",
        "Use `h_res @ x + h_post[..., None] * layer((h_pre[..., None] * x).sum(-2))[..., None, :]` (arXiv 2512.24880).",
    ),
    Absent(
        "*LigerTiled* *apply_tiled_mlp *.tiled_mlp",
        "Use the recipe key `train.mlp_tile_tokens`, or `torch.utils.checkpoint.checkpoint` of each of `x.chunk(n, "
        "-2)`.",
    ),
    Absent(
        "*LigerFusedCETVD* *.fused_ce_tvd",
        "Use `F.cross_entropy(student_logits, target, reduction='none')` and `LigerTVDLoss`.",
    ),
    Absent(
        "*LigerFusedLinearKLDiv* *liger_fused_linear_kl_div *.fused_linear_kl_div",
        "Use `F.kl_div(F.log_softmax(hidden @ weight.T / temperature, -1), target, reduction='batchmean')`, or "
        "`tigon.linear_kl` if the target comes from a teacher's head.",
    ),
    Absent(
        "*LigerFusedLinearCosineSimilarity* *liger_fused_linear_cosine *.cosine_similarity_loss",
        "Use `F.cosine_similarity(student_logits, teacher_logits, dim=-1)`, or `LigerFusedLinearJSDLoss`.",
    ),
    Absent(
        "*LigerFusedLinearScaledCrossEntropy* *liger_fused_linear_scaled_cross_entropy_tp "
        "*.fused_linear_scaled_cross_entropy",
        "Use `tigon.linear_logprobs(hidden, weight, target, temperature=t, outputs=('entropy',))`; "
        "docs/divided-heads.md shows it for a head that is divided over GPUs.",
    ),
    Absent(
        "*LigerVocabParallelC* *LigerMegatronCrossEntropy *.vocab_parallel_cross_entropy",
        "Use `tigon.logprobs(logits, target, vocab_parallel=...)`; docs/divided-heads.md shows it.",
    ),
)
"""Names relative to `liger_kernel`. A name belongs to the first row that matches."""


def row_of(name: str) -> Absent | None:
    """The row of a dotted name under `liger_kernel`, or None."""
    relative = name.removeprefix("liger_kernel.")
    for absent in ABSENT:
        # `triton.*` has the module `triton` too.
        if any(fnmatchcase(relative, pattern) or pattern == f"{relative}.*" for pattern in absent.names.split()):
            return absent
    return None


def reason_for(name: str) -> str | None:
    """Why tigon lacks a dotted name under `liger_kernel`, or None if no row has it."""
    absent = row_of(name)
    return None if absent is None else absent.reason
