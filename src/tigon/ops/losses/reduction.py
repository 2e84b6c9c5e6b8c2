"""From the losses of rows to the loss: denominators that no host reads, and the scale that fp16 gradients need."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops import dispatch
from tigon.ops.losses.options import LossOptions

# N rows (tokens).


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
