"""Mirrors `liger_kernel.transformers.grpo_loss`."""

from __future__ import annotations

from torch import Tensor

from tigon.compat.liger.ops.grpo_loss import LogitsBatch, grpo_of_logits
from tigon.compat.liger.ops.policy import PolicyOptions


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, Tensor | None, Tensor] | tuple[Tensor, list[Tensor]]:  # fmt: skip
    """A policy loss from the logits (B, T + 1, V) of completions, whose last position predicts no token of them.

    Args:
        logits: not written to; `inplace` is ignored.
        old_logp: (B, T) at the time of the sampling; None: the ratio is 1.
        ref_logp: (B, T) under the reference model; required unless beta is 0.
        completion_ids: (B, T).
        advantages: (B,).
        completion_mask: (B, T); tokens where it is 0 are left out.
        temperature: divides the logits.
        beta: weight of the KL.
        eps_low, eps_high: the ratio is clipped to [1 - eps_low, 1 + eps_high]; for cispo, to at most eps_high.
        loss_type: grpo, bnpo, dr_grpo, dapo, cispo, luspo, sapo or vespo.
        max_completion_length: for dr_grpo; None: T.
        importance_sampling_level: "token", or "sequence" for one ratio per sequence.
        reduce: whether to return the scalar loss instead of values per token.
        sapo_temperature_pos, sapo_temperature_neg: for sapo.
        vllm_is_ratio: (B,), (B, 1) or (B, T), a correction for the sampler.
        delta: the largest ratio for negative advantages.
        use_bias_correction_kl: multiply the KL by the ratio.
        num_items_in_batch: for dapo, cispo and vespo: the tokens of all micro-batches and processes of the step.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: for vespo.

    Returns:
        (loss per token, KL per token or None, is_clipped), all (B, T). With reduce=True (loss, metrics): the mean KL
        unless beta is 0, and the share of clipped tokens.

    Raises:
        OptionError: an option, or a combination of options, is not valid.
        FlagConflict: beta without ref_logp.
        ShapeError: the shapes do not match.
    """
    options = PolicyOptions(
        loss_type=loss_type, beta=beta, eps_low=eps_low, eps_high=eps_high, delta=delta,
        importance_sampling_level=importance_sampling_level, max_completion_length=max_completion_length,
        use_bias_correction_kl=use_bias_correction_kl, num_items_in_batch=num_items_in_batch,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg,
        vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )  # fmt: skip
    batch = LogitsBatch(logits, completion_ids, advantages, completion_mask, old_logp, ref_logp, vllm_is_ratio)
    loss, kl, clipped = grpo_of_logits(batch, temperature, options, reduce)
    if not reduce:
        return loss, kl, clipped
    return loss, [clipped] if kl is None else [kl, clipped]
