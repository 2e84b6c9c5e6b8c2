"""Divergences of rows of probabilities, and of two heads: `LigerJSD`, `LigerKLDIVLoss`, `LigerTVDLoss` and the like.

The student gets a gradient. The teacher and the target do not, as in Liger. Means are over the rows that count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon import losses, ops
from tigon.compat.liger.errors import FlagConflict, no_implementation, no_reduce
from tigon.compat.liger.loss_dtype import in_chosen_dtype
from tigon.compat.liger.rows import form, function, module
from tigon.errors import OptionError, ShapeError

# N tokens, H and G hidden, V vocabulary.

BLOCK_BYTES = 1 << 26
"""Most bytes of one fp32 temporary."""


def _per_row(
    student_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor | None, formula: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(N,) value of each row, fp32 or fp64; 0, with a gradient of 0, where `counts_N` is False.

    The rows go through the formula in blocks, which the backward computes again: no temporary has the whole size.
    """
    if counts_N is None:
        counts_N = torch.ones(len(student_NV), dtype=torch.bool, device=student_NV.device)
    dtype = torch.promote_types(torch.promote_types(student_NV.dtype, teacher_NV.dtype), torch.float32)

    def of_block(student: Tensor, teacher: Tensor, counts: Tensor) -> Tensor:
        ignored = ~counts.unsqueeze(1)  # such rows may hold NaN
        rows = (student.to(dtype).masked_fill(ignored, 0.0), teacher.to(dtype).masked_fill(ignored, 0.0))
        return formula(*rows).masked_fill(~counts, 0.0)

    n = max(1, BLOCK_BYTES // (4 * max(1, student_NV.shape[1])))
    blocks = zip(student_NV.split(n), teacher_NV.detach().split(n), counts_N.split(n), strict=True)
    return torch.cat([checkpoint(of_block, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks])


def _counts(shift_labels: Tensor | None, rows: int, ignore_index: int) -> Tensor | None:
    """(N,) bool, which rows count; None for all."""
    if shift_labels is None:
        return None
    if shift_labels.shape != (rows,):
        raise FlagConflict(f"the shape of shift_labels must be ({rows},); it is {tuple(shift_labels.shape)}.")
    return shift_labels != ignore_index


def _check_rows(reduction: str, **named: Tensor) -> None:
    shapes = [tuple(value.shape) for value in named.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ShapeError(f"{' and '.join(named)} are {' and '.join(map(str, shapes))}; both must be (N, V).")
    choices = ("none", "sum", "mean", "batchmean")
    if reduction not in choices:
        raise OptionError(f"reduction={reduction!r} is not known; choose one of {', '.join(choices)}.")


def check_temperature(temperature: float, **others: object) -> None:
    if temperature == 0:
        raise FlagConflict("temperature=0: the logits are divided by it; pass another number.")


def _reduced(per_token: Tensor, counts: Tensor | None, reduction: str = "batchmean", columns: int = 1) -> Tensor:
    """Sum, mean over rows ("batchmean"), or mean over rows and columns ("mean")."""
    total = per_token.sum()
    if reduction == "sum":
        return total
    rows = max(len(per_token), 1) if counts is None else counts.sum().clamp(min=1)
    return total / (rows * columns if reduction == "mean" else rows)


def jsd(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    jsd_impl: object = None,
    jsd_mode: object = None,
) -> Tensor:
    """The generalized Jensen-Shannon divergence of log-probabilities (N, V), as a mean over rows.

    `beta` is the teacher's share of the mixture; 0 is the forward and 1 the reverse KL divergence. Rows whose label in
    `shift_labels` (N,) is `ignore_index` do not count.
    """
    no_implementation(jsd_impl=jsd_impl, jsd_mode=jsd_mode)
    _check_rows("batchmean", _input=_input, target=target)
    counts = _counts(shift_labels, len(_input), ignore_index)
    per_token = _per_row(_input, target, counts, lambda q, p: losses.divergence(q, p, kind="jsd", beta=beta))
    return in_chosen_dtype(_reduced(per_token, counts), _input.dtype, fused=False)


def kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """`F.kl_div` of log-probabilities y_pred; the logarithm of probabilities below eps is log eps."""
    _check_rows(reduction, y_pred=y_pred, y_true=y_true)

    def elements(y: Tensor, target: Tensor) -> Tensor:
        if log_target:
            return target.exp() * (target - y)
        return target * (target.clamp(min=eps).log() - y)

    if reduction == "none":
        dtype = torch.promote_types(y_pred.dtype, torch.float32)
        return elements(y_pred.to(dtype), y_true.detach().to(dtype))
    per_token = _per_row(y_pred, y_true, None, lambda y, target: elements(y, target).sum(-1))
    return in_chosen_dtype(_reduced(per_token, None, reduction, y_pred.shape[1]), y_pred.dtype, fused=True)


def tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    """The total variation distance ½ Σ |p - q| of probabilities; ½ |p - q| of each entry with reduction="none"."""
    _check_rows(reduction, p=p, q=q)
    counts = _counts(shift_labels, len(p), ignore_index)
    if reduction == "none":
        dtype = torch.promote_types(p.dtype, torch.float32)
        distance = 0.5 * (p.to(dtype) - q.detach().to(dtype)).abs()
        return distance if counts is None else distance.masked_fill(~counts.unsqueeze(1), 0.0)
    per_token = _per_row(p, q, counts, lambda p, q: 0.5 * (p - q).abs().sum(-1))
    return in_chosen_dtype(_reduced(per_token, counts, reduction, p.shape[1]), p.dtype, fused=True)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
    jsd_impl: object = None,
    jsd_mode: object = None,
) -> Tensor:
    """The Jensen-Shannon divergence of two heads, from `tigon.linear_kl`, without their logits; a mean over rows."""
    no_implementation(jsd_impl=jsd_impl, jsd_mode=jsd_mode)
    check_temperature(temperature)
    counts = _counts(shift_labels, len(student_input), ignore_index)
    per_token = ops.linear_kl(
        student_input,
        student_weight,
        teacher_input.detach(),
        teacher_weight.detach(),
        kind="jsd",
        beta=jsd_beta,
        temperature=temperature,
        mask=counts,
    )
    return in_chosen_dtype(_reduced(per_token, counts), student_input.dtype, fused=True)


def _torch_kl_div(size_average: Any = True, reduce: Any = True, **values: Any) -> Tensor:
    no_reduce(True, size_average=size_average, reduce=reduce)
    return kl_div(**values)


# --- Liger's names ----------------------------------------------------------------------------------------------------

LigerJSDFunction = function("LigerJSDFunction", jsd)
liger_jsd = form(jsd, "input:_input target shift_labels beta ignore_index")
LigerJSD = module("LigerJSD", jsd, holds="beta ignore_index", takes="log_q:_input log_p:target shift_labels")

LigerKLDivLossFunction = function("LigerKLDivLossFunction", kl_div)
liger_kl_div = form(
    _torch_kl_div,
    "input:y_pred! target:y_true! size_average reduce reduction='mean' log_target=False eps=1e-10",
)


class LigerKLDIVLoss(nn.KLDivLoss):
    """`nn.KLDivLoss` with `eps`, the smallest probability whose logarithm is taken. It is the first argument."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


LigerTVDLossFunction = function("LigerTVDLossFunction", tvd)
liger_tvd = form(tvd, "input:p target:q shift_labels reduction='mean' ignore_index")
LigerTVDLoss = module("LigerTVDLoss", tvd, holds="reduction ignore_index", takes="p q shift_labels")

_HEADS = "student_input student_weight teacher_input teacher_weight"
LigerFusedLinearJSDFunction = function("LigerFusedLinearJSDFunction", fused_linear_jsd)
liger_fused_linear_jsd = form(fused_linear_jsd, f"{_HEADS} shift_labels jsd_beta ignore_index temperature accum_dtype")
LigerFusedLinearJSD = module(
    "LigerFusedLinearJSD",
    fused_linear_jsd,
    holds="jsd_beta ignore_index temperature accum_dtype",
    takes=f"{_HEADS} shift_labels!",
    check=check_temperature,
)
