"""Code shared by the three losses: targets, denominators, and the row-wise primitives with their reference.

The formulas are at the top of `kernels/cross_entropy.py`. The reference below loops over blocks of rows, so that on the
CPU too the logits are the only full-size tensor of width V.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, LabelError, ShapeError
from tigon.ops import dispatch
from tigon.ops.dispatch import Primitive
from tigon.ops.losses.options import LossOptions

# N rows (tokens), V columns (vocabulary).

# Elements of one block of rows in the reference: 2 MiB of fp32. The block's three temporaries stay in cache, and the
# loss uses little memory beyond the logits.
_BLOCK_ELEMENTS = 1 << 19


class LossOutput(NamedTuple):
    """The result of a loss with `outputs`. Only `loss` is differentiable.

    loss: 0-dim fp32, or the target's shape for reduction="none".
    logprob: log p(target), fp32, the target's shape; 0 where ignored.
    entropy: -Σ p log p in nats, fp32, the target's shape; 0 where ignored.
    accuracy: 0-dim fp32, the share of tokens, without ignored ones, whose largest logit is the target's; 0 if all are
        ignored.
    predicted: index of the largest logit, int64, the target's shape; ignore_index where ignored.
    """

    loss: Tensor
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    predicted: Tensor | None = None


def check_target(target: Tensor, rows: torch.Size, of: str) -> None:
    """Raise unless `target` holds class indices, one for each row of `of`."""
    if target.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"target is {target.dtype}; the limit is int64 and int32 class indices. Cast it.")
    if target.shape != rows:
        raise ShapeError(f"target is {tuple(target.shape)}, {of} has rows {tuple(rows)}; they must agree.")


def check_devices(**tensors: Tensor | None) -> None:
    """Raise unless all tensors are on the first one's device; a kernel would read another device's address."""
    (name, first), *others = tensors.items()
    assert first is not None
    for other, tensor in others:
        if tensor is not None and tensor.device != first.device:
            raise ShapeError(f"{other} is on {tensor.device}, {name} is on {first.device}; move one of them.")


def check_vocabulary(V: int) -> None:
    """Raise unless there is at least one class."""
    if V == 0:
        raise ShapeError("the vocabulary has 0 classes; V must be at least 1.")


def check_labels(logits_width: int, target: Tensor, ignore_index: int) -> None:
    """Raise `LabelError` for a label outside [0, V); reads the target, so on a GPU it waits for the device."""
    bad = ((target < 0) | (target >= logits_width)) & (target != ignore_index)
    if bool(bad.any()):
        position = int(bad.reshape(-1).nonzero()[0])
        raise LabelError(
            f"label {int(target.reshape(-1)[position])} at position {position} is outside [0, {logits_width}), out of "
            f"bounds, and is not ignore_index ({ignore_index}). Does the tokenizer belong to this model?"
        )


def wants_label_check(logits: Tensor) -> bool:
    """Whether to check labels: always on the CPU, as in PyTorch; else only with TIGON_CHECK=1, as the check waits."""
    return os.environ.get("TIGON_CHECK") == "1" or not (dispatch.uses_kernel(logits) or logits.is_cuda)


def labels_ahead(target_BT: Tensor, positions_BT: Tensor | None, rows: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Labels `shift` positions after the flat positions `rows`.

    The label is ignore_index past the end of the sequence and, with positions, in another document. Positions increase
    by one inside a document and restart in the next.
    """
    if shift == 0:
        return target_BT.reshape(-1)[rows]
    T = target_BT.shape[1]
    inside = rows % T + shift < T
    ahead = torch.where(inside, rows + shift, rows)
    if positions_BT is not None:
        positions_N = positions_BT.reshape(-1)
        inside &= positions_N[ahead] == positions_N[rows] + shift
    return torch.where(inside, target_BT.reshape(-1)[ahead], ignore_index)


def scored(
    target_BT: Tensor, positions_BT: Tensor | None, shifts: Sequence[int], ignore_index: int
) -> tuple[Tensor, Tensor]:
    """((K,) int64, the number of tokens each head is scored on; (N,) bool, the tokens that any head is scored on)"""
    rows = torch.arange(target_BT.numel(), device=target_BT.device)
    any_N = torch.zeros(target_BT.numel(), dtype=torch.bool, device=target_BT.device)
    counts = []
    for shift in shifts:
        valid = labels_ahead(target_BT, positions_BT, rows, shift, ignore_index) != ignore_index
        counts.append(valid.sum())
        any_N |= valid
    return torch.stack(counts), any_N


