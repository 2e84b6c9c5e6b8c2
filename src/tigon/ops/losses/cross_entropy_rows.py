"""Cross entropy of rows of logits, and its gradient: the operators, and their reference in PyTorch.

The formulas are at the top of `kernels/cross_entropy.py`. The reference loops over blocks of rows, so that on the CPU
too the logits are the only full-size tensor of width V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive
from tigon.ops.losses.inputs import LossOptions, check_labels, wants_label_check

# N rows (tokens), V columns (vocabulary).

# Elements of one block of rows in the reference: 2 MiB of fp32. The block's three temporaries stay in cache, and the
# loss uses little memory beyond the logits.
_BLOCK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Rows:
    """Logits with their labels, weights and options: what the row-wise primitives read."""

    logits_NV: Tensor
    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    options: LossOptions

    def block(self, rows: slice) -> Rows:
        """Some of the rows."""
        token_weight = None if self.token_weight is None else self.token_weight[rows]
        return Rows(self.logits_NV[rows], self.target[rows], self.class_weight, token_weight, self.options)


class _Block:
    """One block of rows of the reference: z, its statistics, and the gradient, which overwrites z."""

    def __init__(self, rows: Rows, acc: torch.dtype) -> None:
        options, target, token_weight = rows.options, rows.target, rows.token_weight
        self.options = options
        self.V = rows.logits_NV.shape[1]
        z = rows.logits_NV.to(acc, copy=True)
        if options.logit_scale != 1.0:
            z.mul_(options.logit_scale)
        self.slope: Tensor | None = None
        if options.softcap is not None:
            # With e = exp(-2|t|), the slope 4e / (1 + e)^2 does not cancel if tanh saturates; 1 - tanh^2 would.
            e = z.div_(options.softcap).abs().mul_(-2.0).exp_()
            self.slope = 4.0 * e / (1.0 + e).square()
            z.tanh_().mul_(options.softcap)
        self.z = z
        self.ignored = target == options.ignore_index
        valid = (target >= 0) & (target < self.V)
        self.y = target.to(torch.int64).clamp(0, max(self.V - 1, 0)).unsqueeze(1)
        self.class_weight = None if rows.class_weight is None else rows.class_weight.to(acc)
        ones = z.new_ones(target.shape)
        self.w_y = ones if self.class_weight is None else self.class_weight[self.y.squeeze(1)]
        self.weight_sum = float(self.V) if self.class_weight is None else self.class_weight.sum()
        a = ones if token_weight is None else token_weight.to(acc)
        self.a = torch.where(valid, a, float("nan"))

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        m = self.z.amax(1)
        shift = torch.where(m == -float("inf"), 0.0, m)
        log_s = (self.z - shift.unsqueeze(1)).exp_().sum(1).log_()
        return m, log_s, self.z.gather(1, self.y).squeeze(1)

    def loss(self, m: Tensor, log_s: Tensor, z_y: Tensor) -> Tensor:
        o = self.options
        lse = m + log_s
        loss = (1.0 - o.label_smoothing) * self.w_y * ((m - z_y) + log_s)
        if o.label_smoothing:
            sum_wz = self.z.sum(1) if self.class_weight is None else self.z @ self.class_weight
            loss = loss + o.label_smoothing / self.V * (self.weight_sum * lse - sum_wz)
        if o.z_loss:
            loss = loss + o.z_loss * lse.square()
        return (self.a * loss).masked_fill_(self.ignored, 0.0)

    def entropy(self, m: Tensor, log_s: Tensor) -> Tensor:
        shifted = self.z - torch.where(m == -float("inf"), 0.0, m).unsqueeze(1)
        e = shifted.exp()
        sum_ez = torch.where(e > 0, e * shifted, 0.0).sum(1)
        return (log_s - sum_ez / e.sum(1)).masked_fill_(self.ignored, 0.0)

    def gradient(self, m: Tensor, log_s: Tensor, row_scale: Tensor) -> Tensor:
        """dr · row_scale, (rows, V) in the accumulation dtype."""
        o = self.options
        hit = (1.0 - o.label_smoothing) * self.w_y
        on_p = hit + o.label_smoothing / self.V * self.weight_sum
        if o.z_loss:
            on_p = on_p + 2.0 * o.z_loss * (m + log_s)
        grad = self.z.sub_(m.unsqueeze(1)).sub_(log_s.unsqueeze(1)).exp_().mul_(on_p.unsqueeze(1))
        if o.label_smoothing:
            grad.sub_(o.label_smoothing / self.V * (1.0 if self.class_weight is None else self.class_weight))
        grad.scatter_add_(1, self.y, -hit.unsqueeze(1))
        if self.slope is not None:
            grad.mul_(self.slope)
        grad.mul_((self.a * row_scale * o.logit_scale).unsqueeze(1))
        return grad.masked_fill_(self.ignored.unsqueeze(1), 0.0)


def _blocks(N: int, V: int) -> list[slice]:
    rows = max(1, _BLOCK_ELEMENTS // max(V, 1))
    return [slice(start, min(start + rows, N)) for start in range(0, N, rows)]


class RowsResults(NamedTuple):
    """The result of `cross_entropy_fwd`, one entry per row; what is not wanted is empty."""

    loss: Tensor
    stats: Tensor
    entropy: Tensor
    predicted: Tensor


def _fwd_reference(
    rows: Rows, entropy: bool, predicted: bool, grad_scale: Tensor | None = None, grad_NV: Tensor | None = None
) -> RowsResults:
    """The same algorithm as `kernels.cross_entropy.cross_entropy_fwd`."""
    N, V = rows.logits_NV.shape
    acc = torch.promote_types(rows.logits_NV.dtype, torch.float32)
    results = _fwd_fake(rows, entropy, predicted)
    for at in _blocks(N, V):
        block = _Block(rows.block(at), acc)
        m, log_s, z_y = block.statistics()
        results.loss[at] = block.loss(m, log_s, z_y)
        results.stats[:, at] = torch.stack([m, log_s, z_y]).masked_fill_(block.ignored, 0.0)
        if entropy:
            results.entropy[at] = block.entropy(m, log_s)
        if predicted:
            results.predicted[at] = block.z.argmax(1).masked_fill_(block.ignored, rows.options.ignore_index)
        if grad_NV is not None and grad_scale is not None:
            grad_NV[at] = block.gradient(m, log_s, grad_scale.to(acc)).to(grad_NV.dtype)
    return results


def _bwd_reference(rows: Rows, stats: Tensor, dloss: Tensor, scale: Tensor) -> Tensor:
    acc = torch.promote_types(rows.logits_NV.dtype, torch.float32)
    grad = _bwd_fake(rows, stats, dloss, scale)
    for at in _blocks(*rows.logits_NV.shape):
        block = _Block(rows.block(at), acc)
        grad[at] = block.gradient(stats[0, at], stats[1, at], dloss[at].to(acc) * scale.to(acc)).to(grad.dtype)
    return grad


def _fwd_fake(rows: Rows, entropy: bool, predicted: bool) -> RowsResults:
    logits_NV = rows.logits_NV
    N, acc = logits_NV.shape[0], torch.promote_types(logits_NV.dtype, torch.float32)
    return RowsResults(
        loss=logits_NV.new_empty(N, dtype=acc),
        stats=logits_NV.new_empty((3, N), dtype=acc),
        entropy=logits_NV.new_empty(N if entropy else 0, dtype=acc),
        predicted=logits_NV.new_empty(N if predicted else 0, dtype=torch.int64),
    )


def _bwd_fake(rows: Rows, stats: Tensor, dloss: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(rows.logits_NV, memory_format=torch.contiguous_format)


def check_rows(rows: Rows, *_: object) -> None:
    """Raise `LabelError` for an invalid label, where labels are checked at all."""
    if wants_label_check(rows.logits_NV):
        check_labels(rows.logits_NV.shape[1], rows.target, rows.options.ignore_index)


# Code that writes the gradient into its own buffer calls the body directly, so no mutating operator is needed.
cross_entropy_fwd = Primitive(
    "cross_entropy_fwd",
    fake=_fwd_fake,
    reference=_fwd_reference,
    kernel="tigon.kernels.cross_entropy:cross_entropy_fwd",
    check=check_rows,
)
cross_entropy_bwd = Primitive(
    "cross_entropy_bwd",
    fake=_bwd_fake,
    reference=_bwd_reference,
    kernel="tigon.kernels.cross_entropy:cross_entropy_bwd",
)


def rows_with_gradient(rows: Rows, entropy: bool, predicted: bool, grad_scale: Tensor, grad_NV: Tensor | None) -> Any:
    """(loss, stats, entropy, predicted) of the rows; writes the gradient times `grad_scale` into `grad_NV` if given."""
    check_rows(rows)
    return cross_entropy_fwd.body(rows.logits_NV)(rows, entropy, predicted, grad_scale, grad_NV)


def _scale_rows_reference(x_NH: Tensor, scale: Tensor, index_N: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
    acc = torch.promote_types(x_NH.dtype, scale.dtype)
    scaled = x_NH.to(acc).mul(scale.to(acc).expand(x_NH.shape[0]).unsqueeze(1)).to(dtype)
    if index_N is None:
        return scaled.clone() if scaled is x_NH else scaled
    return scaled.new_zeros(rows, x_NH.shape[1]).index_copy_(0, index_N, scaled)


def _scale_rows_fake(x_NH: Tensor, scale: Tensor, index_N: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
    return x_NH.new_empty(rows, x_NH.shape[1], dtype=dtype)


# out[index[i]] = x[i] * scale[i]; other rows are 0. scale is (N,) with any stride, or 0-dim; it is applied in fp32.
scale_rows = Primitive(
    "scale_rows",
    "(Tensor x, Tensor scale, Tensor? index, SymInt rows, ScalarType dtype) -> Tensor",
    reference=_scale_rows_reference,
    kernel="tigon.kernels.scale_rows:scale_rows",
    fake=_scale_rows_fake,
)
