"""ORPOTrainer and CPOTrainer (`trl.experimental`): `concatenated_forward` without logits.

These trainers use the logits three times: for the log-probability per token, the cross entropy of the chosen sequences,
and the mean that they log. One call of TRL's fused forward gives all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tigon.integrations.trl.forward import FusedForward
from tigon.integrations.trl.overrides import Override

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

# B chosen and rejected sequences together, T tokens.


class MeanOnly:
    """In place of the logits (B, T, V) that TRL logs the mean of: holds the mean per token (B, T)."""

    def __init__(self, mean_BT: Tensor) -> None:
        self.mean_BT = mean_BT

    def detach(self) -> MeanOnly:
        return self

    def mean(self) -> Tensor:
        """The mean of all logits, ()."""
        return self.mean_BT.mean()


class FusedPreference:
    """The `concatenated_forward` of one ORPOTrainer or CPOTrainer."""

    def __init__(self, trainer: Trainer, forward: FusedForward, *, orpo: bool) -> None:
        self.trainer, self.forward, self.orpo = trainer, forward, orpo
        self.override = Override(trainer, "concatenated_forward", self.concatenated_forward)

    def concatenated_forward(self, model: PreTrainedModel, batch: dict[str, Any]) -> tuple[Any, ...]:
        """TRL's method: log-probabilities of the chosen and rejected sequences, their logits, the loss of the chosen.

        The logits are `MeanOnly`. In ORPO and CPO, nothing but their mean is used.
        """
        trainer = self.trainer
        together = trainer.concatenated_inputs(
            batch,
            is_encoder_decoder=False,
            padding_value=trainer.padding_value if self.orpo else trainer.pad_token_id,
            device=trainer.accelerator.device,
        )
        chosen = batch["chosen_labels"].shape[0]
        ids_BT, attention_BT = together["concatenated_input_ids"], together["concatenated_attention_mask"]
        labels_BT = together["concatenated_labels"]
        # ORPO's loss of the chosen sequences includes the prompt; CPO's does not.
        loss_labels_BT = ids_BT.masked_fill(attention_BT != 1, -100) if self.orpo else labels_BT
        needs_loss = self.orpo or trainer.cpo_alpha != 0

        next_labels_BT, next_loss_labels_BT = _shifted(labels_BT), _shifted(loss_labels_BT)
        counted_BT = next_labels_BT != -100
        in_loss_BT = (next_loss_labels_BT != -100) & needs_loss
        in_loss_BT[chosen:] = False
        next_ids_BT = torch.where(counted_BT, next_labels_BT, next_loss_labels_BT).clamp(min=0)

        more = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
        self.forward.keep_mask = counted_BT | in_loss_BT
        try:
            # No label is ignored, because the mean of the logits that TRL logs is over every position.
            outputs = model(ids_BT, attention_mask=attention_BT, shift_labels=next_ids_BT, fused_lm_head=True, **more)
        finally:
            self.forward.keep_mask = None

        logps_BT = outputs.log_probs
        logps_B = (logps_BT * counted_BT).sum(-1)
        if self.orpo or trainer.loss_type in ("ipo", "simpo"):
            logps_B = logps_B / counted_BT.sum(-1)
        if needs_loss:
            loss = -(logps_BT * in_loss_BT).sum() / in_loss_BT.sum()
        else:
            loss = torch.zeros((), device=logps_B.device)
        mean_BT = outputs.mean_logits[:, :-1] if self.orpo else outputs.mean_logits
        result = (logps_B[:chosen], logps_B[chosen:], MeanOnly(mean_BT[:chosen]), MeanOnly(mean_BT[chosen:]), loss)
        return (*result, outputs.aux_loss) if trainer.aux_loss_enabled else result

    def restore(self) -> None:
        self.override.restore()
        self.forward.restore()


def _shifted(labels_BT: Tensor) -> Tensor:
    """The label that each position predicts; -100 at the last position."""
    return F.pad(labels_BT[:, 1:], (0, 1), value=-100)
