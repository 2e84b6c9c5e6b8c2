"""GRPO and its family from hidden states and a head, and from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.errors import FlagConflict, warn
from tigon.compat.liger.losses.heads import Head, check_batch, reference_of
from tigon.compat.liger.losses.policy import Completions, PolicyOptions, check_policy_options, policy_terms
from tigon.compat.liger.rows import form, function, module
from tigon.errors import OptionError, ShapeError

# B sequences, T tokens per completion, H hidden, V vocabulary.

_IGNORED = -100


def _number_of(temperature: float) -> float:
    """The temperature; a bool as its number, as in Liger, with a warning."""
    if isinstance(temperature, bool):
        warn(
            f"temperature={temperature} is used as {float(temperature)}. Pass a number; a bool in its place is often "
            "an argument that is one place off."
        )
        return float(temperature)
    return temperature


# --- from hidden states -----------------------------------------------------------------------------------------------


def _of_head(
    _input: Tensor,
    weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None,
    ref_per_token_logps: Tensor | None,
    old_per_token_logps: Tensor | None,
    ref_input: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    temperature: float,
    use_ref_model: bool,
    vllm_is_ratio: Tensor | None,
    compiled: bool,
    chunk_size: int,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A policy loss. Returns (loss, metrics): the mean KL per token, if beta is not 0, and the share of clipped tokens.

    The log-probabilities of the reference are `ref_per_token_logps`, or computed from `ref_input` without a gradient.
    Without a reference the KL is 0.
    """
    policy = PolicyOptions(**options)
    check_policy_options(policy)
    if policy.loss_type == "dr_grpo" and policy.max_completion_length is None:
        raise FlagConflict("loss_type='dr_grpo' requires max_completion_length.")
    check_batch(_input, selected_token_ids)
    temperature, mask = _number_of(temperature), attention_mask != 0

    def logps_of(head: Head) -> Tensor:
        logps = ops.linear_logprobs(
            head.hidden, head.weight, selected_token_ids, bias=head.bias, temperature=temperature, mask=mask
        )
        assert isinstance(logps, Tensor)  # no further outputs are requested
        return logps

    if ref_per_token_logps is None:
        reference = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
        if reference is not None and policy.beta:
            with torch.no_grad():
                ref_per_token_logps = logps_of(reference)
    elif ref_input is not None:
        warn("Both ref_per_token_logps and ref_input are passed: the loss uses ref_per_token_logps.")
    logps = logps_of(Head(_input, weight, bias))
    batch = Completions(logps, advantages, mask, old_per_token_logps, ref_per_token_logps, vllm_is_ratio)
    terms = policy_terms(batch, policy)
    return terms.loss, tuple(terms.metrics(mask, with_kl=policy.beta != 0))


def _check_positive(
    delta: float | None, sapo_temperature_pos: float, sapo_temperature_neg: float, **others: object
) -> None:
    named = {
        "sapo_temperature_pos": sapo_temperature_pos,
        "sapo_temperature_neg": sapo_temperature_neg,
        "delta": delta,
    }
    for name, value in named.items():
        if value is not None and value <= 0:
            raise OptionError(f"{name} must be positive; it is {value}.")


# --- from logits ------------------------------------------------------------------------------------------------------


