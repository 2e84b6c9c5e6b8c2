"""Mirrors `liger_kernel.chunked_loss.functional`: the Functions' `apply` under their short names."""

from __future__ import annotations

from tigon.compat.liger.chunked_loss.distillation import (
    LigerFusedLinearCosineSimilarityFunction,
    LigerFusedLinearJSDFunction,
)
from tigon.compat.liger.chunked_loss.policy import LigerFusedLinearGRPOFunction
from tigon.compat.liger.chunked_loss.preference import (
    LigerFusedLinearCPOFunction,
    LigerFusedLinearDPOFunction,
    LigerFusedLinearORPOFunction,
    LigerFusedLinearSimPOFunction,
)
from tigon.compat.liger.chunked_loss.unpaired import LigerFusedLinearKTOFunction

liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
