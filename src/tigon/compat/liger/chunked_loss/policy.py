"""GRPO and its family from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.chunked_loss.reference import Head, check_batch, reference_of
from tigon.compat.liger.errors import FlagConflict, warn
from tigon.compat.liger.ops.policy import (
    Completions,
    PolicyOptions,
    check_policy_options,
    number_of,
    policy_terms,
)

# B sequences, T tokens per sequence, H hidden, V vocabulary.


class LigerFusedLinearGRPOFunction:
    """A policy loss. Returns (loss, metrics): the mean KL per token, if beta is not 0, and the share of clipped tokens.

    The log-probabilities of the reference are `ref_per_token_logps`, or computed from `ref_input` without a gradient.
    Without a reference the KL is 0.
    """

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
        bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, beta: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        options = PolicyOptions(
            loss_type=loss_type, beta=beta, eps_low=epsilon_low, eps_high=epsilon_high,
            importance_sampling_level=importance_sampling_level, max_completion_length=max_completion_length,
            delta=delta, use_bias_correction_kl=use_bias_correction_kl, num_items_in_batch=num_items_in_batch,
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )  # fmt: skip
        check_policy_options(options)
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise FlagConflict("loss_type='dr_grpo' requires max_completion_length.")
        check_batch(_input, selected_token_ids)
        temperature = number_of(temperature)
        mask = attention_mask != 0

        def logps_of(head: Head) -> Tensor:
            logps = ops.linear_logprobs(
                head.hidden, head.weight, selected_token_ids, bias=head.bias, temperature=temperature, mask=mask
            )
            assert isinstance(logps, Tensor)  # no further outputs are requested
            return logps

        if ref_per_token_logps is None:
            reference = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
            if reference is not None and beta:
                with torch.no_grad():
                    ref_per_token_logps = logps_of(reference)
        elif ref_input is not None:
            warn("Both ref_per_token_logps and ref_input are passed: the loss uses ref_per_token_logps.")
        batch = Completions(
            logps_of(Head(_input, weight, bias)), advantages, mask, old_per_token_logps, ref_per_token_logps,
            vllm_is_ratio,
        )  # fmt: skip
        terms = policy_terms(batch, options)
        return terms.loss, tuple(terms.metrics(mask, with_kl=beta != 0))