def _logps(logits: Tensor, completion_ids: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    """(B, T) log-probabilities, 0 where the mask is. The logits are read in place."""
    B, T = logits.shape[0], logits.shape[1] - 1
    if completion_ids.shape != (B, T):
        raise ShapeError(
            f"logits are {tuple(logits.shape)}, the ids {tuple(completion_ids.shape)}; pass (B, T + 1, V), (B, T)."
        )
    # Without the last position the logits would not be contiguous, and would be copied.
    ids = torch.nn.functional.pad(completion_ids, (0, 1), value=_IGNORED)
    if mask is not None:
        ids = ids.masked_fill(torch.nn.functional.pad(mask == 0, (0, 1)), _IGNORED)
    logps = ops.logprobs(logits, ids, temperature=temperature, ignore_index=_IGNORED)
    assert isinstance(logps, Tensor)  # no further outputs are requested
    return logps[:, :T]


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """(B, T) log-probabilities of the last T of the ids, without a gradient; 0 where the mask is 0."""
    T = logits.shape[1] - 1
    return _logps(logits, input_ids[:, -T:], temperature, None if mask is None else mask[:, -T:])


def _of_logits(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None,
    temperature: float,
    inplace: bool,
    reduce: bool,
    vllm_is_ratio: Tensor | None,
    phi_seq: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A policy loss from the logits (B, T + 1, V) of completions, whose last position predicts no token of them.

    Returns (loss, mean KL, share of clipped tokens), or per token (B, T) with `reduce=False`. The KL is None if beta is
    0. The logits are not written to; `inplace` is ignored.
    """
    policy = PolicyOptions(**options)
    check_policy_options(policy)
    if policy.beta and ref_logp is None:
        raise FlagConflict(f"beta={policy.beta} requires ref_logp; pass it, or beta=0.")
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    logps = _logps(logits, completion_ids, _number_of(temperature), mask)
    terms = policy_terms(Completions(logps, advantages, mask, old_logp, ref_logp, vllm_is_ratio, phi_seq), policy)
    if not reduce:
        return terms.per_token, terms.kl if policy.beta else None, terms.is_clipped
    kl, clipped = terms.metrics(mask, with_kl=True)
    return terms.loss, kl if policy.beta else None, clipped


def _with_list_of_metrics(reduce: bool, **values: Any) -> tuple[Any, ...]:
    """A policy loss from logits: (loss, [mean KL unless beta is 0, share of clipped tokens]) with `reduce=True`."""
    loss, kl, clipped = _of_logits(reduce=reduce, **values)
    if not reduce:
        return loss, kl, clipped
    return loss, [clipped] if kl is None else [kl, clipped]


# --- Liger's names ----------------------------------------------------------------------------------------------------

_SAPO = "sapo_temperature_pos=1.0 sapo_temperature_neg=1.05"
_VESPO = "vespo_k_pos=2.0 vespo_lambda_pos=3.0 vespo_k_neg=3.0 vespo_lambda_neg=2.0"
_LAST = "vllm_is_ratio=None delta=None use_bias_correction_kl=False"
_REFERENCE = "ref_input=None ref_weight=None ref_bias=None"
_BATCH = "selected_token_ids attention_mask advantages bias=None ref_per_token_logps=None old_per_token_logps=None"

liger_fused_linear_grpo = form(
    _of_head,
    f"_input weight {_BATCH} {_REFERENCE} beta=0.04 epsilon_low:eps_low=0.2 epsilon_high:eps_high=0.2 "
    f"loss_type='dapo' max_completion_length=None importance_sampling_level='token' {_SAPO} temperature=1.0 "
    f"compiled=True use_ref_model=True chunk_size=1 {_LAST} {_VESPO} num_items_in_batch=None",
)
LigerFusedLinearGRPOFunction = function("LigerFusedLinearGRPOFunction", liger_fused_linear_grpo)
LigerFusedLinearGRPOLoss = module(
    "LigerFusedLinearGRPOLoss",
    liger_fused_linear_grpo,
    holds="beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type max_completion_length "
    f"importance_sampling_level {_SAPO} temperature delta use_bias_correction_kl {_VESPO}",
    takes=f"_input lin_weight:weight {_BATCH} {_REFERENCE} vllm_is_ratio num_items_in_batch",
    check=_check_positive,
)

_LOGITS = "logits old_logp ref_logp completion_ids advantages"
GrpoLossFunction = function(
    "GrpoLossFunction",
    form(
        _of_logits,
        f"{_LOGITS} completion_mask temperature beta! eps_low! eps_high! inplace loss_type='grpo' "
        f"max_completion_length=None reduce=True importance_sampling_level='token' {_SAPO} {_LAST} "
        "num_items_in_batch=None phi_seq=None",
    ),
)
triton_grpo_loss = form(
    _with_list_of_metrics,
    "logits! old_logp! ref_logp! completion_ids! advantages! completion_mask=None temperature=0.9 beta=0.04 "
    "eps_low=0.2 eps_high=0.4 inplace=True loss_type='dapo' max_completion_length=None "
    f"importance_sampling_level='token' reduce=False {_SAPO} {_LAST} num_items_in_batch=None {_VESPO}",
)
