"""Code shared by the three losses: options, targets, denominators, and the row-wise primitives with their reference.

The formulas are at the top of `kernels/cross_entropy.py`. The reference below loops over blocks of rows, so that on the
CPU too the logits are the only full-size tensor of width V.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, LabelError, OptionError, ShapeError
from tigon.ops import dispatch
from tigon.ops.dispatch import Primitive, check_number, check_whole

# N rows (tokens), V columns (vocabulary).

# Elements of one block of rows in the reference: 2 MiB of fp32. The block's three temporaries stay in cache, and the
# loss uses little memory beyond the logits.
_BLOCK_ELEMENTS = 1 << 19

OUTPUTS = ("logprob", "entropy", "accuracy", "predicted")
_REDUCTIONS = ("mean", "sum", "none")
_SCHEMA = (
    "(Tensor logits, Tensor target, Tensor? class_weight, Tensor? token_weight, int ignore_index,"
    " float label_smoothing, float? softcap, float logit_scale, float z_loss"
)


class LossOptions(NamedTuple):
    """The scalar options, in the order in which the primitives take them."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    z_loss: float


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


def check_options(
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    num_items: Any,
    outputs: tuple[str, ...],
) -> LossOptions:
    """Raise `OptionError` for an invalid value; return the scalars that the primitives take."""
    if reduction not in _REDUCTIONS:
        raise OptionError(f"reduction={reduction!r} is not known; choose one of {', '.join(_REDUCTIONS)}.")
    check_whole("ignore_index", ignore_index)
    if not 0.0 <= check_number("label_smoothing", label_smoothing) <= 1.0:
        raise OptionError(f"label_smoothing={label_smoothing} is outside [0, 1].")
    if softcap is not None and not 0.0 < check_number("softcap", softcap) < math.inf:
        raise OptionError(f"softcap={softcap} must be positive and finite; pass None for no cap.")
    for name, number in (("logit_scale", logit_scale), ("z_loss", z_loss)):
        if not -math.inf < check_number(name, number) < math.inf:
            raise OptionError(f"{name}={number} must be finite; leave it out for none.")
    _check_num_items(num_items)
    if num_items is not None and reduction != "mean":
        raise OptionError(f"num_items divides the mean, but reduction is {reduction!r}. Leave one of them out.")
    if not isinstance(outputs, (tuple, list)):
        raise OptionError(f"outputs={outputs!r} must be a tuple of names; choose from {', '.join(OUTPUTS)}.")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise OptionError(f"outputs names {unknown[0]!r}; choose from {', '.join(OUTPUTS)}.")
    cap = None if softcap is None else float(softcap)
    return LossOptions(ignore_index, float(label_smoothing), cap, float(logit_scale), float(z_loss))


def _check_num_items(num_items: Any) -> None:
    """Raise for a denominator that is not a count.

    A tensor's value is checked only with TIGON_CHECK=1, because on a GPU the host would wait for it.
    """
    if num_items is None:
        return
    if not isinstance(num_items, Tensor):
        value = check_number("num_items", num_items)
    else:
        if num_items.ndim:
            raise ShapeError(
                f"num_items is {tuple(num_items.shape)}; it must be a number or a tensor without dimensions."
            )
        check_vector("num_items", num_items, ())
        if torch.compiler.is_compiling() or num_items.is_meta or os.environ.get("TIGON_CHECK") != "1":
            return
        value = float(num_items)
    if not 0.0 <= value < math.inf:
        raise OptionError(f"num_items={value} must be a count of tokens, 0 or more; leave it out to count the labels.")


def check_target(target: Tensor, rows: torch.Size, of: str) -> None:
    """Raise unless `target` holds class indices, one for each row of `of`."""
    if target.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"target is {target.dtype}; the limit is int64 and int32 class indices. Cast it.")
    if target.shape != rows:
        raise ShapeError(f"target is {tuple(target.shape)}, {of} has rows {tuple(rows)}; they must agree.")