def number_on(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` as a tensor on the device.

    A Python number is filled in on the device, because a CUDA graph cannot capture a copy from pageable host memory.
    """
    if isinstance(value, Tensor):
        if value.is_meta and device.type != "meta":
            raise ShapeError("num_items (or head_weights) is on the meta device, which holds no numbers; compute it.")
        return value.to(device, dtype, non_blocking=True)
    return torch.full((), value, dtype=dtype, device=device)


def _one_program(like: Tensor, rows_N: Tensor) -> bool:
    """Whether one kernel with a single program sums the rows, instead of several PyTorch operators.

    For few rows, the time is that of the launches alone.
    """
    if not (dispatch.uses_kernel(like) and dispatch.can_bypass_dispatcher((like, rows_N))):
        return False
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (like, rows_N))):  # their storage is not to be had
        return False
    from tigon.kernels.cross_entropy import ONE_PROGRAM_ROWS

    return rows_N.shape[0] <= ONE_PROGRAM_ROWS


def sum_times(loss_N: Tensor, factor: Tensor) -> Tensor:
    """The sum of the row losses times a scalar, 0-dim."""
    if _one_program(loss_N, loss_N) and factor.dtype == loss_N.dtype:
        from tigon.kernels.cross_entropy import scaled_sum

        return scaled_sum(loss_N, factor)  # type: ignore[no-any-return]
    return loss_N.sum() * factor


def inverse_denominator(
    like: Tensor,
    target_N: Tensor,
    class_weight: Tensor | None,
    *,
    num_items: Tensor | float | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """1 / D as a scalar on the target's device; 1 unless the reduction is "mean".

    If D is 0, the result is 0; for a count of labels it is 1, because then the losses of all rows are 0. It is never
    read on the host; the kernels multiply by it. like: logits or hidden states, which decide whether a kernel runs and
    give the result's dtype.
    """
    device, dtype = target_N.device, torch.promote_types(like.dtype, torch.float32)
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=device)
    if num_items is not None:
        count = number_on(num_items, dtype, device)
    else:
        # If all rows are ignored, their sum is 0 already. Clamping the count to 1 saves two launches.
        if class_weight is None and _one_program(like, target_N) and dtype == torch.float32:
            from tigon.kernels.cross_entropy import inverse_count

            return inverse_count(like, target_N, ignore_index)  # type: ignore[no-any-return]
        valid = target_N != ignore_index
        if class_weight is None:
            return valid.sum(dtype=dtype).clamp_(min=1.0).reciprocal_()
        # An invalid label must not be used as an index; its own row is NaN already.
        weights = class_weight.to(dtype)[target_N.clamp(0, class_weight.shape[0] - 1).to(torch.int64)]
        count = (weights * valid).sum()
    inverse: Tensor = torch.where(count == 0, 0.0, 1.0 / count)
    return inverse


# fp16 gradients are stored multiplied by this factor and scaled back in fp32. Without it, and with 1/N folded in before
# the loss scale, the entries of a 32k vocabulary fall below fp16's smallest number and their error reaches 288 %.
FP16_SCALE = 2.0**10


# The lse that z-loss is scaled for. It is far above that of a trained model, and G has room for 64 times as much.
_USUAL_LSE = 128.0


def gradient_scales(
    dtype: torch.dtype,
    inv_denominator: Tensor,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, Tensor | None]:
    """(factor of the stored gradient, factor still to multiply by or None for 1); their product is 1/D.

    bf16 and fp32 have the exponent range to take 1/D at once. fp16 stores dr · 2^10 / M. M is the largest size that
    dr can have: max|a| · |scale| · (max(1, max w) + 2λ·lse). 65504 is 64 times the largest entry of such a G.
    """
    if dtype != torch.float16:
        return inv_denominator, None
    one = torch.ones_like(inv_denominator)
    size = one if class_weight is None else class_weight.amax().to(one.dtype).clamp(min=1.0)
    size = (size + 2.0 * options.z_loss * (options.softcap or _USUAL_LSE)) * (abs(options.logit_scale) or 1.0)
    if token_weight is not None and token_weight.numel():
        largest = token_weight.to(one.dtype).abs().amax()
        size = size * torch.where(largest > 0, largest, one)
    return FP16_SCALE / size, inv_denominator * size / FP16_SCALE


def accuracy(predicted: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Share of the tokens (without ignored ones) that were predicted, 0-dim fp32; 0 if all are ignored."""
    valid = target != ignore_index
    return ((predicted == target) & valid).sum().float() / valid.sum().clamp(min=1)


class LossResults(NamedTuple):
    """The result of an operator of a loss."""

    loss: Tensor
    """0-dim, or (N,) for reduction="none"."""
    stats: Tensor
    """(3, N): m, log Σ exp(z - m) and z_y."""
    entropy: Tensor
    predicted: Tensor

    def public(self, target: Tensor, per_row: bool, outputs: Collection[str], ignore_index: int) -> Tensor | LossOutput:
        """The public function's result: the loss alone, or a `LossOutput`."""
        loss = self.loss.view(target.shape) if per_row else self.loss
        if not outputs:
            return loss
        predicted = self.predicted
        return LossOutput(
            loss,
            logprob=logprob_of(self.stats).view(target.shape) if "logprob" in outputs else None,
            entropy=self.entropy.view(target.shape) if "entropy" in outputs else None,
            accuracy=accuracy(predicted.view(target.shape), target, ignore_index) if "accuracy" in outputs else None,
            predicted=predicted.view(target.shape) if "predicted" in outputs else None,
        )


def wants_entropy(outputs: Collection[str]) -> bool:
    """Whether the kernel must compute the entropy."""
    return "entropy" in outputs


def wants_predicted(outputs: Collection[str]) -> bool:
    """Whether the kernel must compute the index of the largest logit."""
    return "predicted" in outputs or "accuracy" in outputs


def logprob_of(stats: Tensor) -> Tensor:
    """log p(target) from (3, N) statistics; z_y is subtracted from m before log_s is, for accuracy."""
    m, log_s, z_y = stats.unbind(0)
    return (z_y - m) - log_s


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


def check_rows(rows: Rows, *_: Any) -> None:
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
    kernel="tigon.kernels.cross_entropy:scale_rows",
    fake=_scale_rows_fake,
)
