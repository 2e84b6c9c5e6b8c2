"""DPO, CPO, SimPO and ORPO from hidden states, with `tigon.linear_logprobs` and `tigon.losses`.

Pairs: the first half of the sequences is chosen, the second half rejected. Each loss returns (loss, results). The
results have no gradient: chosen and rejected logps (B,), the mean logit of the chosen and of the rejected sequences,
and the negative log-likelihood of the chosen ones per label. The rewards (B,) of chosen and rejected follow.

`chunk_size` and `compiled` are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon import losses, ops
from tigon.compat.liger.losses.heads import Head, check_batch, reference_of, sequence_logps, summed_logits
from tigon.compat.liger.rows import Call, form, function, module
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


def _loss(formula: Call, line: str) -> Call:
    """The function of a loss, with the parameters of the line.

    formula: (pairs, log-probabilities of the reference model for chosen and rejected sequences, options) -> the values
        of each pair, then more results.
    """

    def run(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        ignore_index: int,
        compute_nll_loss: bool,
        average_log_prob: bool = True,
        use_ref_model: bool = False,
        nll_target: Tensor | None = None,
        alpha: float = 1.0,
        compiled: bool,
        chunk_size: int,
        **options: Any,
    ) -> LossAndResults:
        head, reference = Head(_input, weight, bias), reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
        pairs = pairs_of(
            head,
            target,
            ignore_index=ignore_index,
            average=average_log_prob,
            with_nll=compute_nll_loss,
            nll_target=nll_target,
        )
        ref: Sequence[Tensor | None] = (None, None)
        if reference is not None:
            with torch.no_grad():
                logps = sequence_logps(reference, target, ignore_index, average_log_prob)
            ref = logps.to(pairs.chosen.dtype).chunk(2)
        per_pair, *more = formula(pairs, ref, **options)
        results = pairs.results(per_pair.chosen_rewards, per_pair.rejected_rewards, *more)
        return _mean(per_pair.loss) + alpha * pairs.nll, results

    run.__doc__ = formula.__doc__
    return form(run, f"_input weight target bias=None {line}")


def _dpo(pairs: Pairs, ref: Sequence[Tensor | None], loss_type: str, **options: Any) -> tuple[Any, ...]:
    """`tigon.losses.dpo`. The reference's log-probabilities are computed without a gradient."""
    kind = check_dpo_loss_type(loss_type)
    free = ref[0] is None
    return (losses.dpo(pairs.chosen, pairs.rejected, *ref, loss_type=kind, reference_free=free, **options),)


def _cpo(pairs: Pairs, ref: Sequence[Tensor | None], **options: Any) -> tuple[Any, ...]:
    """`tigon.losses.cpo` with the sigmoid loss; `alpha` weights the likelihood of the chosen sequences."""
    return (losses.cpo(pairs.chosen, pairs.rejected, **options),)


def _simpo(pairs: Pairs, ref: Sequence[Tensor | None], **options: Any) -> tuple[Any, ...]:
    """`tigon.losses.simpo`, with the likelihood of the chosen sequences on request, weighted by `alpha`."""
    return (losses.simpo(pairs.chosen, pairs.rejected, **options),)


def _orpo(pairs: Pairs, ref: Sequence[Tensor | None], **options: Any) -> tuple[Any, ...]:
    """`tigon.losses.orpo`. The results end with the means of log σ(log-odds) and of the log-odds."""
    per_pair = losses.orpo(pairs.chosen, pairs.rejected, **options)
    return per_pair, _mean(per_pair.log_odds_ratio), _mean(per_pair.log_odds)


def _mean(per_pair: Tensor) -> Tensor:
    """The mean; 0 for an empty batch."""
    return per_pair.sum() / max(len(per_pair), 1)


def _check_dpo(beta: float, loss_type: str, label_smoothing: float, discopop_tau: float, **others: object) -> None:
    losses.DPOLoss(beta, check_dpo_loss_type(loss_type), label_smoothing, discopop_tau=discopop_tau)


# --- Liger's names ----------------------------------------------------------------------------------------------------

_REFERENCE = "ref_input=None ref_weight=None ref_bias=None"
liger_fused_linear_dpo = _loss(
    _dpo,
    f"{_REFERENCE} ignore_index=-100 beta=0.1 compute_nll_loss=False compiled=True use_ref_model=True "
    "average_log_prob=False chunk_size=1 loss_type='sigmoid' label_smoothing=0.0 discopop_tau=0.05 alpha=1.0",
)
liger_fused_linear_cpo = _loss(
    _cpo,
    "ignore_index=-100 beta=0.1 alpha=1.0 label_smoothing=0.0 compute_nll_loss=True compiled=True "
    "average_log_prob=False chunk_size=1",
)
liger_fused_linear_simpo = _loss(
    _simpo,
    "ignore_index=-100 beta=0.1 alpha=1.0 label_smoothing=0.0 compute_nll_loss=False compiled=True gamma=0.5 "
    "chunk_size=1",
)
liger_fused_linear_orpo = _loss(
    _orpo, "ignore_index=-100 beta=0.1 compute_nll_loss=True nll_target=None compiled=True chunk_size=1"
)
LigerFusedLinearDPOFunction = function("LigerFusedLinearDPOFunction", liger_fused_linear_dpo)
LigerFusedLinearCPOFunction = function("LigerFusedLinearCPOFunction", liger_fused_linear_cpo)
LigerFusedLinearSimPOFunction = function("LigerFusedLinearSimPOFunction", liger_fused_linear_simpo)
LigerFusedLinearORPOFunction = function("LigerFusedLinearORPOFunction", liger_fused_linear_orpo)

_HEAD = "lin_weight:weight _input target bias"
LigerFusedLinearDPOLoss = module(
    "LigerFusedLinearDPOLoss",
    liger_fused_linear_dpo,
    holds="ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
    "label_smoothing discopop_tau",
    takes=f"{_HEAD} ref_input ref_weight ref_bias",
    check=_check_dpo,
)
LigerFusedLinearCPOLoss = module(
    "LigerFusedLinearCPOLoss",
    liger_fused_linear_cpo,
    holds="ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
    takes=_HEAD,
)
LigerFusedLinearSimPOLoss = module(
    "LigerFusedLinearSimPOLoss",
    liger_fused_linear_simpo,
    holds="ignore_index beta alpha label_smoothing compute_nll_loss=True compiled gamma chunk_size",
    takes=_HEAD,
)
LigerFusedLinearORPOLoss = module(
    "LigerFusedLinearORPOLoss",
    liger_fused_linear_orpo,
    holds="ignore_index beta compute_nll_loss compiled chunk_size",
    takes=f"{_HEAD} nll_target",
)