def check_vector(name: str, vector: Tensor | None, shape: tuple[int, ...] | torch.Size) -> None:
    """Raise unless `vector` is None, or a real tensor of `shape` that does not require grad."""
    if vector is None:
        return
    if vector.shape != shape:
        raise ShapeError(f"{name} is {tuple(vector.shape)}; it must be {tuple(shape)}.")
    if vector.is_complex():
        raise DtypeError(f"{name} is {vector.dtype}; it must be real.")
    if vector.requires_grad:
        raise OptionError(f"{name} requires a gradient, which the fused loss does not compute. Detach it.")


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


def check_chunk_bytes(chunk_bytes: int | None) -> None:
    """Raise unless `chunk_bytes` is None or a positive integer."""
    if chunk_bytes is None:
        return
    check_whole("chunk_bytes", chunk_bytes)
    if chunk_bytes <= 0:
        raise OptionError(f"chunk_bytes={chunk_bytes} must be positive; leave it out for the default.")


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
    num_items: Tensor | float | None,
    options: LossOptions,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """1 / D as a scalar on the target's device; 1 unless the reduction is "mean".

    If D is 0, the result is 0; for a count of labels it is 1, because then the losses of all rows are 0. It is never
    read on the host; the kernels multiply by it. like: logits or hidden states, which decide whether a kernel runs.
    """
    device = target_N.device
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=device)
    if num_items is not None:
        count = number_on(num_items, dtype, device)
    else:
        # If all rows are ignored, their sum is 0 already. Clamping the count to 1 saves two launches.
        if class_weight is None and _one_program(like, target_N) and dtype == torch.float32:
            from tigon.kernels.cross_entropy import inverse_count

            return inverse_count(like, target_N, options.ignore_index)  # type: ignore[no-any-return]
        valid = target_N != options.ignore_index
        if class_weight is None:
            return valid.sum(dtype=dtype).clamp_(min=1.0).reciprocal_()
        # An invalid label must not be used as an index; its own row is NaN already.
        weights = class_weight.to(dtype)[target_N.clamp(0, class_weight.shape[0] - 1).to(torch.int64)]
        count = (weights * valid).sum()
    inverse: Tensor = torch.where(count == 0, 0.0, 1.0 / count)
    return inverse


