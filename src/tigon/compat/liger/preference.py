"""DPO, CPO, SimPO and ORPO from hidden states, with `tigon.linear_logprobs` and `tigon.losses`.

Pairs: the first half of the sequences is chosen, the second half rejected. Each loss returns (loss, results). The
results have no gradient: chosen and rejected logps (B,), the mean logit of the chosen and of the rejected sequences,
and the negative log-likelihood of the chosen ones per label. The rewards (B,) of chosen and rejected follow.

`chunk_size` and `compiled` are accepted and have no effect.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon import losses, ops
from tigon.compat.liger.heads import Head, check_batch, reference_of, sequence_logps, summed_logits
from tigon.compat.liger.rows import function, module
from tigon.errors import OptionError, ShapeError
from tigon.losses.dpo import DPOLossType

# B pairs, T tokens per sequence, H hidden, V vocabulary.

LossAndResults = tuple[Tensor, tuple[Tensor, ...]]

# Liger's loss types. The other types of tigon.losses.dpo need lengths, or the whole batch at once.
DPO_LOSS_TYPES: tuple[DPOLossType, ...] = (
    "sigmoid",
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)


class Pairs(NamedTuple):
    """Log-probabilities (B,) of each pair, the mean logits, and the loss on the chosen sequences, a scalar."""

    chosen: Tensor
    rejected: Tensor
    chosen_logits: Tensor
    rejected_logits: Tensor
    nll: Tensor

    def results(self, *more: Tensor) -> tuple[Tensor, ...]:
        """The results that a loss returns in addition, without gradient."""
        return tuple(value.detach() for value in (*self, *more))


def _nll_ids(target: Tensor, nll_target: Tensor | None, ignore_index: int) -> Tensor:
    """(2B, T, 2): the labels, and those of the chosen sequences' likelihood with the rejected ones ignored."""
    nll = target if nll_target is None else nll_target
    if nll.shape != target.shape:
        raise ShapeError(f"nll_target is {tuple(nll.shape)}; it must be {tuple(target.shape)}, as target is.")
    B = len(target) // 2
    nll = torch.cat([nll[:B], torch.full_like(nll[B:], ignore_index)])
    return torch.stack([target, nll], -1)


def pairs_of(
    head: Head, target: Tensor, *, ignore_index: int, average: bool, with_nll: bool, nll_target: Tensor | None = None
) -> Pairs:
    """The values of all pairs, from one pass over the head."""
    check_batch(head.hidden, target)
    if len(target) % 2:
        raise ShapeError(f"_input has {len(target)} sequences; pass the chosen ones, then as many rejected ones.")
    B, T = len(target) // 2, target.shape[1]
    ids = _nll_ids(target, nll_target, ignore_index) if with_nll else target.unsqueeze(-1)
    counts = ids != ignore_index
    logps = ops.linear_logprobs(
        head.hidden, head.weight, ids, bias=head.bias, ignore_index=ignore_index, mask=counts.any(-1)
    )
    assert isinstance(logps, Tensor)  # no further outputs are requested
    reduce = losses.sequence_mean if average else losses.sequence_sum
    chosen, rejected = reduce(logps[..., 0], counts[..., 0]).split(B)
    nll = logps.new_zeros(())
    if with_nll:
        nll = -logps[:B, :, 1].sum() / counts[:B, :, 1].sum().clamp(min=1)
    is_chosen = torch.arange(2 * B, device=target.device) < B
    size = max(B * T * head.weight.shape[0], 1)
    return Pairs(chosen, rejected, summed_logits(head, is_chosen) / size, summed_logits(head, ~is_chosen) / size, nll)


def check_dpo_loss_type(loss_type: str) -> DPOLossType:
    """The loss type. Raise `OptionError` if Liger's DPO lacks it."""
    for known in DPO_LOSS_TYPES:
        if loss_type == known:
            return known
    raise OptionError(
        f"Unsupported loss_type: {loss_type!r}; choose one of {', '.join(DPO_LOSS_TYPES)}. tigon.losses.dpo has more."
    )


def dpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
) -> LossAndResults:
    """`tigon.losses.dpo`. The reference's log-probabilities are computed without a gradient."""
    kind = check_dpo_loss_type(loss_type)
    reference = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
    pairs = pairs_of(
        Head(_input, weight, bias),
        target,
        ignore_index=ignore_index,
        average=average_log_prob,
        with_nll=compute_nll_loss,
    )
    ref_chosen = ref_rejected = None
    if reference is not None:
        with torch.no_grad():
            ref = sequence_logps(reference, target, ignore_index, average_log_prob)
        ref_chosen, ref_rejected = ref.to(pairs.chosen.dtype).chunk(2)
    per_pair = losses.dpo(
        pairs.chosen,
        pairs.rejected,
        ref_chosen,
        ref_rejected,
        beta=beta,
        loss_type=kind,
        label_smoothing=label_smoothing,
        reference_free=reference is None,
        discopop_tau=discopop_tau,
    )
    return _mean(per_pair.loss) + alpha * pairs.nll, pairs.results(per_pair.chosen_rewards, per_pair.rejected_rewards)


def cpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    compiled: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> LossAndResults:
    """`tigon.losses.cpo` with the sigmoid loss; `alpha` weights the likelihood of the chosen sequences."""
    pairs = pairs_of(
        Head(_input, weight, bias),
        target,
        ignore_index=ignore_index,
        average=average_log_prob,
        with_nll=compute_nll_loss,
    )
    per_pair = losses.cpo(pairs.chosen, pairs.rejected, beta=beta, label_smoothing=label_smoothing)
    return _mean(per_pair.loss) + alpha * pairs.nll, pairs.results(per_pair.chosen_rewards, per_pair.rejected_rewards)


def simpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    gamma: float = 0.5,
    chunk_size: int = 1,
) -> LossAndResults:
    """`tigon.losses.simpo`, with the likelihood of the chosen sequences on request, weighted by `alpha`."""
    pairs = pairs_of(
        Head(_input, weight, bias), target, ignore_index=ignore_index, average=True, with_nll=compute_nll_loss
    )
    per_pair = losses.simpo(pairs.chosen, pairs.rejected, beta=beta, gamma=gamma, label_smoothing=label_smoothing)
    return _mean(per_pair.loss) + alpha * pairs.nll, pairs.results(per_pair.chosen_rewards, per_pair.rejected_rewards)


def orpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: Tensor | None = None,
    compiled: bool = True,
    chunk_size: int = 1,
) -> LossAndResults:
    """`tigon.losses.orpo`. The results end with the means of log σ(log-odds) and of the log-odds."""
    pairs = pairs_of(
        Head(_input, weight, bias),
        target,
        ignore_index=ignore_index,
        average=True,
        with_nll=compute_nll_loss,
        nll_target=nll_target,
    )
    per_pair = losses.orpo(pairs.chosen, pairs.rejected, beta=beta)
    return _mean(per_pair.loss) + pairs.nll, pairs.results(
        per_pair.chosen_rewards, per_pair.rejected_rewards, _mean(per_pair.log_odds_ratio), _mean(per_pair.log_odds)
    )


def _mean(per_pair: Tensor) -> Tensor:
    """The mean; 0 for an empty batch."""
    return per_pair.sum() / max(len(per_pair), 1)


def _check_dpo(beta: float, loss_type: str, label_smoothing: float, discopop_tau: float, **others: object) -> None:
    losses.DPOLoss(beta, check_dpo_loss_type(loss_type), label_smoothing, discopop_tau=discopop_tau)


# --- Liger's names ----------------------------------------------------------------------------------------------------

liger_fused_linear_dpo, liger_fused_linear_cpo = dpo, cpo
liger_fused_linear_simpo, liger_fused_linear_orpo = simpo, orpo
LigerFusedLinearDPOFunction = function("LigerFusedLinearDPOFunction", dpo)
LigerFusedLinearCPOFunction = function("LigerFusedLinearCPOFunction", cpo)
LigerFusedLinearSimPOFunction = function("LigerFusedLinearSimPOFunction", simpo)
LigerFusedLinearORPOFunction = function("LigerFusedLinearORPOFunction", orpo)

_HEAD = "lin_weight:weight _input target bias"
LigerFusedLinearDPOLoss = module(
    "LigerFusedLinearDPOLoss",
    dpo,
    holds="ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
    "label_smoothing discopop_tau",
    takes=f"{_HEAD} ref_input ref_weight ref_bias",
    check=_check_dpo,
)
LigerFusedLinearCPOLoss = module(
    "LigerFusedLinearCPOLoss",
    cpo,
    holds="ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
    takes=_HEAD,
)
LigerFusedLinearSimPOLoss = module(
    "LigerFusedLinearSimPOLoss",
    simpo,
    holds="ignore_index beta alpha label_smoothing compute_nll_loss=True compiled gamma chunk_size",
    takes=_HEAD,
)
LigerFusedLinearORPOLoss = module(
    "LigerFusedLinearORPOLoss",
    orpo,
    holds="ignore_index beta compute_nll_loss compiled chunk_size",
    takes=f"{_HEAD} nll_target",
)
