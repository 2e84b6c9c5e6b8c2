"""Post-training losses on vectors of log-probabilities, in plain PyTorch.

`tigon.linear_logprobs` gives the log-probabilities per token without logits, and `sequence_sum` those of sequences. The
losses compute in fp32, or in fp64 if the log-probabilities are. `LOSSES` lists each with its formulas and papers.

sequences.py        Sums and means per sequence.
dpo.py              DPO and its variants, with a reference model.
reference_free.py   ORPO, SimPO, and CPO with its variants.
unpaired.py         KTO and BCO, for sequences with a label each.
grpo.py, ppo.py     Policy losses on log-probabilities per token, and PPO's value loss.
kl.py               The estimators k1, k2 and k3.
advantages.py       Advantages from the rewards of a group.
distillation.py     Divergences from log-probabilities of the vocabulary or of the top-K ids.
common.py           Results of pairs, rows of the table of losses, the base class of the modules.
numerics.py         Exponentials and logarithms that stay finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tigon.losses.advantages import group_advantages, leave_one_out_advantages
from tigon.losses.common import LossFormula, PairLoss
from tigon.losses.distillation import (
    DISTILLATION_FORMULAS,
    DIVERGENCE_FORMULAS,
    DistillationLoss,
    add_tail,
    distillation,
    divergence,
    topk_divergence,
)
from tigon.losses.dpo import FORMULAS as DPO_FORMULAS
from tigon.losses.dpo import DPOLoss, dpo
from tigon.losses.grpo import FORMULAS as GRPO_FORMULAS
from tigon.losses.grpo import GRPOLoss, PolicyLoss, grpo, importance_sampling_ratio
from tigon.losses.kl import kl_estimate
from tigon.losses.ppo import PPO_FORMULAS, VALUE_FORMULAS, PPOLoss, PPOValueLoss, ValueLoss, ppo, ppo_value
from tigon.losses.reference_free import (
    CPO_FORMULAS,
    ORPO_FORMULAS,
    SIMPO_FORMULAS,
    CPOLoss,
    OddsRatioLoss,
    ORPOLoss,
    SimPOLoss,
    cpo,
    orpo,
    simpo,
)
from tigon.losses.sequences import sequence_lengths, sequence_mean, sequence_sum
from tigon.losses.unpaired import BCO_FORMULAS, KTO_FORMULAS, BCOLoss, KTOLoss, UnpairedLoss, bco, kto, kto_kl

LOSSES: Mapping[str, Mapping[str, LossFormula]] = MappingProxyType(
    {
        "dpo": DPO_FORMULAS,
        "kto": KTO_FORMULAS,
        "bco": BCO_FORMULAS,
        "orpo": ORPO_FORMULAS,
        "simpo": SIMPO_FORMULAS,
        "cpo": CPO_FORMULAS,
        "grpo": GRPO_FORMULAS,
        "ppo": PPO_FORMULAS,
        "ppo_value": VALUE_FORMULAS,
        "divergence": DIVERGENCE_FORMULAS,
        "distillation": DISTILLATION_FORMULAS,
    }
)
"""Function -> variant -> formula and papers. A variant is a `loss_type`, or a `kind` of `divergence`."""

__all__ = [
    "LOSSES",
    "BCOLoss",
    "CPOLoss",
    "DPOLoss",
    "DistillationLoss",
    "GRPOLoss",
    "KTOLoss",
    "LossFormula",
    "ORPOLoss",
    "OddsRatioLoss",
    "PPOLoss",
    "PPOValueLoss",
    "PairLoss",
    "PolicyLoss",
    "SimPOLoss",
    "UnpairedLoss",
    "ValueLoss",
    "add_tail",
    "bco",
    "cpo",
    "distillation",
    "divergence",
    "dpo",
    "group_advantages",
    "grpo",
    "importance_sampling_ratio",
    "kl_estimate",
    "kto",
    "kto_kl",
    "leave_one_out_advantages",
    "orpo",
    "ppo",
    "ppo_value",
    "sequence_lengths",
    "sequence_mean",
    "sequence_sum",
    "simpo",
    "topk_divergence",
]