def accuracy(predicted: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Share of the tokens (without ignored ones) that were predicted, 0-dim fp32; 0 if all are ignored."""
    valid = target != ignore_index
    return ((predicted == target) & valid).sum().float() / valid.sum().clamp(min=1)


def pack(
    results: tuple[Tensor, Tensor, Tensor, Tensor], target: Tensor, per_row: bool, outputs: tuple[str, ...],
    ignore_index: int,
) -> Tensor | LossOutput:  # fmt: skip
    """Make the public return value from (loss, stats, entropy, predicted): the loss alone, or a `LossOutput`."""
    loss, stats, entropy, predicted = results
    loss = loss.view(target.shape) if per_row else loss
    if not outputs:
        return loss
    return LossOutput(
        loss,
        logprob=logprob_of(stats).view(target.shape) if "logprob" in outputs else None,
        entropy=entropy.view(target.shape) if "entropy" in outputs else None,
        accuracy=accuracy(predicted.view(target.shape), target, ignore_index) if "accuracy" in outputs else None,
        predicted=predicted.view(target.shape) if "predicted" in outputs else None,
    )


def wanted(outputs: tuple[str, ...]) -> tuple[bool, bool]:
    """(entropy, predicted): which extra columns the kernel must produce."""
    return "entropy" in outputs, "predicted" in outputs or "accuracy" in outputs


def logprob_of(stats: Tensor) -> Tensor:
    """log p(target) from (3, N) statistics; z_y is subtracted from m before log_s is, for accuracy."""
    m, log_s, z_y = stats.unbind(0)
    return (z_y - m) - log_s


class _Rows:
    """One block of rows of the reference: z, its statistics, and the gradient, which overwrites z."""

    def __init__(
        self, logits_NV: Tensor, target: Tensor, class_weight: Tensor | None, token_weight: Tensor | None,
        options: LossOptions, acc: torch.dtype,
    ) -> None:  # fmt: skip
        self.options, self.acc = options, acc
        self.V = logits_NV.shape[1]
        z = logits_NV.to(acc, copy=True)
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
        self.class_weight = None if class_weight is None else class_weight.to(acc)
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


def _fwd_reference(
    logits_NV: Tensor, target: Tensor, class_weight: Tensor | None, token_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    entropy: bool, predicted: bool, grad_scale: Tensor | None = None, grad_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same algorithm as `kernels.cross_entropy.cross_entropy_fwd`."""
    N, V = logits_NV.shape
    acc = torch.promote_types(logits_NV.dtype, torch.float32)
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    loss, stats, entropies, argmax = _fwd_outputs(logits_NV, entropy, predicted)
    for rows in _blocks(N, V):
        weight = None if token_weight is None else token_weight[rows]
        block = _Rows(logits_NV[rows], target[rows], class_weight, weight, options, acc)
        m, log_s, z_y = block.statistics()
        loss[rows] = block.loss(m, log_s, z_y)
        stats[:, rows] = torch.stack([m, log_s, z_y]).masked_fill_(block.ignored, 0.0)
        if entropy:
            entropies[rows] = block.entropy(m, log_s)
        if predicted:
            argmax[rows] = block.z.argmax(1).masked_fill_(block.ignored, ignore_index)
        if grad_NV is not None and grad_scale is not None:
            grad_NV[rows] = block.gradient(m, log_s, grad_scale.to(acc)).to(grad_NV.dtype)
    return loss, stats, entropies, argmax


def _bwd_reference(
    logits_NV: Tensor, target: Tensor, class_weight: Tensor | None, token_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    stats: Tensor, dloss: Tensor, scale: Tensor,
) -> Tensor:  # fmt: skip
    acc = torch.promote_types(logits_NV.dtype, torch.float32)
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    grad = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
    for rows in _blocks(*logits_NV.shape):
        weight = None if token_weight is None else token_weight[rows]
        block = _Rows(logits_NV[rows], target[rows], class_weight, weight, options, acc)
        grad[rows] = block.gradient(stats[0, rows], stats[1, rows], dloss[rows].to(acc) * scale.to(acc)).to(grad.dtype)
    return grad


def _fwd_outputs(logits_NV: Tensor, entropy: bool, predicted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N = logits_NV.shape[0]
    acc = torch.promote_types(logits_NV.dtype, torch.float32)
    return (
        logits_NV.new_empty(N, dtype=acc),
        logits_NV.new_empty((3, N), dtype=acc),
        logits_NV.new_empty(N if entropy else 0, dtype=acc),
        logits_NV.new_empty(N if predicted else 0, dtype=torch.int64),
    )


def _fwd_fake(
    logits_NV: Tensor, target: Tensor, class_weight: Tensor | None, token_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    entropy: bool, predicted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _fwd_outputs(logits_NV, entropy, predicted)


def _bwd_fake(logits_NV: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits_NV, memory_format=torch.contiguous_format)


def _check(logits_NV: Tensor, target: Tensor, *args: Any) -> None:
    if wants_label_check(logits_NV):
        check_labels(logits_NV.shape[1], target, args[2])


# Code that writes the gradient into its own buffer calls `.run` directly, so no mutating operator is needed.
cross_entropy_fwd = Primitive(
    "cross_entropy_fwd",
    _SCHEMA + ", bool entropy, bool predicted) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_fwd_reference,
    kernel="tigon.kernels.cross_entropy:cross_entropy_fwd",
    fake=_fwd_fake,
    check=_check,
)
cross_entropy_bwd = Primitive(
    "cross_entropy_bwd",
    _SCHEMA + ", Tensor stats, Tensor dloss, Tensor scale) -> Tensor",
    reference=_bwd_reference,
    kernel="tigon.kernels.cross_entropy:cross_entropy_bwd",
    fake=_bwd_fake,
)


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
