"""`LigerJSDFunction`, `LigerKLDivLossFunction` and the like: divergences of rows, and of two heads.

The student gets a gradient. The teacher and the target do not, as in Liger. Means are over the rows that count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import losses as post_training
from tigon import ops
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.ops import losses
from tigon.compat.liger.ops.row_blocks import per_row
from tigon.compat.liger.ops.target_kl import target_kl
from tigon.errors import OptionError, ShapeError

# N tokens, H and G hidden, V vocabulary.

REDUCTIONS = ("none", "sum", "mean", "batchmean")


def _counts(shift_labels: Tensor | None, rows: int, ignore_index: int) -> Tensor | None:
    """(N,) bool, which rows count; None for all."""
    if shift_labels is None:
        return None
    if shift_labels.shape != (rows,):
        raise FlagConflict(f"the shape of shift_labels must be ({rows},); it is {tuple(shift_labels.shape)}.")
    return shift_labels != ignore_index


def _check_rows(**named: Tensor) -> None:
    shapes = [tuple(value.shape) for value in named.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ShapeError(f"{' and '.join(named)} are {' and '.join(map(str, shapes))}; both must be (N, V).")


def _check_reduction(reduction: str, choices: tuple[str, ...]) -> None:
    if reduction not in choices:
        raise OptionError(f"reduction={reduction!r} is not known; choose one of {', '.join(choices)}.")


def _check_temperature(temperature: float) -> None:
    if temperature == 0:
        raise FlagConflict("temperature=0: the logits are divided by it; pass another number.")


def _reduced(per_token: Tensor, counts: Tensor | None, reduction: str, columns: int) -> Tensor:
    """Sum, mean over rows ("batchmean"), or mean over rows and columns ("mean")."""
    total = per_token.sum()
    if reduction == "sum":
        return total
    rows = max(len(per_token), 1) if counts is None else counts.sum().clamp(min=1)
    return total / (rows * columns if reduction == "mean" else rows)


class LigerJSDFunction:
    """The generalized Jensen-Shannon divergence of log-probabilities, as `tigon.losses.divergence`: a mean."""

    @staticmethod
    def apply(
        _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5,
        ignore_index: int = -100, jsd_impl: Any = None, jsd_mode: Any = None,
    ) -> Tensor:  # fmt: skip
        losses.no_implementation(jsd_impl=jsd_impl, jsd_mode=jsd_mode)
        _check_rows(_input=_input, target=target)
        counts = _counts(shift_labels, len(_input), ignore_index)
        per_token = per_row(_input, target, counts, lambda q, p: post_training.divergence(q, p, kind="jsd", beta=beta))
        return losses.in_chosen_dtype(_reduced(per_token, counts, "batchmean", 1), _input.dtype, fused=False)


class LigerKLDivLossFunction:
    """`F.kl_div`, with the logarithm of probabilities below eps replaced by log eps. `y_pred` is in log space."""

    @staticmethod
    def apply(
        y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
    ) -> Tensor:
        _check_rows(y_pred=y_pred, y_true=y_true)
        _check_reduction(reduction, REDUCTIONS)

        def elements(y: Tensor, target: Tensor) -> Tensor:
            if log_target:
                return target.exp() * (target - y)
            return target * (target.clamp(min=eps).log() - y)

        if reduction == "none":
            dtype = torch.promote_types(y_pred.dtype, torch.float32)
            return elements(y_pred.to(dtype), y_true.detach().to(dtype))
        per_token = per_row(y_pred, y_true, None, lambda y, target: elements(y, target).sum(-1))
        return losses.in_chosen_dtype(
            _reduced(per_token, None, reduction, y_pred.shape[1]), y_pred.dtype, fused=True
        )  # fmt: skip


class LigerTVDLossFunction:
    """The total variation distance ½ Σ |p - q| of probabilities; ½ |p - q| of each entry with reduction="none"."""

    @staticmethod
    def apply(
        p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:  # fmt: skip
        _check_rows(p=p, q=q)
        _check_reduction(reduction, REDUCTIONS)
        counts = _counts(shift_labels, len(p), ignore_index)
        if reduction == "none":
            dtype = torch.promote_types(p.dtype, torch.float32)
            distance = 0.5 * (p.to(dtype) - q.detach().to(dtype)).abs()
            return distance if counts is None else distance.masked_fill(~counts.unsqueeze(1), 0.0)
        per_token = per_row(p, q, counts, lambda p, q: 0.5 * (p - q).abs().sum(-1))
        return losses.in_chosen_dtype(_reduced(per_token, counts, reduction, p.shape[1]), p.dtype, fused=True)


class LigerFusedCETVDFunction:
    """(cross entropy, total variation distance) of each row of logits, both (N,); 0 where the label is ignored."""

    @staticmethod
    def apply(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        _check_rows(student_logits=student_logits, teacher_logits=teacher_logits)
        if target.shape != student_logits.shape[:1]:
            raise ShapeError(f"target is {tuple(target.shape)}; it must be ({len(student_logits)},).")
        logps = ops.logprobs(student_logits, target, ignore_index=ignore_index)
        assert isinstance(logps, Tensor)  # no further outputs are requested
        distance = per_row(
            student_logits, teacher_logits, target != ignore_index,
            lambda s, t: 0.5 * (s.softmax(-1) - t.softmax(-1)).abs().sum(-1),
        )  # fmt: skip
        return -logps, distance


class LigerFusedLinearJSDFunction:
    """The Jensen-Shannon divergence of two heads, from `tigon.linear_kl`; a mean over rows."""

    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None, jsd_impl: Any = None, jsd_mode: Any = None,
    ) -> Tensor:  # fmt: skip
        losses.no_implementation(jsd_impl=jsd_impl, jsd_mode=jsd_mode)
        _check_temperature(temperature)
        counts = _counts(shift_labels, len(student_input), ignore_index)
        per_token = ops.linear_kl(
            student_input, student_weight, teacher_input.detach(), teacher_weight.detach(), kind="jsd", beta=jsd_beta,
            temperature=temperature, mask=counts,
        )  # fmt: skip
        loss = _reduced(per_token, counts, "batchmean", 1)
        return losses.in_chosen_dtype(loss, student_input.dtype, fused=True)


class LigerFusedLinearKLDivFunction:
    """KL from target probabilities (N, V) to a head's distribution, without the head's logits."""

    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
        reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        _check_reduction(reduction, REDUCTIONS[1:])
        _check_temperature(temperature)
        N, V = len(student_input), len(student_weight)
        if target.shape != (N, V):
            raise ShapeError(f"target is {tuple(target.shape)}; it must be ({N}, {V}), a probability per token and id.")
        counts = _counts(shift_labels, N, ignore_index)
        hidden, rows = student_input, target
        if counts is not None:
            hidden, rows = hidden[counts], rows[counts]
        per_token = target_kl(hidden, student_weight, rows, temperature=temperature, eps=eps)
        loss = _reduced(per_token, None, reduction, V)
        return losses.in_chosen_dtype(loss, student_input.dtype, fused=True)
