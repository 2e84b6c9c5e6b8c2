"""Liger's modules of divergences: `LigerJSD`, `LigerKLDIVLoss`, `LigerTVDLoss`, and the two of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.ops import divergences as d


class LigerJSD(nn.Module):
    """The generalized Jensen-Shannon divergence of the student's log_q and the teacher's log_p, both (N, V)."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return d.LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class LigerKLDIVLoss(nn.KLDivLoss):
    """`nn.KLDivLoss` with `eps`, the smallest probability whose logarithm is taken. It is the first argument."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return d.LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)


class LigerTVDLoss(nn.Module):
    """The total variation distance of the student's p and the teacher's q, probabilities (N, V)."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return d.LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)


class LigerFusedCETVDLoss(nn.Module):
    """(cross entropy, total variation distance) of each row of logits."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return d.LigerFusedCETVDFunction.apply(student_logits, teacher_logits, target, self.ignore_index)


class LigerFusedLinearJSD(nn.Module):
    """The Jensen-Shannon divergence of two heads. `accum_dtype` is only kept: sums are always fp32."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_temperature(temperature)
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.accum_dtype = accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return d.LigerFusedLinearJSDFunction.apply(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta,
            self.ignore_index, self.temperature, self.accum_dtype,
        )  # fmt: skip


class LigerFusedLinearKLDivLoss(nn.Module):
    """KL from target probabilities to a head's distribution. `accum_dtype` is only kept: sums are always fp32."""

    def __init__(
        self, reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_temperature(temperature)
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        return d.LigerFusedLinearKLDivFunction.apply(
            student_input, student_weight, target, shift_labels, self.reduction, self.ignore_index, self.temperature,
            self.eps, self.accum_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, temperature={self.temperature}, eps={self.eps}"


def _check_temperature(temperature: float) -> None:
    if temperature == 0:
        raise FlagConflict("temperature=0: the logits are divided by it; pass another number.")
