"""What every loss is given: options, labels and denominators, checked once.

`LossOptions` also gives the operators' schemas (`ops/signature.py`). The public functions repeat the defaults in their
signatures, so that editors show them; a test compares the two. No host reads a denominator.
"""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, LabelError, OptionError, ShapeError
from tigon.ops import dispatch
from tigon.ops.dispatch import check_number, check_whole

# N rows (tokens).

# --- options ----------------------------------------------------------------------------------------------------------

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("logprob", "entropy", "accuracy", "predicted")
_COLLECTIONS = (tuple, list, set, frozenset)


# A value of the plain type in range is returned at once, which takes a fifth of the time of the whole check.


def _whole(name: str, value: object) -> Any:
    if type(value) is not int:
        check_whole(name, value)
    return value


def _share(name: str, value: Any) -> float:
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    if not 0.0 <= check_number(name, value) <= 1.0:
        raise OptionError(f"{name}={value} is outside [0, 1].")
    return float(value)


def _cap(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not 0.0 < check_number(name, value) < math.inf:
        raise OptionError(f"{name}={value} must be positive and finite; pass None for no cap.")
    return float(value)


def _finite(name: str, value: Any) -> float:
    if type(value) is float and -math.inf < value < math.inf:
        return value
    if not -math.inf < check_number(name, value) < math.inf:
        raise OptionError(f"{name}={value} must be finite; leave it out for none.")
    return float(value)


class LossOptions(NamedTuple):
    """The scalar options of all losses. An annotation holds the option's type and its check."""

    ignore_index: Annotated[int, _whole] = -100
    label_smoothing: Annotated[float, _share] = 0.0
    softcap: Annotated[float | None, _cap] = None
    logit_scale: Annotated[float, _finite] = 1.0
    z_loss: Annotated[float, _finite] = 0.0


def _checks() -> tuple[Callable[[str, Any], Any], ...]:
    hints = typing.get_type_hints(LossOptions, include_extras=True)
    return tuple(hints[name].__metadata__[0] for name in LossOptions._fields)


_CHECKS = _checks()


def check_options(
    options: LossOptions, *, reduction: str, num_items: object, outputs: object, names: tuple[str, ...] = OUTPUTS
) -> tuple[LossOptions, Any]:
    """Raise `OptionError` for an invalid value; return the options and num_items as plain numbers.

    Args:
        options: as the caller gave them, unchecked.
        reduction, num_items, outputs: as in `cross_entropy`.
        names: what `outputs` may name.
    """
    if reduction not in REDUCTIONS:
        raise OptionError(f"reduction={reduction!r} is not known; choose one of {', '.join(REDUCTIONS)}.")
    checked = [check(name, value) for check, name, value in zip(_CHECKS, LossOptions._fields, options, strict=True)]
    num_items = check_num_items(num_items)
    if num_items is not None and reduction != "mean":
        raise OptionError(f"num_items divides the mean, but reduction is {reduction!r}. Leave one of them out.")
    check_outputs(outputs, names)
    return LossOptions(*checked), num_items


def check_outputs(outputs: object, names: tuple[str, ...]) -> None:
    """Raise `OptionError` unless `outputs` is a collection of these names."""
    if not isinstance(outputs, _COLLECTIONS):
        raise OptionError(f"outputs={outputs!r} must be a tuple of names; choose from {', '.join(names)}.")
    for name in outputs:
        if name not in names:
            raise OptionError(f"outputs names {name!r}; choose from {', '.join(names)}.")


def check_num_items(num_items: object) -> Any:
    """Return the denominator as a number, a tensor or None; raise if it is not a count.

    A tensor's value is checked only with TIGON_CHECK=1, because on a GPU the host would wait for it.
    """
    if num_items is None:
        return None
    if not isinstance(num_items, Tensor):
        value = num_items = check_number("num_items", num_items)
    else:
        if num_items.ndim:
            raise ShapeError(
                f"num_items is {tuple(num_items.shape)}; it must be a number or a tensor without dimensions."
            )
        check_vector("num_items", num_items, ())
        if torch.compiler.is_compiling() or num_items.is_meta or os.environ.get("TIGON_CHECK") != "1":
            return num_items
        value = float(num_items)
    if not 0.0 <= value < math.inf:
        raise OptionError(f"num_items={value} must be a count of tokens, 0 or more; leave it out to count the labels.")
    return num_items


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


def check_chunk_bytes(chunk_bytes: int | None, name: str = "chunk_bytes") -> None:
    """Raise unless `chunk_bytes` is None or a positive integer. name: the option's name in the message."""
    if chunk_bytes is None:
        return
    check_whole(name, chunk_bytes)
    if chunk_bytes <= 0:
        raise OptionError(f"{name}={chunk_bytes} must be positive; leave it out for the default.")


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


# --- labels -----------------------------------------------------------------------------------------------------------


def check_target(target: Tensor, rows: torch.Size, of: str) -> None:
    """Raise unless `target` holds class indices, one for each row of `of`."""
    if target.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"target is {target.dtype}; the limit is int64 and int32 class indices. Cast it.")
    if target.shape != rows:
        raise ShapeError(f"target is {tuple(target.shape)}, {of} has rows {tuple(rows)}; they must agree.")


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


class TokenLabels(NamedTuple):
    """The labels of some tokens, and the weights of their losses and gradients."""

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    grad_scale: Tensor
    """0-dim; gradients are for an upstream gradient of 1 / grad_scale."""

    def part(self, rows: slice) -> TokenLabels:
        token_weight = None if self.token_weight is None else self.token_weight[rows]
        return self._replace(target=self.target[rows], token_weight=token_weight)


# --- the tokens that count ---

_LEFT_OUT = 1 / 64


def worth_gathering(index_N: Tensor, rows: int) -> Tensor | None:
    """`index_N`, or None if it lacks so few rows that computing all rows is cheaper than gathering the others.

    Gathering copies N·H elements, and scattering the gradients copies as many again. In every text the last label is
    ignored, which is about one row in a thousand.
    """
    return index_N if rows - index_N.shape[0] > _LEFT_OUT * rows else None


def may_wait(target: Tensor) -> bool:
    """Whether the host may read `target`: not while compiling, tracing fakes or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or type(target) is not Tensor or target.is_meta or not target.numel():
        return False
    return not (target.is_cuda and torch.cuda.is_current_stream_capturing())


def planned_tokens(trace: dispatch.Planned, tokens: int) -> Tensor:
    """Stands for the flat positions of the tokens that count in a traced micro-batch."""
    return torch.empty(tokens - trace.ignored, dtype=torch.int64)


def tokens_that_count(labels: Tensor, counts: Callable[[], Tensor], *, wait_pays: bool = True) -> Tensor | None:
    """Flat positions of the tokens that count, or None to compute all.

    All are computed if few are left out, if the host cannot wait for their number, or if the wait does not pay.

    Args:
        labels: decide whether the host may wait.
        counts: makes a bool per token, (N,).
        wait_pays: whether the products of all tokens take longer than a wait of a GPU.
    """
    if (trace := dispatch.planned()) is not None:
        few = not (trace.ignored and wait_pays)
        return None if few else worth_gathering(planned_tokens(trace, labels.shape[0]), labels.shape[0])
    if not may_wait(labels) or (labels.is_cuda and not wait_pays):
        return None
    counts_N = counts()
    return worth_gathering(counts_N.nonzero().squeeze(1), counts_N.numel())


class CountedTokens(NamedTuple):
    """The tokens that are not ignored, among all tokens of a call."""

    index_N: Tensor | None
    """Their flat positions; None for all."""
    tokens: int
    """All tokens."""

    def take(self, values: Tensor | None) -> Tensor | None:
        """The values of the tokens that count, of values of all tokens."""
        return values if values is None or self.index_N is None else values.index_select(0, self.index_N)

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """The values of all tokens, of those of the tokens that count; `fill` for the others."""
        if self.index_N is None:
            return values
        return values.new_full((self.tokens, *values.shape[1:]), fill).index_copy_(0, self.index_N, values)


# --- denominators -----------------------------------------------------------------------------------------------------


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
